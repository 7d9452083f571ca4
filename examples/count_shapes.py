"""GRPO with pictures, on a CPU in minutes: a tiny Qwen2.5-VL learns to count the squares that it sees.

    accelerate launch examples/count_shapes.py

1. The model is trained from scratch on pictures with answers, of which most are one too many.
2. GRPO samples with vLLM inside this process, pictures included; a right count earns the reward.
3. Pictures that it never saw are counted before and after.

The vision tower is trained, too. `--use_vllm False` samples with transformers instead. Processors of pictures need
torchvision. Every flag of `GRPOConfig` and `HybridConfig` works.
"""

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from datasets import Dataset
from PIL import Image
from quickstart import plot_rewards, quiet, train
from tqdm import tqdm
from transformers import set_seed
from trl import GRPOConfig, TrlParser
from trlx_hybrid import GRPOTrainer, HybridConfig
from trlx_hybrid.testing.models import tiny_vision_model

PATCH, SIDE = 14, 4  # pixels of a patch, and patches of a picture's side
MOST = 6
QUESTION = [{"role": "user", "content": "how many squares? "}]


@dataclass
class ScriptArguments:
    """The settings of the toy."""

    share_right: float = field(default=0.35, metadata={"help": "Fraction (0 to 1) of right demonstrations."})
    demonstration_steps: int = field(default=400, metadata={"help": "Steps on demonstrations (batch size 64)."})
    num_heldout: int = field(default=512, metadata={"help": "Pictures for the accuracy."})


@dataclass
class CountConfig(GRPOConfig):
    """`GRPOConfig` with defaults that suit the toy; every one is a flag."""

    output_dir: str = field(default="runs/count_shapes", metadata={"help": "The run folder."})
    use_vllm: bool = field(default=True, metadata={"help": "Sample with vLLM."})
    vllm_mode: str = field(default="colocate", metadata={"help": "vLLM runs in this process."})
    vllm_max_model_length: int = field(default=128, metadata={"help": "Tokens of prompt and completion together."})
    max_steps: int = field(default=30, metadata={"help": "GRPO steps."})
    per_device_train_batch_size: int = field(default=128, metadata={"help": "Completions per step."})
    num_generations: int = field(default=8, metadata={"help": "Completions per picture."})
    max_completion_length: int = field(default=4, metadata={"help": "Tokens per completion."})
    learning_rate: float = field(default=5e-4, metadata={"help": "Peak learning rate; decays linearly to zero."})
    bf16: bool = field(default=False, metadata={"help": "fp32 is fast enough for a model this small."})
    gradient_checkpointing: bool = field(default=False, metadata={"help": "Saves no memory worth having here."})
    dataloader_pin_memory: bool = field(default=False, metadata={"help": "Only GPUs have use for pinned memory."})
    logging_steps: float = field(default=1, metadata={"help": "One point of the plot per step."})
    save_strategy: str = field(default="no", metadata={"help": "Only the final model is saved."})
    report_to: str = field(default="none", metadata={"help": "Trackers to report to."})


def draw_picture(squares: int, rng: random.Random) -> Image.Image:
    """Draw squares of random colours on white, each in a patch of its own."""
    picture = Image.new("RGB", (SIDE * PATCH, SIDE * PATCH), "white")
    for place in rng.sample(range(SIDE * SIDE), squares):
        left, top = place % SIDE * PATCH + 2, place // SIDE * PATCH + 2
        colour = tuple(rng.randrange(160) for _ in "rgb")
        picture.paste(colour, (left, top, left + PATCH - 4, top + PATCH - 4))
    return picture


def draw_tasks(count: int, seed: int) -> list[dict[str, Any]]:
    """Draw pictures, each with its number of squares."""
    rng = random.Random(seed)
    numbers = [rng.randint(1, MOST) for _ in range(count)]
    return [{"prompt": QUESTION, "image": draw_picture(number, rng), "squares": number} for number in numbers]


