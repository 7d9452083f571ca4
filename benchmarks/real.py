"""Real weights that learn: reward over seconds, of TRL, of TRL tuned, and of a script that changes the import alone.

    python -m benchmarks.real FOLDER --kind full --arm import --seed 0

FOLDER holds a model that answers small questions, such as SmolLM2-135M-Instruct. `--task` chooses what it learns:
`sums` of two numbers, a task of `reasoning-gym`, which needs the package of this name, or sums with a calculator as a
`tool`, by TRL's `tools=`. A fourth arm, `all`, is ours without sleep mode. Layers are recomputed there only where
memory requires it, so that it leaves gradient checkpointing on, which `tuned` switches off. `--in-flight` compares the
import alone with rows that stay in flight for up to one, two and four optimizer steps (`max_staleness`).

Each training is a process of its own, as a user starts it, and the arms take turns. Questions, learning rates, steps
and batch are the same for all arms, and were fixed before anything was measured. Accuracy on questions that no training
draws is measured every few steps; the seconds of this are left out. Arms that sample alike learn alike over steps, but
for the seed; what differs is how long a step takes. Start-up is counted from the first import to the first step, apart
from the training.
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
from .real_tasks import TASKS
from .result import RESULTS, Result, accelerator, commit, file_of, versions

ARMS = ("trl", "tuned", "import", "all")
"""Stock TRL; TRL without sleep mode and gradient checkpointing, which a model this small allows; ours, by the import
alone; and ours without sleep mode."""

KEPT_AWAKE = ("tuned", "all")
"""The arms without sleep mode."""

IN_FLIGHT = {"staleness-1": 1, "staleness-2": 2, "staleness-4": 4}
"""The arms of `--in-flight` beside `import`, and their `max_staleness`."""

KINDS = ("full", "lora")
ROWS = 16
"""Rows of a micro-batch."""

EVALUATED = 10
"""The number of steps between two evaluations of the held-out questions; the trainer adds one after the last step."""

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
        task, arm, kind, seed: which one.
        steps: optimizer steps.
        model: the model's folder.
        folder: a folder for its output.
        sequences: completions of a step.
        longest: the largest number of tokens of a completion.
    """

    task: str
    arm: str
    kind: str
    seed: int
    steps: int
    model: str
    folder: str
    longest: int
    sequences: int = 128


