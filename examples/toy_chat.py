"""Chat models small enough for two CPU cores, with Qwen3's own chat template.

Qwen3 writes several hundred characters around each task: the tools' schema, the roles, the braces of a call. They never
vary, and reading them letter by letter would take most of a run. So each tokenizer is made for one kind of
conversation: constant text becomes single tokens, the rest characters or words.
"""

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from datasets import Dataset
from quickstart import demonstration_config, plot_rewards, train
from tokenizers import Tokenizer, decoders, models
from toy_task import build_model
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM, set_seed
from trl import GRPOConfig, SFTTrainer

Conversation = list[dict[str, Any]]

BLANK = "¤"  # placeholder for the parts of a conversation that vary
SPECIAL = ("<pad>", "<|im_start|>", "<|im_end|>")
SPOKEN = ("assistant\n", "<think>\n\n</think>\n\n")  # the end of a prompt, and the beginning of the model's turn


@dataclass
class ToyConfig(GRPOConfig):
    """`GRPOConfig` with defaults that suit a toy of several turns; every one is a flag."""

    use_vllm: bool = field(default=True, metadata={"help": "Sample with vLLM."})
    vllm_mode: str = field(default="colocate", metadata={"help": "vLLM runs in this process."})
    vllm_max_model_length: int = field(default=128, metadata={"help": "Tokens of prompt and completion together."})
    max_steps: int = field(default=30, metadata={"help": "GRPO steps."})
    per_device_train_batch_size: int = field(default=128, metadata={"help": "Conversations per step."})
    per_device_eval_batch_size: int = field(default=128, metadata={"help": "Conversations per evaluation batch."})
    num_generations: int = field(default=8, metadata={"help": "Conversations per prompt."})
    num_generations_eval: int = field(default=2, metadata={"help": "Conversations per evaluation prompt."})
    max_completion_length: int = field(default=64, metadata={"help": "Tokens of all turns and answers together."})
    learning_rate: float = field(default=1e-3, metadata={"help": "Peak learning rate; decays linearly to zero."})
    adam_beta2: float = field(default=0.98, metadata={"help": "A short memory, for a short run."})
    bf16: bool = field(default=False, metadata={"help": "fp32 is fast enough for a model this small."})
    gradient_checkpointing: bool = field(default=False, metadata={"help": "Saves no memory worth having here."})
    dataloader_pin_memory: bool = field(default=False, metadata={"help": "Only GPUs have use for pinned memory."})
    logging_steps: float = field(default=1, metadata={"help": "One point of the plot per step."})
    save_strategy: str = field(default="no", metadata={"help": "Only the final model is saved."})
    report_to: str = field(default="none", metadata={"help": "Trackers to report to."})


def build_chat_tokenizer(
    examples: Sequence[Conversation], words: Sequence[str], tools: Sequence[Callable[..., Any]] = ()
) -> PreTrainedTokenizerFast:
    """Build a tokenizer for conversations like `examples`, in which `BLANK` stands for text made of `words`."""
    template = files("trl").joinpath("chat_templates", "qwen3.jinja").read_text(encoding="utf-8")
    bare = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({})), chat_template=template)
    constant: dict[str, float] = {}
    for example in examples:
        text = bare.apply_chat_template(example, tools=list(tools) or None, tokenize=False)
        pieces = re.split("|".join(map(re.escape, (*SPECIAL, *SPOKEN, BLANK))), text)
        constant |= dict.fromkeys(filter(None, pieces), -1.0)
    constant |= dict.fromkeys(SPOKEN, -1.0)
    vocabulary = dict.fromkeys(SPECIAL, 0.0) | dict.fromkeys(words, -1.0) | constant
    tokenizer = Tokenizer(models.Unigram(list(vocabulary.items()), unk_id=0))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=template,
        padding_side="left",
    )


def learn_from_demonstrations(
    demonstrate: Callable[[random.Random], Conversation],
    tokenizer: PreTrainedTokenizerFast,
    config: GRPOConfig,
    steps: int,
    tools: Sequence[Callable[..., Any]] = (),
) -> Qwen3ForCausalLM:
    """Train a small model from scratch with TRL's SFTTrainer, on what the assistant says in demonstrations."""
    set_seed(config.seed)
    rng = random.Random(config.seed)
    more = {"assistant_only_loss": True, "use_cpu": config.use_cpu}
    sft = demonstration_config(f"{config.output_dir}/demonstrated", steps, config.seed, **more)
    demonstrations = Dataset.from_list(
        [{"messages": demonstrate(rng)} for _ in range(steps * sft.per_device_train_batch_size)]
    )
    if tools:
        schemas = [schema_of(tool) for tool in tools]
        demonstrations = demonstrations.add_column("tools", [schemas] * len(demonstrations))
    model = build_model(tokenizer, max_length=config.vllm_max_model_length)
    trainer = SFTTrainer(model, sft, train_dataset=demonstrations, processing_class=tokenizer)
    train(trainer, f"Learning from demonstrations, {steps} steps of 64", metric="loss")
    return model


def schema_of(tool: Callable[..., Any]) -> dict[str, Any]:
    """Return a tool's JSON schema, as chat templates describe it."""
    from transformers.utils import get_json_schema

    schema: dict[str, Any] = get_json_schema(tool)
    return schema


def score(trainer: Any) -> float:
    """Return the mean reward of the evaluation tasks, sampled at temperature 1 as in training."""
    trainer.evaluate()
    return float(next(log["eval_reward"] for log in reversed(trainer.state.log_history) if "eval_reward" in log))


def train_and_report(trainer: Any, what: str) -> None:
    """Score, train with GRPO, score again; save the model and a plot of the rewards."""
    config = trainer.args
    print(f"\n{what}, before GRPO")
    before = score(trainer)
    train(
        trainer,
        f"GRPO, {config.max_steps} steps of {config.per_device_train_batch_size} conversations",
        metric="reward",
    )
    print(f"\n{what}, after GRPO")
    after = score(trainer)
    rewards = [float(log["reward"]) for log in trainer.state.log_history if "reward" in log]
    trainer.save_model()
    plot_rewards(rewards, Path(config.output_dir) / "reward.png")
    print(f"\n{what}: mean reward {before:.3f} before GRPO, {after:.3f} after")
    print(f"Run folder: {config.output_dir}  (model, reward.png)")