def learn_from_demonstrations(model: Any, processor: Any, script: ScriptArguments, seed: int) -> None:
    """Train on answers of which the share `share_right` is right and the others are one too many."""
    rng, device = random.Random(seed), PartialState().device
    optimizer = torch.optim.AdamW(model.to(device).train().parameters(), lr=2e-3)
    for step in tqdm(range(script.demonstration_steps), desc="Learning from demonstrations"):
        tasks = draw_tasks(64, seed=rng.randrange(2**32))
        answers = [task["squares"] + (rng.random() > script.share_right) for task in tasks]
        inputs = encode(processor, tasks, [f"{answer}{processor.tokenizer.eos_token}" for answer in answers])
        labels = torch.full_like(inputs["input_ids"], -100)
        labels[:, -2:] = inputs["input_ids"][:, -2:]  # a digit, and the end
        optimizer.zero_grad()
        model(**inputs.to(device), labels=labels.to(device)).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1, (step + 1) / 20) * (1 - step / script.demonstration_steps)
        optimizer.step()


def encode(processor: Any, tasks: list[dict[str, Any]], answers: list[str] | None = None) -> Any:
    """Encode prompts with their pictures, followed by the answers if given."""
    content = [{"type": "image"}, {"type": "text", "text": QUESTION[0]["content"]}]
    text = processor.apply_chat_template([{"role": "user", "content": content}], tokenize=False)
    texts = [text + answer for answer in answers] if answers else [text] * len(tasks)
    return processor(text=texts, images=[[task["image"]] for task in tasks], return_tensors="pt")


@torch.inference_mode()
def accuracy(model: Any, processor: Any, tasks: list[dict[str, Any]], seed: int) -> float:
    """Return the share of the pictures that are counted right, sampled at temperature 1 as in training."""
    set_seed(seed)
    model.eval()
    inputs = encode(processor, tasks).to(model.device)
    output = model.generate(**inputs, max_new_tokens=4, do_sample=True, temperature=1.0)
    answers = processor.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return sum(map(is_right, answers, [task["squares"] for task in tasks])) / len(tasks)


def is_right(answer: str, squares: int) -> bool:
    """Return whether the answer is the number of squares, and nothing else."""
    return answer.strip() == str(squares)


def reward_right(completions: list[Any], squares: list[int], **kwargs: Any) -> list[float]:
    """Return 1 for a right count, else 0; a TRL reward function."""
    return [float(is_right(c[-1]["content"], number)) for c, number in zip(completions, squares, strict=True)]


def main() -> None:
    """Learn from demonstrations, count, train with GRPO, count again."""
    script, config, hybrid = TrlParser((ScriptArguments, CountConfig, HybridConfig)).parse_args_and_config()
    quiet()
    set_seed(config.seed)
    model, processor = tiny_vision_model(seed=config.seed)
    learn_from_demonstrations(model, processor, script, config.seed)
    heldout = draw_tasks(script.num_heldout, seed=10**6 + config.seed)
    before = accuracy(model, processor, heldout, config.seed)
    trainer = GRPOTrainer(
        model=model,
        args=config,
        reward_funcs=reward_right,
        train_dataset=Dataset.from_list(draw_tasks(2000, seed=2 * 10**6 + config.seed)),
        processing_class=processor,
        hybrid=hybrid,
    )
    train(trainer, f"GRPO, {config.max_steps} steps of {config.per_device_train_batch_size} answers", metric="reward")
    trainer.save_model()
    after = accuracy(trainer.model, processor, heldout, config.seed)
    rewards = [float(entry["reward"]) for entry in trainer.state.log_history if "reward" in entry]
    plot_rewards(rewards, Path(config.output_dir) / "reward.png")
    print(f"\n{len(heldout)} pictures that were not trained on, answers sampled at temperature 1\n")
    print(f"            {'before GRPO':>12}{'after GRPO':>12}")
    print(f"  accuracy  {before:>12.1%}{after:>12.1%}")
    print(f"\nRun folder: {config.output_dir}  (model, reward.png)")


if __name__ == "__main__":
    main()
