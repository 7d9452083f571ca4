"""One training of real weights, run as a child of `benchmarks.real`: a user's script, but for its clock. It prints its
curves as JSON.

    python -m benchmarks.real_run '{"task": "sums", "arm": "import", "kind": "full", "seed": 0, "steps": 100, "longest":
    192, "model": "smollm2", "folder": "/tmp/x"}'
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from importlib.resources import files
from typing import Any

from .child import answer
from .real import EVALUATED, IN_FLIGHT, KEPT_AWAKE, ROWS, Run
from .real_tasks import TASKS, Rewards, Task

ACCURACY = "rewards/right/mean"
LOGGED = {
    "reward": "reward",
    "accuracy": ACCURACY,
    "gap": "sampling/sampling_logp_difference/mean",
    "ratio": "sampling/importance_sampling_ratio/mean",
    "entropy": "entropy",
    "length": "completions/mean_length",
    "clipped": "completions/clipped_ratio",
    "calls": "tools/call_frequency",
}
"""The curves that are kept, and the names under which the trainer logs them. What it does not log is None."""


def clock() -> Any:
    """Return a callback that takes the time of each step, from the end of the step or evaluation before.

    Its `begun` is the time at which the first step began, and `seconds` has a number for each step.
    """
    import torch
    from transformers import TrainerCallback

    def now() -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()

    class Clock(TrainerCallback):  # type: ignore[misc]
        """Takes the time of each step."""

        def __init__(self) -> None:
            self.begun: float | None = None
            self.seconds: list[float] = []
            self._since = 0.0

        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            if self.begun is None:
                self.begun = self._since = now()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            ended = now()
            self.seconds.append(ended - self._since)
            self._since = ended

        def on_evaluate(self, *args: Any, **kwargs: Any) -> None:
            self._since = now()

    return Clock()


def arguments(run: Run, task: Task, rewards: Rewards) -> Any:
    """Return the trainer's arguments for a training."""
    import torch
    from trl import GRPOConfig

    on_gpu = torch.cuda.is_available()
    return GRPOConfig(
        output_dir=run.folder,
        per_device_train_batch_size=ROWS,
        gradient_accumulation_steps=run.sequences // ROWS,
        num_generations=8,
        max_completion_length=run.longest,
        use_vllm=True,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=0.3,
        vllm_max_model_length=task.prompt + run.longest,
        vllm_enable_sleep_mode=on_gpu and run.arm not in KEPT_AWAKE,
        gradient_checkpointing=run.arm != "tuned",
        reward_weights=rewards.weights,
        eval_strategy="steps",
        eval_steps=EVALUATED,
        per_device_eval_batch_size=4 * ROWS,
        num_generations_eval=1,
        max_steps=run.steps,
        logging_steps=1,
        bf16=on_gpu,
        use_cpu=not on_gpu,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        learning_rate=task.learning_rates[run.kind],
        lr_scheduler_type="constant",
        seed=run.seed,
        model_init_kwargs={"dtype": "float32"},
    )


def tokenizer_of(model: str, task: Task) -> Any:
    """Return a model's tokenizer; for a task with tools that its chat template cannot show, with one that can."""
    from transformers import AutoTokenizer
    from trl.chat_template_utils import supports_tool_calling

    tokenizer = AutoTokenizer.from_pretrained(model)
    if task.tools and not supports_tool_calling(tokenizer):  # the turns of Qwen 2.5 are marked as SmolLM2's are
        tokenizer.chat_template = files("trl").joinpath("chat_templates", "qwen2_5.jinja").read_text(encoding="utf-8")
    return tokenizer


def trainer_of(run: Run, steps: Any) -> Any:
    """Return the trainer of a run, with its clock."""
    package: Any = importlib.import_module("trl" if run.arm in ("trl", "tuned") else "trlx_hybrid")
    from datasets import Dataset
    from peft import LoraConfig

    task = TASKS[run.task]
    rewards, held_out = task.split()
    further: dict[str, Any] = {"tools": list(task.tools)} if task.tools else {}
    if run.arm in IN_FLIGHT:
        further["hybrid"] = {"engine": "vllm", "rollout_options": {"max_staleness": IN_FLIGHT[run.arm]}}
    return package.GRPOTrainer(
        model=run.model,
        processing_class=tokenizer_of(run.model, task),
        reward_funcs=rewards.functions,
        args=arguments(run, task, rewards),
        train_dataset=Dataset.from_list(rewards.rows),
        eval_dataset=Dataset.from_list(held_out),
        peft_config=LoraConfig(r=16, target_modules="all-linear") if run.kind == "lora" else None,
        callbacks=[steps],
        **further,
    )


def main(argument: str) -> None:
    begun = time.perf_counter()
    run = Run(**json.loads(argument))
    trainer = trainer_of(run, steps := clock())
    trainer.train()
    log = trainer.state.log_history
    trained = [entry for entry in log if "loss" in entry]
    held_out = [(entry["step"], entry[f"eval_{ACCURACY}"]) for entry in log if f"eval_{ACCURACY}" in entry]
    answer(
        {
            "startup": steps.begun - begun,
            "seconds": steps.seconds,
            "held_out": held_out[-1][1],
            "held_out_steps": [step for step, _ in held_out],
            "held_out_accuracy": [accuracy for _, accuracy in held_out],
            **{name: [entry.get(key) for entry in trained] for name, key in LOGGED.items()},
        }
    )


if __name__ == "__main__":
    main(sys.argv[1])
