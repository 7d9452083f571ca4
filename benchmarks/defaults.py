"""Seconds of whole GRPO steps by the import alone, against the best settings, given one by one.

    python -m benchmarks.defaults --kind full --lengths fixed

The trainer of `import` gets TRL's arguments and nothing else: neither `hybrid=` nor options of plugins. That of
`settings` gets those that results of `benchmarks.step` asked for before they were the default, and an engine whose KV
cache and number of sequences are given. Models, lengths and turns are those of `benchmarks.step`: each trainer in turn
has the device to itself, and the next round reverses the order.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .harness import Measurement, Timed
from .result import Result, accelerator, publish_each
from .rollout import SCALES, write_model
from .step import BATCH, KINDS, LENGTHS, Splits, Turns, in_turns, summary, take_turn
from .stepping import Stepper
from .worker import Worker

ARMS = ("import", "settings")
SETTINGS: dict[str, Any] = {
    "scoring": "packed",
    "scoring_options": {"adaptive_checkpointing": True, "joined": True},
    "plugin_options": {"training": {"lora_layers": True}},
}
"""The fields of `HybridConfig` that the trainer of `settings` gets."""
CHOSEN = tuple(kind for kind in KINDS if kind != "merged")
"""The kinds that the import alone can train: merging an adapter is a setting."""


def run(folder: Path, model: str, kind: str, lengths: str, turns: Turns) -> Result:
    """Measure one case: a kind and a distribution of lengths.

    Args:
        folder: folder of the model, written if missing, and of what vLLM compiled for it.
        model: a key of SCALES.
        kind: one of CHOSEN.
        lengths: a key of LENGTHS[model].
        turns: the schedule.
    """
    case = kind if lengths == "fixed" else f"{kind}-{lengths}"
    scale = dataclasses.replace(SCALES[model], cases=(LENGTHS[model][lengths],))
    if not (folder / "config.json").exists():
        write_model(folder, scale)
    measured, splits = measure(str(folder), scale, kind, case, turns)
    seconds = {m.arm: m.median for m in measured}
    return Result(
        benchmark="defaults" if model == "1.5b" else f"defaults_{model}",
        device=accelerator(),
        peer="settings",
        measurements=measured,
        metrics={f"speed_of_settings_{case}": seconds["settings"] / seconds["import"]},
        settings={
            "model": model,
            "cases": {case: {"turns": dataclasses.asdict(turns), "settings": SETTINGS}},
            "medians_by_span": splits,
        },
    )


def measure(folder: str, scale: Any, kind: str, case: str, turns: Turns) -> tuple[list[Measurement], Splits]:
    """Measure the steps of both trainers; return the times and the median spans."""
    variants = {"import": KINDS[kind], "settings": dataclasses.replace(KINDS[kind], hybrid=SETTINGS)}
    kinds = {"import": "import", "settings": "hybrid"}

    def take(arm: str, turn: int) -> tuple[list[Timed], list[dict[str, float]]]:
        given = kinds[arm], folder, scale, variants[arm], BATCH, turns.steps + 1  # the last one only begins
        with Worker("ours", Stepper, *given) as worker:  # one name, hence one cache of what is compiled
            steps, parts, _ = take_turn(worker, case, turns, None)
        return steps, parts

    seconds, splits = in_turns(ARMS, case, turns, take)
    measured = [Measurement(arm, tuple(values), case) for arm, values in seconds.items()]
    return measured, {f"{arm} {case}": summary(found) for arm, found in splits.items()}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.defaults", description=__doc__)
    parser.add_argument("--model", choices=sorted(LENGTHS), default="1.5b", help="tiny is for trying it on a CPU")
    parser.add_argument("--kind", choices=CHOSEN, action="append", help="may be repeated; default: all")
    names = list(LENGTHS["1.5b"])
    parser.add_argument("--lengths", choices=names, action="append", help="may be repeated; default: fixed, lognormal")
    for field in dataclasses.fields(Turns):
        parser.add_argument(f"--{field.name}", type=int, default=field.default, help=f"(default: {field.default})")
    parser.add_argument("--add", action="store_true", help="keep the other cases of the result file")
    given = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="benchmark-defaults-", ignore_cleanup_errors=True) as folder:
        turns = Turns(given.warmup, given.measured, given.rounds)
        cases = {
            f"{kind} {name}": functools.partial(run, Path(folder), given.model, kind, name, turns)
            for kind, name in itertools.product(given.kind or CHOSEN, given.lengths or ["fixed", "lognormal"])
        }
        publish_each(cases, add=given.add)


if __name__ == "__main__":
    main()
