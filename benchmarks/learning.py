"""Reward curves of the quickstart with TRL's scoring and with packed rows, which must overlap over the seeds.

Both arms train the quickstart's model from the same demonstrations, `full` all its weights and `lora` an adapter, with
the engine inside. `padded` is TRL's own scoring; `packed` has everything that changes results only by rounding: no
padding, old log-probs from the first loss forward, LoRA layers in fewer passes, and gradient checkpointing as far as
memory requires it. Where rounding makes an arm sample another word, the curves of a seed diverge, so they are compared
with the difference that another seed makes in `padded`.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .harness import Measurement
from .result import Result, accelerator
from .step import HYBRID

EXAMPLES = Path(__file__).parent.parent / "examples"
ARMS: Mapping[str, Mapping[str, Any]] = {"padded": {"scoring": "padded"}, "packed": HYBRID}
KINDS = ("full", "lora")
END = 10
"""The number of last steps whose mean reward is what a run has learned."""

Curves = dict[str, dict[str, list[list[float]]]]


def train(kind: str, arm: str, seed: int, steps: int, folder: str) -> tuple[float, list[float]]:
    """Return the seconds of one run, and the mean reward of each of its steps."""
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import PrinterCallback
    from trlx_hybrid import GRPOTrainer

    sys.path.insert(0, str(EXAMPLES))
    quickstart: Any = importlib.import_module("quickstart")
    script = quickstart.ScriptArguments()
    tasks = quickstart.draw_tasks(script.num_heldout + script.num_tasks, seed)[script.num_heldout :]
    adapters = {"r": 16, "lora_alpha": 32, "target_modules": "all-linear"}
    config = quickstart.QuickstartConfig(
        output_dir=f"{folder}/run",
        max_steps=steps,
        seed=seed,
        gradient_checkpointing=True,
        disable_tqdm=True,
        learning_rate=5e-3 if kind == "lora" else 1e-3,
    )
    trainer = GRPOTrainer(
        model=str(quickstart.demonstrated_policy(script, tasks, seed)),
        args=config,
        reward_funcs=quickstart.reward_right,
        train_dataset=Dataset.from_list([{"prompt": quickstart.prompt(task), "task": task} for task in tasks]),
        peft_config=LoraConfig(**adapters) if kind == "lora" else None,
        hybrid=ARMS[arm],
    )
    trainer.remove_callback(PrinterCallback)
    started = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - started
    note = trainer.session.scoring.note() or ""
    if arm == "packed" and "rows are packed" not in note:
        raise RuntimeError(f"The arm `packed` is not: {note}")
    trainer.session.close()
    return seconds, [float(entry["reward"]) for entry in trainer.state.log_history if "reward" in entry]


def metrics_of(curves: Curves) -> dict[str, float]:
    """Return the metrics of all runs.

    They are: what each arm has learned (mean over seeds), the gap between the arms, the spread of the seeds of TRL's
    scoring, and the share of steps in which the ranges of the two arms' seeds overlap.
    """
    metrics: dict[str, float] = {}
    for kind, arms in curves.items():
        learned = {arm: [statistics.fmean(curve[-END:]) for curve in found] for arm, found in arms.items()}
        means = {arm: statistics.fmean(values) for arm, values in learned.items()}
        spread = max(learned["padded"]) - min(learned["padded"])
        ranges = {arm: [(min(at), max(at)) for at in zip(*found, strict=True)] for arm, found in arms.items()}
        overlaps = [a[0] <= b[1] and b[0] <= a[1] for a, b in zip(*ranges.values(), strict=True)]
        metrics |= {f"reward_{arm}_{kind}": mean for arm, mean in means.items()}
        metrics[f"reward_gap_{kind}"] = abs(means["packed"] - means["padded"])
        metrics[f"reward_spread_of_seeds_{kind}"] = spread
        metrics[f"reward_gap_over_spread_{kind}"] = metrics[f"reward_gap_{kind}"] / max(spread, 1e-3)
        metrics[f"steps_that_overlap_{kind}"] = statistics.fmean(overlaps)
    return metrics


def run(kinds: Sequence[str], seeds: int, steps: int) -> Result:
    measured: list[Measurement] = []
    curves: Curves = {}
    for kind in kinds:
        curves[kind] = {arm: [] for arm in ARMS}
        seconds: dict[str, list[float]] = {arm: [] for arm in ARMS}
        for seed in range(seeds):
            for arm in ARMS:
                with tempfile.TemporaryDirectory(prefix="benchmark-learning-") as folder:
                    took, curve = train(kind, arm, seed, steps, folder)
                print(f"{kind}, {arm}, seed {seed}: {statistics.fmean(curve[-END:]):.3f} in {took:.0f} s", flush=True)
                seconds[arm].append(took)
                curves[kind][arm].append(curve)
        measured += [Measurement(arm, tuple(took), kind) for arm, took in seconds.items()]
    return Result(
        benchmark="learning",
        device=accelerator(),
        peer="padded",
        measurements=measured,
        metrics=metrics_of(curves),
        settings={"steps": steps, "packed": dict(HYBRID), "reward_by_step": curves},
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.learning", description=__doc__)
    parser.add_argument("--kind", choices=KINDS, action="append", help="may be repeated; default: all")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each arm (default: 3)")
    parser.add_argument("--steps", type=int, default=40, help="GRPO steps of a run (default: 40)")
    arguments = parser.parse_args(argv)
    run(arguments.kind or KINDS, arguments.seeds, arguments.steps).publish()


if __name__ == "__main__":
    main()
