"""Seconds of whole GRPO steps of the hybrid trainer, against TRL's own with colocated vLLM, and TRL's own tuned.

A step is a rollout, its scoring, loss and backward pass in parts of eight rows, the optimizer, and the logging. Each
trainer trains in a process of its own that has the device to itself, as a user's has, with the same reward, prompts and
lengths of completions. Each trainer in turn takes some steps in a row; the next round reverses the order. `trl` and
`hybrid` have the same arguments, TRL's defaults with sleep mode on. `tuned` is TRL's trainer with what a user can set:
tokens are not turned into text, and sleep mode and gradient checkpointing are off where that fits, which is tried.
`hybrid` has what a user of this package would switch on for speed with the same result: see `--hybrid`.

`full` trains all weights in bf16, `fp32` an fp32 master under autocast, `lora` an adapter of rank 16, and `merged` the
same with an engine into which ours merges it. Completions are of one length, or of lengths drawn from a lognormal
distribution, the same rows in all arms. Each kind with each distribution is a case (`full` has fixed lengths), written
as soon as it is measured; a case that fails loses none of the others.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .harness import Measurement, Timed, check_equal
from .lengths import Lengths
from .result import Result, accelerator, publish_each
from .rollout import SCALES, write_model
from .scale import Scale, Variant
from .stepping import Stepper
from .worker import Worker, WorkerError, wait_until_built

BUILD_SECONDS, STEP_SECONDS = 420.0, 300.0
CONTESTANTS = ("trl", "tuned", "hybrid")
KINDS = {
    "full": Variant(sleep=True),
    "fp32": Variant(sleep=True, model_dtype="float32"),
    "lora": Variant(sleep=True, lora_rank=16),
    "merged": Variant(sleep=True, lora_rank=16, weights="merged"),
}
TUNED = ((False, False), (False, True), (True, False), (True, True))
"""Sleep mode and gradient checkpointing of TRL tuned; the first pair that fits is used."""
OUT_OF_MEMORY = ("out of memory", "Free memory on device", "No available memory for the cache blocks")
LENGTHS = {
    "1.5b": {
        "fixed": Lengths(sequences=64, longest=512),
        "lognormal": Lengths(sequences=64, longest=2048, median=512, sigma=0.8),
        "lognormal-256": Lengths(sequences=256, longest=4096, median=700, sigma=1.0),
    },
    "tiny": {
        "fixed": Lengths(sequences=16, longest=16),
        "lognormal": Lengths(sequences=16, longest=32, median=8, sigma=0.8),
    },
}
LENGTHS["7b"] = LENGTHS["1.5b"]
BATCH = 8  # rows of a forward pass
HYBRID: dict[str, Any] = {}
"""The settings of our trainer: none, since a user who changes the import passes none. Earlier results had asked for
packed rows, adaptive checkpointing, joined micro-batches and LoRA layers, which are the default now."""

Splits = dict[str, dict[str, float]]
Turn = tuple[list[Timed], list[dict[str, float]], str]
"""The result of a turn: its steps, the spans of the measured steps, and our weight path."""


@dataclass(frozen=True, slots=True)
class Turns:
    """The schedule of the trainers' turns.

    Attributes:
        warmup: steps of a turn that are not measured, at least one: the first shows what fits.
        measured: steps of a turn that are measured.
        rounds: how many turns each trainer has; the order is reversed from one round to the next.
    """

    warmup: int = 2
    measured: int = 5
    rounds: int = 2

    @property
    def steps(self) -> int:
        """The steps of one turn."""
        return self.warmup + self.measured


def measure(
    folder: str, scale: Scale, kind: str, hybrid: Mapping[str, Any], case: str, turns: Turns, profiles: str | None
) -> tuple[list[Measurement], Splits, dict[str, bool]]:
    """Measure the steps of all trainers; return the times, the median spans, and the settings of TRL tuned."""
    variants = {
        "trl": [KINDS[kind]],
        "tuned": [tuned_variant(kind, *pair) for pair in TUNED],
        "hybrid": [dataclasses.replace(KINDS[kind], hybrid=hybrid)],
    }
    path = ""

    def take(name: str, turn: int) -> tuple[list[Timed], list[dict[str, float]]]:
        nonlocal path
        profiled = bool(profiles) and name == "hybrid" and turn == turns.rounds - 1
        begun = turns.steps + profiled + 1  # the last one only begins
        build = functools.partial(trainer, name, folder, scale, begun)
        of_turn = functools.partial(
            take_turn, case=case, turns=turns, profile=f"{profiles}/{case}" if profiled else None
        )
        fitting, (steps, parts, weights) = first_that_fits(build, variants[name], of_turn)
        variants[name], path = [fitting], weights or path
        return steps, parts

    seconds, splits = in_turns(CONTESTANTS, case, turns, take)
    measured = [Measurement(name, tuple(values), case) for name, values in seconds.items()]
    spans = {f"{name} {case}": summary(found) for name, found in splits.items()}
    (tuned,) = variants["tuned"]
    settings = {"sleep_mode": tuned.sleep, "gradient_checkpointing": tuned.checkpointing, "detokenize": False}
    told = [f"{m.arm} {m.median:.2f} s, training {spans[f'{m.arm} {case}']['training']:.2f} s" for m in measured]
    print(f"{case}: {'; '.join(told)}; weights={path}; tuned: {settings}", flush=True)
    return measured, spans, settings


def in_turns(
    arms: Sequence[str],
    case: str,
    turns: Turns,
    take: Callable[[str, int], tuple[list[Timed], list[dict[str, float]]]],
) -> tuple[dict[str, list[float]], dict[str, list[dict[str, float]]]]:
    """Let each arm take its turns; the order is reversed from one round to the next.

    Args:
        arms: names of the arms.
        case: name of the case, for messages.
        turns: the schedule.
        take: takes one turn of an arm, by its name and the round's number, and returns all of its steps, and the spans
            of the measured ones.

    Returns:
        For each arm, the seconds and the spans of the measured steps.

    Raises:
        UnequalResultsError: the steps of two turns have other results.
    """
    seconds: dict[str, list[float]] = {arm: [] for arm in arms}
    splits: dict[str, list[dict[str, float]]] = {arm: [] for arm in arms}
    results: list[dict[str, Any]] = [{} for _ in range(turns.steps)]
    for turn in range(turns.rounds):
        for arm in arms[:: -1 if turn % 2 else 1]:
            steps, parts = take(arm, turn)
            for step, timed in enumerate(steps):
                results[step][f"{arm} {turn}"] = timed.result
            seconds[arm] += [timed.seconds for timed in steps[turns.warmup :]]
            splits[arm] += parts
            took = ", ".join(f"{timed.seconds:.2f}" for timed in steps[turns.warmup :])
            print(f"{case}: {arm} took {took} s", flush=True)  # the only output of a run that is cut short
    for step, found in enumerate(results):
        check_equal(found, step)
    return seconds, splits


def take_turn(worker: Worker, case: str, turns: Turns, profile: str | None) -> Turn:
    """Take all steps of one turn.

    Args:
        worker: the trainer.
        case: name of the case, for messages.
        turns: the schedule.
        profile: file for a profile of the training half of one additional step; None for none.
    """
    started = time.perf_counter()
    wait_until_built([worker], BUILD_SECONDS)
    steps: list[Timed] = [worker.call("step", 0, seconds=STEP_SECONDS)]
    print(f"{case}: {worker.name} built and warm in {time.perf_counter() - started:.0f} s", flush=True)
    splits = []
    for step in range(1, turns.steps):
        steps.append(worker.call("step", step, seconds=STEP_SECONDS))
        if step >= turns.warmup:
            splits.append(worker.call("split", seconds=STEP_SECONDS))
    path = worker.call("engine_weights", seconds=STEP_SECONDS) if worker.name == "hybrid" else ""
    if profile:
        worker.call("profiled", turns.steps, profile, seconds=STEP_SECONDS)
    return steps, splits, path


def trainer(name: str, folder: str, scale: Scale, steps: int, variant: Variant) -> Worker:
    """Start building one of the contestants."""
    return Worker(name, Stepper, "hybrid" if name == "hybrid" else "trl", folder, scale, variant, BATCH, steps)


def tuned_variant(kind: str, sleep: bool, checkpointing: bool) -> Variant:
    """Return TRL tuned, in one of its settings."""
    return dataclasses.replace(KINDS[kind], sleep=sleep, checkpointing=checkpointing, detokenize=False)


def first_that_fits(
    build: Callable[[Variant], Worker], variants: Sequence[Variant], take: Callable[[Worker], Turn]
) -> tuple[Variant, Turn]:
    """Return the first variant that has memory for a whole turn, and its turn.

    Raises:
        WorkerError: not even the last one fits, or one failed for another reason than memory. No process is left.
    """
    for number, variant in enumerate(variants, 1):
        try:
            with build(variant) as worker:
                return variant, take(worker)
        except WorkerError as error:
            if number == len(variants) or not any(text in str(error) for text in OUT_OF_MEMORY):
                raise
    raise ValueError("There is no variant to be built.")


def summary(splits: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the medians of the spans, and the maximum of memory."""
    names = sorted({name for split in splits for name in split})
    values = {name: [split.get(name, 0.0) for split in splits] for name in names}
    return {name: max(found) if "bytes" in name else statistics.median(found) for name, found in values.items()}


