"""Milliseconds to bring fresh weights into the engine, and to release its memory, against TRL's own colocate path.

Each contestant has its model and engine in a process of its own. In every round all change their weights by the same
noise, untimed, then sync; after every sync the bits of all engines are compared. There are three models: bf16, an fp32
master with a bf16 engine, and a LoRA adapter on a bf16 base. Case `…-phase` is all that a rollout phase does with
weights, `tool-turn` one more generate call within a batch, with sleep mode and without. Cases `kv-…` are the KV cache's
release and return: at once, when the driver still scrubs what was just released, and after a second of idleness.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from .harness import Arm, Measurement, Timed, alternate, check_equal
from .lengths import Lengths
from .result import Result, accelerator, publish_each
from .rollout import SCALES, write_model
from .scale import Scale, Variant
from .sleeping import WAYS, HybridKVMemory, StockKVMemory
from .syncing import SyncingHybrid, SyncingTRL
from .worker import Worker, wait_until_built

BUILD_SECONDS, CALL_SECONDS = 300.0, 120.0
WARMUP = 3
IDLE_SECONDS = 1.0
SEQUENCES = 8  # of the tool turn
ENGINE_SEQUENCES = (
    64  # TRL asks for 4096 tokens a step, and vLLM reads out of bounds where its sequences cannot fill them
)
KV_BYTES = {"1.5b": (1 << 30, 27 << 30), "tiny": (16 << 20, 64 << 20)}  # of each engine; of the one that sleeps
BASE = Variant(model_dtype="bfloat16", engine_dtype="bfloat16", eager=True)
MODELS = {
    "bf16": (BASE, ("trl", "gather", "alias")),
    "fp32-master": (dataclasses.replace(BASE, model_dtype="float32"), ("trl", "gather", "copy")),
    "lora-r16": (dataclasses.replace(BASE, lora_rank=16), ("trl", "gather", "lora", "merged")),
}
"""The variant and the arms of each model.

TRL's engine would take bf16 by itself: vLLM computes in fp32 only if told to. It is told bf16 here for the tiny model,
whose CPU engine computes in fp32 otherwise.
"""
SLEEPING = {"trl-sleep": "trl", "alias-sleep": "alias"}  # contestants of the tool turn besides the awake ones


@contextmanager
def contestants(folder: str, scale: Scale, variants: Mapping[str, tuple[str, Variant]]) -> Iterator[dict[str, Worker]]:
    """Build a worker for each name, from (weight path or "trl", variant), all at once; yield them by name."""
    with ExitStack() as stack:
        started, workers = time.perf_counter(), {}
        for name, (path, variant) in variants.items():
            factory = SyncingTRL if path == "trl" else SyncingHybrid
            variant = dataclasses.replace(variant, weights="auto" if path == "trl" else path)
            workers[name] = stack.enter_context(Worker(name, factory, folder, scale, variant))
        wait_until_built(workers.values(), BUILD_SECONDS)
        print(f"{', '.join(workers)} built in {time.perf_counter() - started:.0f} s", flush=True)
        yield workers


def turns(workers: Mapping[str, Worker], method: str, case: str, repetitions: int, *before: Any) -> list[Measurement]:
    """Run one method of all workers in turn; each times itself."""

    def arm(name: str, worker: Worker) -> Arm:
        return Arm(name, lambda turn: worker.call(method, *before, turn, seconds=CALL_SECONDS))

    arms = [arm(name, worker) for name, worker in workers.items()]
    return alternate(arms, warmup=WARMUP, repetitions=repetitions, case=case)


def syncs(folder: str, scale: Scale, case: str, repetitions: int) -> tuple[list[Measurement], dict[str, Any]]:
    """Measure one model's syncs; with bf16 the tool turn as well, because its awake contestants are the same."""
    variant, paths = MODELS[case]
    variants = {path: (path, variant) for path in paths}
    if case == "bf16":
        asleep = dataclasses.replace(variant, sleep=True)
        variants |= {name: (path, asleep) for name, path in SLEEPING.items()}
    with contestants(folder, scale, variants) as workers:
        syncing = {path: workers[path] for path in paths}
        measured = turns(syncing, "sync", case, repetitions)
        findings = {f"{path}-{case}": workers[path].call("findings", seconds=CALL_SECONDS) for path in paths}
        measured += turns(syncing, "phase_sync", f"{case}-phase", repetitions)
        if case == "bf16":
            names = {"trl": "trl-sleep", "trl-awake": "trl", "hybrid": "alias-sleep", "hybrid-awake": "alias"}
            turning = {arm: workers[name] for arm, name in names.items()}
            measured += turns(turning, "second_turn", "tool-turn", repetitions, SEQUENCES)
    return measured, findings


