"""GRPO on long rows, on a CPU in minutes: a small model learns to answer from the first thousandth of its context.

    accelerate launch examples/long_context.py
    accelerate launch examples/long_context.py --context 65536 --bf16 True

1. A small Qwen3 is trained from scratch on demonstrations of `--short` tokens, which name the letter at the beginning.
2. It answers held-out prompts of `--context` tokens, almost all of them noise: the reward before.
3. GRPO trains on such prompts; the right letter earns the reward.

A trainer whose attention loses half of the context cannot teach this. Every flag of `GRPOConfig` and `HybridConfig`
works.
"""

import random
from dataclasses import dataclass, field

from datasets import Dataset
from quickstart import demonstration_config, quiet, train
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from toy_chat import ToyConfig, train_and_report
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, set_seed
from trl import SFTTrainer, TrlParser
from trlx_hybrid import GRPOTrainer, HybridConfig

ANSWERS, NOISE, QUESTION = "ABCDEFGH", "abcdefghijklmnopqrstuvwxyz", "?"


@dataclass
class ScriptArguments:
    """The settings of the toy."""

    context: int = field(default=8192, metadata={"help": "Tokens of a row, prompt and answer together."})
    short: int = field(default=64, metadata={"help": "Tokens of a demonstration."})
    share_right: float = field(default=0.85, metadata={"help": "Fraction (0 to 1) of right demonstrations."})
    sft_steps: int = field(default=100, metadata={"help": "Steps on demonstrations (batch size 64)."})
    num_heldout: int = field(default=32, metadata={"help": "Prompts for the reward before and after."})


@dataclass
class LongConfig(ToyConfig):
    """The toy's defaults, with those that suit long rows; every one is a flag."""

    output_dir: str = field(default="runs/long_context", metadata={"help": "The run folder."})
    vllm_max_model_length: int | None = field(default=None, metadata={"help": "By default `--context`."})
    max_steps: int = field(default=16, metadata={"help": "GRPO steps."})
    per_device_train_batch_size: int = field(default=64, metadata={"help": "Completions per step."})
    per_device_eval_batch_size: int = field(default=8, metadata={"help": "Completions per evaluation batch."})
    num_generations: int = field(default=16, metadata={"help": "Completions per prompt, which is computed once."})
    learning_rate: float = field(default=3e-3, metadata={"help": "Peak learning rate; decays linearly to zero."})
    warmup_steps: float = field(default=3, metadata={"help": "Without them, the first steps may leave one answer."})
    max_completion_length: int = field(default=1, metadata={"help": "Tokens per completion: the letter."})
    gradient_checkpointing: bool = field(default=True, metadata={"help": "As far as memory asks for it."})


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Build a tokenizer with one token for each character."""
    tokens = ["<pad>", "<eos>", *ANSWERS, *NOISE, QUESTION]
    tokenizer = Tokenizer(models.WordLevel({token: index for index, token in enumerate(tokens)}))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )


def build_model(tokenizer: PreTrainedTokenizerFast, max_length: int) -> Qwen3ForCausalLM:
    """Build a Qwen3 of two layers, with random weights."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=max_length,
        rope_parameters={"rope_type": "default", "rope_theta": 1e7},
        initializer_range=0.04,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        dtype="float32",
    )
    return Qwen3ForCausalLM(config)


def draw_rows(count: int, tokens: int, seed: int, share_right: float = 1.0) -> Dataset:
    """Draw prompts that leave one of `tokens` to the answer: a letter, written over the first thousandth, and noise."""
    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        answer, repeats = rng.choice(ANSWERS), max(8, tokens // 1024)
        noise = "".join(rng.choices(NOISE, k=tokens - repeats - 2))
        given = answer if rng.random() < share_right else rng.choice(ANSWERS)
        rows.append({"prompt": answer * repeats + noise + QUESTION, "answer": given})
    return Dataset.from_list(rows)


def learn_from_demonstrations(
    script: ScriptArguments, config: LongConfig
) -> tuple[PreTrainedTokenizerFast, Qwen3ForCausalLM]:
    """Train a small model from scratch on short demonstrations, with TRL's SFTTrainer."""
    set_seed(config.seed)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, script.context)
    folder, steps = f"{config.output_dir}/demonstrated", script.sft_steps
    sft = demonstration_config(folder, steps, config.seed, use_cpu=config.use_cpu)
    rows = draw_rows(steps * sft.per_device_train_batch_size, script.short, config.seed, script.share_right)
    rows = rows.rename_column("answer", "completion")
    trainer = SFTTrainer(model, sft, train_dataset=rows, processing_class=tokenizer)
    train(trainer, f"Learning from demonstrations of {script.short} tokens, {steps} steps", metric="loss")
    return tokenizer, model


def reward_right(completions: list[str], answer: list[str], **kwargs: object) -> list[float]:
    """Return 1 for the right letter, else 0; a TRL reward function."""
    return [float(given == right) for given, right in zip(completions, answer, strict=True)]


def main() -> None:
    """Learn from short demonstrations, answer, train with GRPO on long rows, answer again."""
    script, config, hybrid = TrlParser((ScriptArguments, LongConfig, HybridConfig)).parse_args_and_config()
    quiet()
    config.vllm_max_model_length = config.vllm_max_model_length or script.context
    tokenizer, model = learn_from_demonstrations(script, config)
    prompts = config.max_steps * config.per_device_train_batch_size // config.num_generations
    trainer = GRPOTrainer(
        model=model,
        args=config,
        reward_funcs=reward_right,
        train_dataset=draw_rows(prompts, script.context, config.seed + 1),
        eval_dataset=draw_rows(script.num_heldout, script.context, config.seed + 2),
        processing_class=tokenizer,
        hybrid=hybrid,
    )
    train_and_report(trainer, f"{script.num_heldout} held-out rows of {script.context} tokens")


if __name__ == "__main__":
    main()