def train(run: Run) -> dict[str, Any]:
    """Train in a process of its own, and return its curves.

    They are: seconds of `startup`, `seconds` of each step, the curves that `benchmarks.real_run.LOGGED` names, and the
    accuracy on held-out questions, at the end (`held_out`) and after some steps (`held_out_steps`,
    `held_out_accuracy`).

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


Runs = Mapping[str, Mapping[str, Sequence[Mapping[str, Any]]]]
"""Curves of the runs, by kind and arm, one for each seed."""


def learned(curves: Mapping[str, Any]) -> float:
    """Return the reward that a run has learned."""
    return statistics.fmean(curves["reward"][-END:])


def final(arms: Mapping[str, Sequence[Mapping[str, Any]]]) -> float:
    """Return the final reward, of which shares are to be reached: that of the arm that learns least, by its median."""
    return min(statistics.median(map(learned, found)) for found in arms.values())


def metrics_of(runs: Runs, peer: str = "trl") -> dict[str, float]:
    """Return the metrics of all runs, by kind and arm, medians over the seeds.

    They are: seconds of start-up and of a step, the reward that was learned, the accuracy on held-out questions, the
    gap between engine and trainer, and seconds to a share of the final reward: of training alone, and with the
    start-up. Runs that never reach it are counted. Beside them is the share of steps in which the rewards of an arm's
    seeds overlap with those of the arm `peer`.
    """
    metrics: dict[str, float] = {}
    for kind, arms in runs.items():
        for arm, found in arms.items():
            name = f"{arm}_{kind}"
            metrics[f"startup_seconds_{name}"] = statistics.median(c["startup"] for c in found)
            metrics[f"step_seconds_{name}"] = statistics.median(s for c in found for s in c["seconds"][WARM:])
            metrics[f"reward_{name}"] = statistics.median(map(learned, found))
            metrics[f"held_out_{name}"] = statistics.median(c["held_out"] for c in found)
            if gaps := [gap for c in found for gap in c.get("gap", ()) if gap is not None]:
                metrics[f"gap_{name}"] = statistics.median(gaps)
            if peer in arms and arm != peer:
                metrics[f"steps_that_overlap_{name}"] = overlap(found, arms[peer])
            for share in SHARES:
                metrics |= times_to(share, found, final(arms), name)
    return metrics


def times_to(share: float, found: Sequence[Mapping[str, Any]], reward: float, name: str) -> dict[str, float]:
    """Return the metrics of the time to a share of a reward: of an arm and kind, named `name`, with these runs."""
    times = [reached(curves, share * reward) for curves in found]
    known = [time for time in times if time is not None]
    metrics: dict[str, float] = {f"never_at_{share:.0%}_{name}": len(times) - len(known)}
    if known:
        ends = [c["startup"] + time for c, time in zip(found, times, strict=True) if time is not None]
        metrics[f"seconds_to_{share:.0%}_{name}"] = statistics.median(known)
        metrics[f"seconds_from_start_to_{share:.0%}_{name}"] = statistics.median(ends)
    return metrics


def overlap(found: Sequence[Mapping[str, Any]], others: Sequence[Mapping[str, Any]]) -> float:
    """Return the share of steps in which the range of the rewards of some runs overlaps with that of others."""
    ranges = ([(min(at), max(at)) for at in zip(*(c["reward"] for c in runs))] for runs in (found, others))
    return statistics.fmean(a[0] <= b[1] and b[0] <= a[1] for a, b in zip(*ranges))


def never(runs: Runs) -> list[str]:
    """Return a line for each run and share of the final reward that it never reached."""
    return [
        f"{kind}, {arm}, seed {curves['seed']}: never {share:.0%} of the final reward"
        for kind, arms in runs.items()
        for arm, found in arms.items()
        for curves in found
        for share in SHARES
        if reached(curves, share * final(arms)) is None
    ]


Curves = dict[str, dict[str, list[dict[str, Any]]]]
"""Curves of the runs, by kind and arm, one for each seed."""


def measure(
    name: str,
    model: str,
    kinds: Sequence[str],
    arms: Sequence[str],
    seeds: Sequence[int],
    runs: Curves,
    sizes: Mapping[str, Any],
) -> None:
    """Train each arm with each seed, in turns. The result file is written after each training.

    Args:
        name: that of the result.
        model: the model's folder.
        runs: the runs that the result has already. Those of the same kind, arm and seed are replaced.
        sizes: task, sequences and longest of `Run`; steps, by kind.
    """
    for kind, seed in itertools.product(kinds, seeds):
        of_run = {**sizes, "steps": sizes["steps"][kind]}
        for arm in arms[:: -1 if seed % 2 else 1]:
            with tempfile.TemporaryDirectory(prefix="benchmark-real-") as folder:
                curves = train(Run(arm=arm, kind=kind, seed=seed, model=model, folder=folder, **of_run))
            median = statistics.median(curves["seconds"][WARM:] or curves["seconds"])
            told = f"{median:.2f} s a step, reward {learned(curves):.3f}, held-out accuracy {curves['held_out']:.3f}"
            print(f"{sizes['task']}, {kind}, {arm}, seed {seed}: {told}", flush=True)
            others = [run for run in runs.setdefault(kind, {}).get(arm, []) if run["seed"] != seed]
            curves |= {"seed": seed, "commit": commit()}
            runs[kind][arm] = sorted([*others, curves], key=lambda run: run["seed"])
            result(name, runs, sizes).publish()


def result(name: str, runs: Curves, sizes: Mapping[str, Any]) -> Result:
    """Return the result, called `name`, of runs of these sizes."""
    peer = "trl" if name == named(sizes["task"]) else "import"
    measurements = [
        Measurement(arm, tuple(s for c in found for s in c["seconds"][WARM:]), kind)
        for kind, by_arm in runs.items()
        for arm, found in by_arm.items()
    ]
    return Result(
        benchmark=name,
        device=accelerator(),
        peer=peer,
        measurements=measurements,
        metrics=metrics_of(runs, peer),
        settings={
            **sizes,
            "learning_rates": TASKS[sizes["task"]].learning_rates,
            "never": never(runs),
            "curves": runs,
        },
    )


def named(task: str, in_flight: bool = False) -> str:
    """Return the name of a task's results: that of the benchmark, for the first task, with nothing behind it.

    Args:
        in_flight: whether they compare rows in flight.
    """
    name = "real" if task == "sums" else f"real_{task.replace('-', '_')}"
    return f"{name}_in_flight" if in_flight else name


def earlier(name: str, sizes: Mapping[str, Any], folder: Path = RESULTS) -> Curves:
    """Return the runs of this device's result of this name, which later ones are added to; none if there is no such
    result.

    Raises:
        SystemExit: they were measured with other sizes or versions.
    """
    file = file_of(name, accelerator(), folder)
    if not file.exists():
        return {}
    content = json.loads(file.read_text())
    settings = content["settings"]
    for what, then, now in [
        *((size, settings[size], number) for size, number in sizes.items()),
        ("learning rates", settings["learning_rates"], TASKS[sizes["task"]].learning_rates),
        ("versions", content["versions"], versions()),
    ]:
        if then != now:
            sys.exit(
                f"Cannot add to {file.name}: its {what} are {then}, and now {now}. Measure all again, without --add."
            )
    curves: Curves = settings["curves"]
    return curves


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.real", description=__doc__)
    parser.add_argument("model", help="a folder with a chat model and its tokenizer")
    parser.add_argument(
        "--task",
        choices=[*TASKS],
        default="sums",
        help="what is learned; reasoning-gym needs the package reasoning-gym (default: sums)",
    )
    parser.add_argument("--kind", choices=KINDS, action="append", help="may be repeated; default: all")
    parser.add_argument("--in-flight", action="store_true", help="compare rows in flight instead of trainers")
    parser.add_argument(
        "--arm",
        choices=(*ARMS, *IN_FLIGHT),
        action="append",
        help="may be repeated; default: all trainers, or import and all rows in flight",
    )
    parser.add_argument("--seed", type=int, action="append", help="may be repeated; default: 0, 1 and 2")
    parser.add_argument("--steps", type=int, help="optimizer steps of a run (default: the task's)")
    parser.add_argument("--sequences", type=int, default=128, help="completions of a step (default: 128)")
    parser.add_argument("--longest", type=int, help="the largest number of tokens of one (default: the task's)")
    parser.add_argument("--add", action="store_true", help="keep the other runs of an existing result")
    given = parser.parse_args(argv)
    task = TASKS[given.task]
    sizes = {
        "task": given.task,
        "steps": dict(task.steps) if given.steps is None else dict.fromkeys(KINDS, given.steps),
        "sequences": given.sequences,
        "longest": given.longest or task.longest,
    }
    name, arms = named(given.task, given.in_flight), ("import", *IN_FLIGHT) if given.in_flight else ARMS
    if given.arm and not {*given.arm} <= {*arms}:
        parser.error(f"--arm: with{'' if given.in_flight else 'out'} --in-flight the arms are {', '.join(arms)}.")
    runs = earlier(name, sizes) if given.add else {}
    measure(name, given.model, given.kind or KINDS, given.arm or arms, given.seed or (0, 1, 2), runs, sizes)


if __name__ == "__main__":
    main()