def kv_cycles(folder: str, scale: Scale, repetitions: int) -> tuple[list[Measurement], dict[str, Any]]:
    """Measure release and return of the KV cache, once with no pause in between and once with one."""
    variant = dataclasses.replace(BASE, weights="gather", sleep=True)
    measured: list[Measurement] = []
    with ExitStack() as stack:
        factories = {"trl": StockKVMemory, "hybrid": HybridKVMemory}
        workers = {
            name: stack.enter_context(Worker(f"kv-{name}", factory, folder, scale, variant))
            for name, factory in factories.items()
        }
        wait_until_built(workers.values(), BUILD_SECONDS)
        for case, idle in (("kv-at-once", 0.0), ("kv-idle", IDLE_SECONDS)):
            restores: dict[str, list[float]] = {way: [] for way in WAYS}
            arms = [Arm(way, _cycle(workers[whose], way, idle, restores[way])) for way, whose in WAYS.items()]
            releases = alternate(arms, warmup=WARMUP, repetitions=repetitions, case=f"{case}-release")
            measured += releases
            measured += [Measurement(w, tuple(taken[WARMUP:]), f"{case}-restore") for w, taken in restores.items()]
        sizes = {name: worker.call("check", seconds=CALL_SECONDS) for name, worker in workers.items()}
        check_equal(sizes, 0)
    return measured, {"kv_cache_bytes": sizes["hybrid"]}


def _cycle(worker: Worker, way: str, idle: float, restores: list[float]) -> Any:
    """Return an arm's repetition: a cycle, whose release is timed and whose return is recorded in `restores`."""

    def run(turn: int) -> Timed:
        release, restore = worker.call("cycle", way, idle, seconds=CALL_SECONDS)
        restores.append(restore)
        return Timed(release)

    return run


def metrics_of(measurements: Sequence[Measurement], findings: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Return medians in milliseconds. `trl` and `gather` run on every model, whose name is added; others run on one."""
    medians = {(m.case, m.arm): m.median * 1e3 for m in measurements}
    metrics: dict[str, float] = {}
    for (case, arm), ms in medians.items():
        model = case.removesuffix("-phase")
        if model in MODELS:
            kind = "sync_ms" if case == model else "phase_sync_ms"
            metrics[f"{kind}_{_arm(arm, model)}"] = ms
    for name, found in findings.items():
        arm, _, model = name.partition("-")
        metrics |= {f"sync_{key}_{_arm(arm, model)}": value for key, value in found.items() if arm != "trl"}
    for arm in ("trl", "hybrid"):
        if ("tool-turn", arm) in medians:
            extra = medians["tool-turn", arm] - medians["tool-turn", f"{arm}-awake"]
            metrics[f"tool_turn_extra_ms_{arm}"] = extra
    named = {"kv_release_ms": "kv-idle-release", "kv_restore_ms": "kv-idle-restore"}
    for metric, case in (named | {"kv_restore_at_once_ms": "kv-at-once-restore"}).items():
        for way in WAYS:
            if (case, way) in medians:
                metrics[metric if way == "hybrid" else f"{metric}_{way.replace('-', '_')}"] = medians[case, way]
    return metrics


def _arm(arm: str, model: str) -> str:
    return f"{arm}_{model.replace('-', '_')}" if arm in ("trl", "gather") else arm


def run(model: str, repetitions: int, cases: Sequence[str]) -> Result:
    """Measure one case after the other, so that the engines of all cases need not fit at once."""
    small, large = KV_BYTES[model]
    lengths = Lengths(sequences=ENGINE_SEQUENCES, longest=64)
    scale = dataclasses.replace(SCALES[model], kv_cache_bytes=small, cases=(lengths,))
    measured: list[Measurement] = []
    findings: dict[str, Any] = {}
    settings: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="benchmark-weight-sync-") as folder:
        write_model(Path(folder), scale)
        for case in [case for case in MODELS if case in cases]:
            more, found = syncs(folder, scale, case, repetitions)
            measured += more
            findings |= found
        if "kv" in cases:
            more, settings = kv_cycles(folder, dataclasses.replace(scale, kv_cache_bytes=large), repetitions)
            measured += more
    drifts = {name: found["drift"] for name, found in findings.items() if found.get("drift")}
    return Result(
        benchmark="weight_sync" if model == "1.5b" else f"weight_sync_{model}",
        device=accelerator(),
        peer="trl",
        measurements=measured,
        metrics=metrics_of(measured, findings),
        settings=settings
        | {
            "model": model,
            "config": dict(scale.config),
            "warmup": WARMUP,
            "idle_seconds": IDLE_SECONDS,
            "share_of_base_weights_changed_by_one_sync": drifts,
        },
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.weight_sync", description=__doc__)
    parser.add_argument("--model", choices=sorted(SCALES), default="1.5b", help="tiny is for a CPU (default: 1.5b)")
    parser.add_argument("--repetitions", type=int, default=10, help="of each arm (default: 10)")
    parser.add_argument("--cases", nargs="+", choices=[*MODELS, "kv"], default=[*MODELS, "kv"], help="(default: all)")
    parser.add_argument("--add", action="store_true", help="keep the other cases of the result file")
    arguments = parser.parse_args(argv)
    cases = {c: functools.partial(run, arguments.model, arguments.repetitions, [c]) for c in arguments.cases}
    publish_each(cases, add=arguments.add)


if __name__ == "__main__":
    main()
