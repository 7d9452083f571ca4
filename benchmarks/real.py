"""Real weights that learn: reward over seconds, of TRL, of TRL tuned, and of a script that changes the import alone.

    python -m benchmarks.real FOLDER --kind full --arm import --seed 0

FOLDER holds a model that answers small questions, such as SmolLM2-135M-Instruct. Each training is a process of its own,
as a user starts it, and the arms take turns. Task, learning rates, steps and batch are the same for all arms, and were
fixed before anything was measured. Arms that sample alike learn alike over steps, but for the seed; what differs is how
long a step takes. Start-up is counted from the first import to the first step, apart from the training.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .child import ask
from .harness import Measurement
from .result import RESULTS, Result, accelerator, commit, versions

ARMS = ("trl", "tuned", "import")
"""Stock TRL; TRL without sleep mode and gradient checkpointing, which a model this small allows; and ours, by the
import alone."""

KINDS = ("full", "lora")
LEARNING_RATES = {"full": 1e-5, "lora": 1e-4}
STEPS = {"full": 60, "lora": 100}
"""The number of optimizer steps of a run, unless another is given."""

ROWS = 16
"""Rows of a micro-batch."""

HELD_OUT = 128
"""The number of tasks that are evaluated after the training."""

WARM = 3
"""The number of first steps that the time of a step leaves out."""

END = 10
"""The number of last steps whose mean reward is what a run has learned."""

SMOOTHED = 5
"""The number of steps whose mean reward has to reach a share of the final one."""

SHARES = (0.5, 0.7, 0.9)
LIMIT = 3600
"""Seconds after which a training is given up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One training.

    Attributes:
        arm, kind, seed: which one.
        steps: optimizer steps.
        model: the model's folder.
        folder: a folder for its output.
        sequences: completions of a step.
        longest: the largest number of tokens of a completion.
    """

    arm: str
    kind: str
    seed: int
    steps: int
    model: str
    folder: str
    sequences: int = 128
    longest: int = 192


def train(run: Run) -> dict[str, Any]:
    """Train in a process of its own, and return its curves: `startup` and `seconds` of each step, `held_out`, and what
    `benchmarks.real_run.LOGGED` names.

    Raises:
        ChildError: the training failed, or took longer than `LIMIT`.
    """
    return ask("benchmarks.real_run", dataclasses.asdict(run), LIMIT)


def reached(curves: Mapping[str, Any], reward: float) -> float | None:
    """Return the seconds of training until the mean reward of some steps reached `reward`; None if it never did."""
    rewards: list[float] = curves["reward"]
    for steps, seconds in enumerate(itertools.accumulate(curves["seconds"], initial=0.0)):
        if steps >= SMOOTHED and statistics.fmean(rewards[steps - SMOOTHED : steps]) >= reward:
            return float(seconds)
    return None


def metrics_of(runs: Mapping[str, Mapping[str, Sequence[Mapping[str, Any]]]]) -> dict[str, float]:
    """Return the metrics of all runs, by kind and arm, medians over the seeds.

    They are: seconds of start-up and of a step, the reward that was learned, the held-out one, and seconds to a share
    of the reward that the slowest learner of the arms ends with: of training alone, and with the start-up. Runs that
    never reach it are counted.
    """
    metrics: dict[str, float] = {}
    for kind, arms in runs.items():
        learned = {arm: [statistics.fmean(c["reward"][-END:]) for c in found] for arm, found in arms.items()}
        final = min(statistics.median(values) for values in learned.values())
        for arm, found in arms.items():
            name = f"{arm}_{kind}"
            metrics[f"startup_seconds_{name}"] = statistics.median(c["startup"] for c in found)
            metrics[f"step_seconds_{name}"] = statistics.median(s for c in found for s in c["seconds"][WARM:])
            metrics[f"reward_{name}"] = statistics.median(learned[arm])
            metrics[f"held_out_{name}"] = statistics.median(c["held_out"] for c in found)
            for share in SHARES:
                times = [reached(c, share * final) for c in found]
                known = [time for time in times if time is not None]
                metrics[f"never_at_{share:.0%}_{name}"] = len(times) - len(known)
                if known:
                    metrics[f"seconds_to_{share:.0%}_{name}"] = statistics.median(known)
                    ends = [c["startup"] + time for c, time in zip(found, times, strict=True) if time is not None]
                    metrics[f"seconds_from_start_to_{share:.0%}_{name}"] = statistics.median(ends)
    return metrics


Curves = dict[str, dict[str, list[dict[str, Any]]]]
"""Curves of the runs, by kind and arm, one for each seed."""


def measure(
    model: str, kinds: Sequence[str], arms: Sequence[str], seeds: Sequence[int], runs: Curves, sizes: Mapping[str, Any]
) -> None:
    """Train each arm with each seed, in turns. The result file is written after each training.

    Args:
        model: the model's folder.
        runs: the runs that the result has already. Those of the same kind, arm and seed are replaced.
        sizes: sequences and longest of `Run`; steps, by kind.
    """
    for kind, seed in itertools.product(kinds, seeds):
        of_run = {**sizes, "steps": sizes["steps"][kind]}
        for arm in arms[:: -1 if seed % 2 else 1]:
            with tempfile.TemporaryDirectory(prefix="benchmark-real-") as folder:
                curves = train(Run(arm=arm, kind=kind, seed=seed, model=model, folder=folder, **of_run))
            median = statistics.median(curves["seconds"][WARM:] or curves["seconds"])
            reward = statistics.fmean(curves["reward"][-END:])
            print(f"{kind}, {arm}, seed {seed}: {median:.2f} s a step, reward {reward:.3f}", flush=True)
            others = [run for run in runs.setdefault(kind, {}).get(arm, []) if run["seed"] != seed]
            curves |= {"seed": seed, "commit": commit()}
            runs[kind][arm] = sorted([*others, curves], key=lambda run: run["seed"])
            result(runs, sizes).publish()


def result(runs: Curves, sizes: Mapping[str, Any]) -> Result:
    """Return the result of runs of these sizes."""
    measurements = [
        Measurement(arm, tuple(s for c in found for s in c["seconds"][WARM:]), kind)
        for kind, by_arm in runs.items()
        for arm, found in by_arm.items()
    ]
    return Result(
        benchmark="real",
        device=accelerator(),
        peer="trl",
        measurements=measurements,
        metrics=metrics_of(runs),
        settings={**sizes, "learning_rates": LEARNING_RATES, "curves": runs},
    )


def earlier(sizes: Mapping[str, Any], folder: Path = RESULTS) -> Curves:
    """Return the runs of this device's result, which later ones are added to; none if there is no such result.

    Raises:
        SystemExit: they were measured with other sizes or versions.
    """
    file = folder / f"real-{accelerator()}.json"
    if not file.exists():
        return {}
    content = json.loads(file.read_text())
    settings = content["settings"]
    for name, then, now in [
        *((size, settings[size], number) for size, number in sizes.items()),
        ("learning rates", settings["learning_rates"], LEARNING_RATES),
        ("versions", content["versions"], versions()),
    ]:
        if then != now:
            sys.exit(
                f"Cannot add to {file.name}: its {name} are {then}, and now {now}. Measure all again, without --add."
            )
    curves: Curves = settings["curves"]
    return curves


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.real", description=__doc__)
    parser.add_argument("model", help="a folder with a chat model and its tokenizer")
    parser.add_argument("--kind", choices=KINDS, action="append", help="may be repeated; default: all")
    parser.add_argument("--arm", choices=ARMS, action="append", help="may be repeated; default: all")
    parser.add_argument("--seed", type=int, action="append", help="may be repeated; default: 0, 1 and 2")
    parser.add_argument("--steps", type=int, help=f"optimizer steps of a run (default: {STEPS})")
    parser.add_argument("--sequences", type=int, default=128, help="completions of a step (default: 128)")
    parser.add_argument("--longest", type=int, default=192, help="the largest number of tokens of one (default: 192)")
    parser.add_argument("--add", action="store_true", help="keep the other runs of an existing result")
    given = parser.parse_args(argv)
    steps = STEPS if given.steps is None else dict.fromkeys(KINDS, given.steps)
    sizes = {"steps": steps, "sequences": given.sequences, "longest": given.longest}
    runs = earlier(sizes) if given.add else {}
    measure(given.model, given.kind or KINDS, given.arm or ARMS, given.seed or (0, 1, 2), runs, sizes)


if __name__ == "__main__":
    main()
