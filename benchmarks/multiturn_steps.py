"""GRPO steps with a tool, of TRL's trainer and of ours; `benchmarks.multiturn --model` runs them."""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from .harness import Arm, Measurement, Timed, alternate
from .lengths import Lengths
from .multiturn_stepping import ToolStepper
from .result import Result, accelerator
from .rollout import SCALES, write_model
from .worker import Worker, wait_until_built

BUILD_SECONDS, STEP_SECONDS = 300.0, 180.0
WARMUP = 2
SEQUENCES = {"1.5b": 64, "tiny": 16}
TURNS = {"1.5b": 5, "tiny": 3}
TOKENS = {"1.5b": 100, "tiny": 8}  # of a turn
OBSERVED = {"1.5b": 32, "tiny": 16}
BATCH = 8  # rows of a forward pass
ARMS = {"trl": ("trl", False), "lock_step": ("hybrid", True), "multi_turn": ("hybrid", False)}
"""The arms: the trainer, and whether TRL's loop runs its conversations, with all tools of a turn at once."""


def run_steps(model: str, latency: float, repetitions: int, engine_args: Mapping[str, Any]) -> Result:
    """Run both trainers in processes of their own, a step each in turn; first with instant tools, then slow ones."""
    longest = TURNS[model] * (TOKENS[model] + OBSERVED[model])
    scale = dataclasses.replace(SCALES[model], cases=(Lengths(sequences=SEQUENCES[model], longest=longest),))
    cases = {"at once": (0.0, WARMUP, repetitions), "slow": (latency, 0, max(2, repetitions - 1))}
    steps = len(cases) + sum(2 * (warmup + repeated) for _, warmup, repeated in cases.values())
    measured: list[Measurement] = []
    splits: dict[str, dict[str, float]] = {}
    with ExitStack() as stack:
        folder = stack.enter_context(
            tempfile.TemporaryDirectory(prefix="benchmark-multiturn-", ignore_cleanup_errors=True)
        )
        write_model(Path(folder), scale)
        started, workers = time.perf_counter(), {}
        for kind in ("trl", "hybrid"):
            built = (kind, folder, scale, TURNS[model], TOKENS[model], OBSERVED[model], BATCH, steps, engine_args)
            workers[kind] = stack.enter_context(Worker(kind, ToolStepper, *built))
        wait_until_built(workers.values(), BUILD_SECONDS)
        print(f"both trainers built in {time.perf_counter() - started:.0f} s", flush=True)
        for case, (median, warmup, repeated) in cases.items():
            more, found = measure(workers, case, median, warmup, repeated)
            measured, splits = measured + more, splits | found
            print(f"{case}: " + ", ".join(f"{m.arm} {m.median:.2f} s" for m in more), flush=True)
    return Result(
        benchmark="multiturn" if model == "1.5b" else f"multiturn_{model}",
        device=accelerator(),
        peer="trl",
        measurements=measured,
        metrics=metrics_of(measured, splits),
        settings={
            "model": model,
            "config": dict(scale.config),
            "sequences": SEQUENCES[model],
            "turns": TURNS[model],
            "tokens_per_turn": TOKENS[model],
            "observed_tokens": OBSERVED[model],
            "prompt_tokens": scale.prompt_tokens,
            "per_device_train_batch_size": BATCH,
            "kv_cache_bytes": scale.kv_cache_bytes,
            "latency_median_seconds": latency,
            "latency_sigma": 1.0,
            "warmup": WARMUP,
            "engine_args": dict(engine_args),
            "seconds_by_span": splits,
        },
    )


def measure(
    workers: Mapping[str, Worker], case: str, median: float, warmup: int, repetitions: int
) -> tuple[list[Measurement], dict[str, dict[str, float]]]:
    """Measure all arms with tools of one latency; return the measurements, and the median parts of each arm's steps."""
    splits: dict[str, list[dict[str, float]]] = {arm: [] for arm in ARMS}

    def run(arm: str, turn: int) -> Timed:
        worker, lock_step = ARMS[arm]
        timed: Timed = workers[worker].call("tool_step", turn, median, lock_step, seconds=STEP_SECONDS)
        splits[arm].append(workers[worker].call("found", seconds=STEP_SECONDS))
        return timed

    arms = [Arm(name, lambda turn, name=name: run(name, turn)) for name in ARMS]  # type: ignore[misc]
    measured = alternate(arms, warmup=warmup, repetitions=repetitions, case=case)
    return measured, {f"{arm} {case}": _medians(found[warmup:]) for arm, found in splits.items()}


def _medians(splits: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = sorted({name for split in splits for name in split})
    return {name: statistics.median(split.get(name, 0.0) for split in splits) for name in names}


def metrics_of(measurements: Sequence[Measurement], splits: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Return the metrics of a result.

    They are: how many times faster a step is than TRL's trainer's, its seconds, what the replay of its trace takes as a
    share of our rollout's seconds, and the share that the prefix cache found.
    """
    medians = {(m.case, m.arm): m.median for m in measurements}
    found: dict[str, float] = {}
    for case in dict.fromkeys(m.case for m in measurements):
        name = case.replace(" ", "_")
        found[f"step_speedup_{name}"] = medians[case, "trl"] / medians[case, "multi_turn"]
        found[f"step_speedup_over_lock_step_{name}"] = medians[case, "lock_step"] / medians[case, "multi_turn"]
        found |= {f"step_seconds_{arm}_{name}": medians[case, arm] for arm in ARMS}
        found[f"share_of_optimum_{name}"] = splits[f"multi_turn {case}"]["share_of_optimum"]
    found["prefix_share"] = min(split["prefix_share"] for key, split in splits.items() if key.startswith("multi_turn"))
    return found
