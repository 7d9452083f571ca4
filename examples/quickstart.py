"""GRPO on a CPU in two minutes: a 0.6-million-parameter model learns to spell words backward.

    accelerate launch examples/quickstart.py

What happens, in this order:

1. A small Qwen3 is trained from scratch on demonstrations of which only some are right (kept on disk for later runs).
2. It answers held-out tasks: the accuracy before.
3. GRPO samples with vLLM inside this process; reasoning-gym verifies each answer, and right answers earn the reward.
4. The trained model answers the same held-out tasks: the accuracy after.

Every flag of `GRPOConfig` and `HybridConfig` works (`--algorithm dynamic_sampling`), and `--config file.yaml` too. The
same `--seed` gives the same table.
"""

import hashlib
import json
import random
import tempfile
import warnings
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import datasets
import matplotlib
import torch
from accelerate import PartialState
from datasets import Dataset
from toy_task import Task, build_model, build_tokenizer, demonstrate, draw_tasks, is_right, prompt
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, ProgressCallback, Trainer, set_seed
from transformers.utils.logging import disable_progress_bar
from trl import GRPOConfig, SFTConfig, SFTTrainer, TrlParser
from trlx_hybrid import GRPOTrainer, HybridConfig

matplotlib.use("Agg")
import matplotlib.pyplot as plt

# What the model trained on demonstrations depends on, besides its settings and seed.
PACKAGES = ("torch", "transformers", "trl", "reasoning-gym")


@dataclass
class ScriptArguments:
    """The settings of the toy. `GRPOConfig`'s own flags set the GRPO run itself."""

    num_tasks: int = field(default=10_000, metadata={"help": "Tasks that demonstrations and GRPO are drawn from."})
    num_heldout: int = field(default=1024, metadata={"help": "Tasks kept out of all training, for the accuracy."})
    share_right: float = field(default=0.35, metadata={"help": "Fraction (0 to 1) of correct demonstrations."})
    sft_steps: int = field(default=350, metadata={"help": "SFT steps on demonstrations (batch size 64)."})
    cache_dir: str = field(
        default="~/.cache/trlx_hybrid/quickstart", metadata={"help": "Cache folder of the SFT models."}
    )


@dataclass
class QuickstartConfig(GRPOConfig):
    """`GRPOConfig` with defaults that suit the toy; every one is a flag."""

    output_dir: str = field(default="runs/quickstart", metadata={"help": "The run folder."})
    use_vllm: bool = field(default=True, metadata={"help": "Sample with vLLM."})
    vllm_mode: str = field(default="colocate", metadata={"help": "vLLM runs in this process."})
    max_steps: int = field(default=40, metadata={"help": "GRPO steps."})
    per_device_train_batch_size: int = field(default=256, metadata={"help": "Completions per step."})
    num_generations: int = field(default=8, metadata={"help": "Completions per prompt."})
    max_completion_length: int = field(default=8, metadata={"help": "Tokens per completion."})
    learning_rate: float = field(default=1e-3, metadata={"help": "Peak learning rate; decays linearly to zero."})
    adam_beta2: float = field(default=0.98, metadata={"help": "A short memory, for a short run."})
    bf16: bool = field(default=False, metadata={"help": "fp32 is fast enough for a model this small."})
    gradient_checkpointing: bool = field(default=False, metadata={"help": "Saves no memory worth having here."})
    dataloader_pin_memory: bool = field(default=False, metadata={"help": "Only GPUs have use for pinned memory."})
    logging_steps: float = field(default=1, metadata={"help": "One point of the plot per step."})
    save_strategy: str = field(default="no", metadata={"help": "Only the final model is saved."})
    report_to: str = field(default="none", metadata={"help": "Trackers to report to."})


