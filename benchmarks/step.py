"""Seconds of whole GRPO steps of the hybrid trainer, against TRL's own with colocated vLLM, both with sleep mode on.

A step is a rollout of 64 sequences (8 prompts × 8), its scoring, loss and backward pass in eight parts, the optimizer,
and the logging. Each trainer trains in a process of its own on the same device, with the same arguments, reward and
prompts, and stands still while it is the other's turn. `full` trains all weights in bf16, `lora` an adapter of rank 16.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from .harness import Arm, Measurement, Timed, alternate
from .result import Result, accelerator
from .rollout import SCALES, write_model
from .scale import Scale, Variant
from .stepping import Stepper
from .worker import Worker, wait_until_built

BUILD_SECONDS, STEP_SECONDS = 420.0, 180.0
WARMUP = 3
CONTESTANTS = ("trl", "hybrid")
KINDS = {"full": Variant(sleep=True), "lora": Variant(sleep=True, lora_rank=16)}
CASES = {"1.5b": (64, 512), "tiny": (16, 16)}  # sequences, tokens
BATCH = {"1.5b": 8, "tiny": 8}  # rows of a forward pass
Splits = dict[str, dict[str, float]]


def measure(folder: str, scale: Scale, kind: str, batch: int, repetitions: int) -> tuple[list[Measurement], Splits]:
    """Both trainers, a step each in turn; the second is what their steps were made of."""
    splits: dict[str, list[dict[str, float]]] = {name: [] for name in CONTESTANTS}
    steps = WARMUP + repetitions + 1  # the last one only begins
    with ExitStack() as stack:
        started, workers = time.perf_counter(), {}
        for name in CONTESTANTS:
            worker = Worker(name, Stepper, name, folder, scale, KINDS[kind], batch, steps)
            workers[name] = stack.enter_context(worker)
        wait_until_built(workers.values(), BUILD_SECONDS)
        print(f"{kind}: both trainers built in {time.perf_counter() - started:.0f} s", flush=True)

        def arm(name: str) -> Arm:
            def run(turn: int) -> Timed:
                timed: Timed = workers[name].call("step", turn, seconds=STEP_SECONDS)
                splits[name].append(workers[name].call("split", seconds=STEP_SECONDS))
                return timed

            return Arm(name, run)

        arms = [arm(name) for name in CONTESTANTS]
        measured = alternate(arms, warmup=WARMUP, repetitions=repetitions, case=kind)
        path = workers["hybrid"].call("engine_weights", seconds=STEP_SECONDS)
    print(f"{kind}: weights={path}", flush=True)
    return measured, {f"{name} {kind}": summary(found[WARMUP:]) for name, found in splits.items()}


def summary(splits: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Medians of the spans, the maximum of the memory."""
    names = sorted({name for split in splits for name in split})
    values = {name: [split.get(name, 0.0) for split in splits] for name in names}
    return {name: max(found) if "bytes" in name else statistics.median(found) for name, found in values.items()}


def metrics_of(measurements: Sequence[Measurement]) -> dict[str, float]:
    """How many times faster ours is, and the seconds of a step."""
    medians = {(m.case, m.arm): m.median for m in measurements}
    seconds = {f"step_seconds_{arm}_{kind}": value for (kind, arm), value in medians.items()}
    kinds = dict.fromkeys(kind for kind, _ in medians)
    return {f"step_speedup_{kind}": medians[kind, "trl"] / medians[kind, "hybrid"] for kind in kinds} | seconds


def run(model: str, kinds: Sequence[str], repetitions: int) -> Result:
    scale = dataclasses.replace(SCALES[model], cases=(CASES[model],))
    measured: list[Measurement] = []
    splits: Splits = {}
    for kind in kinds:
        with tempfile.TemporaryDirectory(prefix="benchmark-step-", ignore_cleanup_errors=True) as folder:
            write_model(Path(folder), scale)
            more, found = measure(folder, scale, kind, BATCH[model], repetitions)
        measured += more
        splits |= found
    return Result(
        benchmark="step" if model == "1.5b" else f"step_{model}",
        device=accelerator(),
        peer="trl",
        measurements=measured,
        metrics=metrics_of(measured),
        settings={
            "model": model,
            "config": dict(scale.config),
            "sequences_and_tokens": list(CASES[model]),
            "prompt_tokens": scale.prompt_tokens,
            "per_device_train_batch_size": BATCH[model],
            "kv_cache_bytes": scale.kv_cache_bytes,
            "warmup": WARMUP,
            "seconds_by_span": splits,
        },
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step", description=__doc__)
    parser.add_argument("--model", choices=sorted(SCALES), default="1.5b", help="tiny is for trying it on a CPU")
    parser.add_argument("--kind", choices=sorted(KINDS), action="append", help="may be repeated; default: both")
    parser.add_argument("--repetitions", type=int, default=10)
    parser.add_argument("--add", action="store_true", help="keep the other cases of this commit's result file")
    arguments = parser.parse_args(argv)
    run(arguments.model, arguments.kind or sorted(KINDS), arguments.repetitions).publish(add=arguments.add)


if __name__ == "__main__":
    main()