def metrics_of(measurements: Sequence[Measurement], splits: Splits) -> dict[str, float]:
    """Return the metrics of a result.

    They are: how many times faster ours is than TRL and than TRL tuned; seconds of a step and of its training half; and
    the share of the device's peak FLOPs that training used, where the peak is known.
    """
    medians = {(m.case, m.arm): m.median for m in measurements}
    metrics: dict[str, float] = {}
    for case in dict.fromkeys(case for case, _ in medians):
        metrics[f"step_speedup_{case}"] = medians[case, "trl"] / medians[case, "hybrid"]
        metrics[f"step_speedup_over_tuned_{case}"] = medians[case, "tuned"] / medians[case, "hybrid"]
        for arm in CONTESTANTS:
            split = splits[f"{arm} {case}"]
            metrics[f"step_seconds_{arm}_{case}"] = medians[case, arm]
            metrics[f"training_seconds_{arm}_{case}"] = split["training"]
            metrics[f"tokens_per_real_token_{arm}_{case}"] = split["tokens_in_loss"] / split["tokens_real"]
            if "training_mfu" in split:
                metrics[f"training_mfu_{arm}_{case}"] = split["training_mfu"]
    return metrics


def run(
    folder: Path,
    model: str,
    kind: str,
    lengths: str,
    turns: Turns = Turns(),
    hybrid: Mapping[str, Any] = HYBRID,
    profiles: str | None = None,
) -> Result:
    """Measure one case: a kind and a distribution of lengths.

    Args:
        folder: folder of the model, written if missing, and of what vLLM compiled for it.
        model: a key of SCALES.
        kind: a key of KINDS.
        lengths: a key of LENGTHS[model].
        turns: the schedule.
        hybrid: our trainer's HybridConfig fields.
        profiles: a folder for a profile of the training half of one additional step of ours.
    """
    case = kind if lengths == "fixed" else f"{kind}-{lengths}"
    scale = dataclasses.replace(SCALES[model], cases=(LENGTHS[model][lengths],))
    if not (folder / "config.json").exists():
        write_model(folder, scale)
    measured, splits, tuned = measure(str(folder), scale, kind, hybrid, case, turns, profiles)
    return Result(
        benchmark="step" if model == "1.5b" else f"step_{model}",
        device=accelerator(),
        peer="trl",
        measurements=measured,
        metrics=metrics_of(measured, splits),
        settings={
            "model": model,
            "config": dict(scale.config),
            "prompt_tokens": scale.prompt_tokens,
            "per_device_train_batch_size": BATCH,
            "kv_cache_bytes": scale.kv_cache_bytes,
            "cases": {
                case: {
                    "lengths": dataclasses.asdict(LENGTHS[model][lengths]),
                    "turns": dataclasses.asdict(turns),
                    "tuned": tuned,
                    "hybrid": dict(hybrid),
                }
            },
            "medians_by_span": splits,
        },
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step", description=__doc__)
    parser.add_argument("--model", choices=sorted(LENGTHS), default="1.5b", help="tiny is for trying it on a CPU")
    parser.add_argument("--kind", choices=list(KINDS), action="append", help="may be repeated; default: all")
    names = list(LENGTHS["1.5b"])
    parser.add_argument("--lengths", choices=names, action="append", help="may be repeated; default: fixed, lognormal")
    for field in dataclasses.fields(Turns):
        parser.add_argument(f"--{field.name}", type=int, default=field.default, help=f"(default: {field.default})")
    parser.add_argument(
        "--hybrid", type=json.loads, default=HYBRID, help=f"our trainer's HybridConfig fields; {json.dumps(HYBRID)}"
    )
    parser.add_argument("--add", action="store_true", help="keep the other cases of the result file")
    parser.add_argument("--profile", metavar="FOLDER", help="record the training half of one step more of ours there")
    arguments = parser.parse_args(argv)
    kinds, lengths = arguments.kind or list(KINDS), arguments.lengths or ["fixed", "lognormal"]
    with tempfile.TemporaryDirectory(prefix="benchmark-step-", ignore_cleanup_errors=True) as folder:
        given = Turns(arguments.warmup, arguments.measured, arguments.rounds), arguments.hybrid, arguments.profile
        cases = {
            f"{kind} {name}": functools.partial(run, Path(folder), arguments.model, kind, name, *given)
            for kind, name in itertools.product(kinds, lengths)
        }
        publish_each(cases, add=arguments.add)


if __name__ == "__main__":
    main()