class MetricBar(ProgressCallback):
    """A progress bar like transformers', with one live number beside it, where the original prints every metric."""

    def __init__(self, metric: str):
        super().__init__()
        self.metric = metric

    def on_log(self, args, state, control, logs=None, **kwargs):
        """Show the metric, when this log has it."""
        if self.training_bar is not None and self.metric in logs:
            self.training_bar.set_postfix({self.metric: f"{float(logs[self.metric]):.2f}"})


def quiet() -> None:
    """Silence other bars, so that the terminal shows training and evaluation; loading and saving take no time here."""
    datasets.disable_progress_bars()
    disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning, message=".*reduce_op.*")  # vLLM 0.31 with torch 2.13


def train(trainer: Trainer, title: str, metric: str) -> None:
    """Run any TRL trainer under a title, with one progress bar."""
    print(f"\n{title}")
    trainer.remove_callback(ProgressCallback)
    trainer.add_callback(MetricBar(metric))
    trainer.train()


def demonstrated_policy(script: ScriptArguments, tasks: list[Task], seed: int) -> Path:
    """Train on demonstrations, or find the model that an earlier run trained in the same way; return its folder."""
    recipe = asdict(script) | {"seed": seed, "device": PartialState().device.type} | {p: version(p) for p in PACKAGES}
    key = hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:16]
    model_dir = Path(script.cache_dir).expanduser() / key
    if model_dir.exists():
        print(f"\nDemonstrations: learned by an earlier run, {model_dir}")
        return model_dir
    model_dir.parent.mkdir(parents=True, exist_ok=True)
    # Renamed into place when complete, so that an interrupted run leaves nothing that looks like a model.
    with tempfile.TemporaryDirectory(dir=model_dir.parent) as scratch:
        train_on_demonstrations(script, tasks, seed, scratch).rename(model_dir)
    return model_dir


def demonstration_config(output_dir: str, steps: int, seed: int, **settings: Any) -> SFTConfig:
    """Return the configuration with which a model this small learns from demonstrations, 64 in each step."""
    return SFTConfig(
        output_dir=output_dir,
        max_steps=steps,
        per_device_train_batch_size=64,
        learning_rate=4e-3,
        adam_beta2=0.98,
        bf16=False,
        gradient_checkpointing=False,
        dataloader_pin_memory=False,
        logging_steps=10,
        save_strategy="no",
        report_to="none",
        seed=seed,
        **settings,
    )


def train_on_demonstrations(script: ScriptArguments, tasks: list[Task], seed: int, scratch: str) -> Path:
    """Train the small model from scratch with TRL's SFTTrainer; return the folder that holds it."""
    set_seed(seed)
    rng = random.Random(seed)
    config = demonstration_config(f"{scratch}/model", script.sft_steps, seed)
    # A task comes back in every epoch with another draw of right or wrong, as if another person demonstrated it.
    epochs = -(-script.sft_steps * config.per_device_train_batch_size // len(tasks))
    demonstrations = Dataset.from_list(
        [{"prompt": prompt(t), "completion": demonstrate(t, script.share_right, rng)} for t in tasks * epochs]
    )
    tokenizer = build_tokenizer()
    trainer = SFTTrainer(build_model(tokenizer), config, train_dataset=demonstrations, processing_class=tokenizer)
    train(trainer, f"Learning from demonstrations, {script.share_right:.0%} of them right", metric="loss")
    trainer.save_model()
    return Path(config.output_dir)


@torch.inference_mode()
def sample_answers(model_dir: Path, tasks: list[Task], seed: int, title: str, batch_size: int = 256) -> list[str]:
    """Sample one answer per task at temperature 1, as in training. Loads the saved model, as its user would."""
    device = PartialState().device
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir).to(device).eval()
    set_seed(seed)
    answers: list[str] = []
    for start in tqdm(range(0, len(tasks), batch_size), desc=title):
        prompts = [prompt(task) for task in tasks[start : start + batch_size]]
        inputs = tokenizer(prompts, padding=True, return_tensors="pt").to(device)
        output = model.generate(**inputs, max_new_tokens=8, do_sample=True, temperature=1.0)
        answers += tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return answers


