"""Seconds that the checks of a GRPO step take, beside the whole step.

Each check is timed where it runs, from an idle device to an idle device, in the hybrid trainer's steps of the benchmark
`step`. `fingerprint` reads all weights, `sample` compares some of the tensors that a sync moved, and `batch` compares
the engine's log-probs with the trainer's. The first step also proves all tensors and scores a probe; it is reported
apart, as `first`.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .harness import Measurement, Timed
from .result import Result, accelerator, publish_each
from .rollout import SCALES, write_model
from .scale import Scale, Variant
from .step import BATCH, BUILD_SECONDS, HYBRID, KINDS, LENGTHS, STEP_SECONDS
from .stepping import Stepper
from .worker import Worker, wait_until_built

CHECKS = {"_taken": "fingerprint", "_check_bits": "sample", "_check_log_probs": "probe", "check_batch": "batch"}
"""The timed methods of `WeightVersions`, and their names in this benchmark."""


class CheckedStepper(Stepper):
    """A trainer of ours that records the seconds of each check as a span."""

    def __init__(self, folder: str, scale: Scale, variant: Variant, steps: int) -> None:
        super().__init__("hybrid", folder, scale, variant, BATCH, steps)

    def _note_rollouts(self) -> None:
        super()._note_rollouts()
        versions: Any = self._trainer.session.versions
        for method, name in CHECKS.items():
            setattr(versions, method, self._timed_whole(getattr(versions, method), name))

    def _timed_whole(self, function: Any, name: str) -> Any:
        """Return the function with keyword arguments, its seconds added up as a span."""
        return lambda *arguments, **named: self._timed(functools.partial(function, **named), name)(*arguments)


def seconds_of_checks(spans: dict[str, float]) -> float:
    """Return the seconds of all checks of a step."""
    return sum(spans.get(name, 0.0) for name in CHECKS.values())


def run(folder: Path, model: str, kind: str, lengths: str, warmup: int, measured: int) -> Result:
    """Measure one kind of training with one distribution of lengths."""
    case = kind if lengths == "fixed" else f"{kind}-{lengths}"
    scale = dataclasses.replace(SCALES[model], cases=(LENGTHS[model][lengths],))
    if not (folder / "config.json").exists():
        write_model(folder, scale)
    variant = dataclasses.replace(KINDS[kind], hybrid=HYBRID)
    steps = warmup + measured
    timed: list[Timed] = []
    spans: list[dict[str, float]] = []
    with Worker("hybrid", CheckedStepper, str(folder), scale, variant, steps + 1) as worker:
        wait_until_built([worker], BUILD_SECONDS)
        for step in range(steps):
            timed.append(worker.call("step", step, seconds=STEP_SECONDS))
            spans.append(worker.call("split", seconds=STEP_SECONDS))
        path = worker.call("engine_weights", seconds=STEP_SECONDS)
    checks = tuple(map(seconds_of_checks, spans))
    wholes = tuple(step.seconds for step in timed)
    measurements = [Measurement("step", wholes[warmup:], case), Measurement("checks", checks[warmup:], case)]
    shares = [part / whole for part, whole in zip(checks[warmup:], wholes[warmup:], strict=True)]
    metrics = {f"checks_share_{case}": statistics.median(shares), f"checks_seconds_first_{case}": checks[0]}
    for name in CHECKS.values():
        metrics[f"{name}_ms_{case}"] = 1e3 * statistics.median(span.get(name, 0.0) for span in spans[warmup:])
    return Result(
        benchmark="checks" if model == "1.5b" else f"checks_{model}",
        device=accelerator(),
        peer="step",
        measurements=measurements,
        metrics=metrics,
        settings={"model": model, "config": dict(scale.config), "weights": {case: path}},
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checks", description=__doc__)
    parser.add_argument("--model", choices=sorted(LENGTHS), default="1.5b", help="tiny is for trying it on a CPU")
    parser.add_argument(
        "--kind", choices=list(KINDS), action="append", help="may be repeated; default: full, fp32, lora"
    )
    parser.add_argument("--lengths", choices=list(LENGTHS["1.5b"]), default="fixed", help="(default: fixed)")
    parser.add_argument("--warmup", type=int, default=2, help="steps that are not measured (default: 2)")
    parser.add_argument("--measured", type=int, default=6, help="(default: 6)")
    parser.add_argument("--add", action="store_true", help="keep the other cases of the result file")
    given = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="benchmark-checks-", ignore_cleanup_errors=True) as folder:
        size = given.model, given.lengths, given.warmup, given.measured
        cases = {
            kind: functools.partial(run, Path(folder), size[0], kind, *size[1:])
            for kind in given.kind or ["full", "fp32", "lora"]
        }
        publish_each(cases, add=given.add)


if __name__ == "__main__":
    main()
