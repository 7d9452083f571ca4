"""One training of real weights, run as a child of `benchmarks.real`: a user's script, but for its clock. It prints its
curves as JSON.

    python -m benchmarks.real_run '{"arm": "import", "kind": "full", "seed": 0, "steps": 100, "model": "smollm2",
    "folder": "/tmp/x"}'

The task is the sum of two numbers with two digits; the reward is 1 where the last number of the answer is right.
"""

from __future__ import annotations

import importlib
import json
import random
import re
import sys
import time
from itertools import pairwise
from typing import Any

from .child import answer
from .real import HELD_OUT, LEARNING_RATES, ROWS, Run

LOGGED = {
    "reward": "reward",
    "gap": "sampling/sampling_logp_difference/mean",
    "ratio": "sampling/importance_sampling_ratio/mean",
    "entropy": "entropy",
    "length": "completions/mean_length",
}
"""The curves that are kept, and the names under which the trainer logs them."""


def tasks(count: int, seed: int) -> list[dict[str, Any]]:
    """Return sums as rows of a dataset, with their answers."""
    draw = random.Random(seed)
    pairs = [(draw.randint(10, 99), draw.randint(10, 99)) for _ in range(count)]
    asked = "What is {} + {}? Answer with the number only."
    return [{"prompt": [{"role": "user", "content": asked.format(a, b)}], "answer": a + b} for a, b in pairs]


def right(completions: list[list[dict[str, str]]], answer: list[int], **others: Any) -> list[float]:
    """Return 1.0 for each completion whose last number is the answer, else 0.0."""
    found = [re.findall(r"-?\d+", completion[0]["content"]) for completion in completions]
    return [float(bool(numbers) and int(numbers[-1]) == wanted) for numbers, wanted in zip(found, answer, strict=True)]


def clock() -> Any:
    """Return a callback that takes the time of each step, from the end of the one before, in its list `at`."""
    import torch
    from transformers import TrainerCallback

    class Clock(TrainerCallback):  # type: ignore[misc]
        """Takes the time of each step, from the end of the one before."""

        def __init__(self) -> None:
            self.at: list[float] = []

        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            if not self.at:
                self._now()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            self._now()

        def _now(self) -> None:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.at.append(time.perf_counter())

    return Clock()


def arguments(run: Run) -> Any:
    """Return the trainer's arguments for a training."""
    import torch
    from trl import GRPOConfig

    on_gpu, tuned = torch.cuda.is_available(), run.arm == "tuned"
    return GRPOConfig(
        output_dir=run.folder,
        per_device_train_batch_size=ROWS,
        gradient_accumulation_steps=run.sequences // ROWS,
        num_generations=8,
        max_completion_length=run.longest,
        use_vllm=True,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=0.3,
        vllm_max_model_length=run.longest + 320,
        vllm_enable_sleep_mode=on_gpu and not tuned,
        gradient_checkpointing=not tuned,
        max_steps=run.steps,
        logging_steps=1,
        bf16=on_gpu,
        use_cpu=not on_gpu,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        learning_rate=LEARNING_RATES[run.kind],
        lr_scheduler_type="constant",
        seed=run.seed,
        model_init_kwargs={"dtype": "float32"},
    )


def main(argument: str) -> None:
    begun = time.perf_counter()
    run = Run(**json.loads(argument))
    package: Any = importlib.import_module("trlx_hybrid" if run.arm == "import" else "trl")
    from datasets import Dataset
    from peft import LoraConfig

    trainer = package.GRPOTrainer(
        model=run.model,
        reward_funcs=right,
        args=arguments(run),
        train_dataset=Dataset.from_list(tasks(4096, seed=1)),
        eval_dataset=Dataset.from_list(tasks(HELD_OUT, seed=2)),
        peft_config=LoraConfig(r=16, target_modules="all-linear") if run.kind == "lora" else None,
        callbacks=[steps := clock()],
    )
    trainer.train()
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    curves = {name: [entry.get(key) for entry in log] for name, key in LOGGED.items()}
    at = steps.at
    answer(
        {
            "startup": at[0] - begun,
            "seconds": [later - earlier for earlier, later in pairwise(at)],
            "held_out": trainer.evaluate()["eval_reward"],
            **curves,
        }
    )


if __name__ == "__main__":
    main(sys.argv[1])