def accuracy(tasks: list[Task], answers: list[str]) -> float:
    """Return the share of the tasks answered exactly right."""
    return sum(map(is_right, tasks, answers)) / len(tasks)


def reward_right(completions: list[str], task: list[Task], **kwargs) -> list[float]:
    """Return 1 for an answer that reasoning-gym finds right, else 0; a TRL reward function."""
    return [float(is_right(*pair)) for pair in zip(task, completions, strict=True)]


def run_grpo(config: QuickstartConfig, hybrid: HybridConfig, model_dir: Path, tasks: list[Task]) -> list[float]:
    """Train with GRPO, save the model in the run folder and return the mean reward of each step."""
    trainer = GRPOTrainer(
        model=str(model_dir),
        args=config,
        reward_funcs=reward_right,
        train_dataset=Dataset.from_list([{"prompt": prompt(task), "task": task} for task in tasks]),
        hybrid=hybrid,
    )
    train(
        trainer, f"GRPO, {config.max_steps} steps of {config.per_device_train_batch_size} completions", metric="reward"
    )
    trainer.save_model()
    return [float(entry["reward"]) for entry in trainer.state.log_history if "reward" in entry]


def plot_rewards(rewards: list[float], file: Path) -> None:
    """Draw the mean reward of each GRPO step."""
    figure, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
    axes.plot(range(1, len(rewards) + 1), rewards, marker=".")
    axes.set(xlabel="GRPO step", ylabel="mean reward of the step", ylim=(0, 1))
    axes.grid(alpha=0.3)
    figure.savefig(file, dpi=150)
    plt.close(figure)


def report(run_dir: Path, before: list[str], after: list[str], tasks: list[Task], rewards: list[float]) -> None:
    """Print the table and a few answers; write the numbers, the answers and the plot into the run folder."""
    scores = {"before": accuracy(tasks, before), "after": accuracy(tasks, after)}
    plot_rewards(rewards, run_dir / "reward.png")
    answers = [
        {"word": task["metadata"]["word"], "right": task["answer"], "before": old, "after": new}
        for task, old, new in zip(tasks, before, after, strict=True)
    ]
    (run_dir / "results.json").write_text(json.dumps({"accuracy": scores, "rewards": rewards, "answers": answers}))

    print(f"\n{len(tasks)} held-out words, answers sampled at temperature 1\n")
    print(f"            {'before GRPO':>12}{'after GRPO':>12}")
    print(f"  accuracy  {scores['before']:>12.1%}{scores['after']:>12.1%}")
    for answer in answers[:4]:
        before_mark, after_mark = (" ✓" if answer[when] == answer["right"] else "  " for when in ("before", "after"))
        print(f"  {answer['word']:<10}{answer['before']:>10}{before_mark}{answer['after']:>10}{after_mark}".rstrip())
    print("  ✓ right")
    print(f"\nRun folder: {run_dir}  (model, reward.png, results.json)")


def main() -> None:
    """Learn from demonstrations, measure, train with GRPO, measure again."""
    script, config, hybrid = TrlParser((ScriptArguments, QuickstartConfig, HybridConfig)).parse_args_and_config()
    if PartialState().num_processes > 1:
        raise SystemExit("The quickstart is a job for one process: accelerate launch --num_processes 1 ...")
    quiet()
    tasks = draw_tasks(script.num_heldout + script.num_tasks, config.seed)
    heldout, training = tasks[: script.num_heldout], tasks[script.num_heldout :]

    model_dir = demonstrated_policy(script, training, config.seed)
    before = sample_answers(model_dir, heldout, config.seed, "Held-out tasks, before GRPO")
    rewards = run_grpo(config, hybrid, model_dir, training)
    after = sample_answers(Path(config.output_dir), heldout, config.seed, "Held-out tasks, after GRPO")
    report(Path(config.output_dir), before, after, heldout, rewards)


if __name__ == "__main__":
    main()
