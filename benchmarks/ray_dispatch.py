"""Milliseconds that a worker group adds to Ray's own calls of the same actors, for 1 KiB to 64 MiB and 1 to 32 actors.

The peer is Ray as a careful user writes it: a large argument of several actors is put into the object store once, NumPy
cuts a batch and concatenates its results, and one `ray.get` waits for all. Rounds are paired, so the metrics are
medians of paired ratios and differences, each with the upper end of its one-sided 95% confidence interval: the order
statistic that the sign test gives, which assumes nothing about the distribution.

A second part uses 4 actors for 1,024 simulated workers on 4 nodes and counts the driver's calls.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
from trlx_hybrid_ray.cluster import connect
from trlx_hybrid_ray.worker_group import WorkerGroup, register

from .harness import Arm, Measurement, alternate
from .result import Result, cpu

ACTORS = (1, 4, 16, 32)
PAYLOADS = {"1 KiB": 1 << 10, "64 KiB": 1 << 16, "1 MiB": 1 << 20, "64 MiB": 1 << 26}
ROW = 1 << 7
"""The bytes of a row, so that the smallest batch has one for each of 8 actors and none for the others."""
PUT = 100 << 10
"""The bytes from which Ray itself stores an argument rather than sending it with the call."""
RATIO_ACTORS, DIFFERENCE_ACTORS = (16, 32), (1, 4)
FEWEST, MOST = 60, 2000
"""The least and most rounds of a case. Fewer than five give no bound, and few rounds give a wide one."""
SIMULATED, NODES = 1024, 4


class Target:
    """A worker that does nothing, so that only the call is measured."""

    @register("one_to_all")
    def length(self, payload: Any) -> int:
        """Return the length of an argument that all workers get."""
        return len(payload)

    @register("scatter")
    def same(self, batch: Any) -> Any:
        """Return the batch that was sent."""
        return batch


def upper_bound(values: Sequence[float], confidence: float = 0.95) -> float:
    """Return the smallest observation that the median exceeds with at most 1 - `confidence` probability (sign test).

    Infinity where there are too few observations for any bound.
    """
    ordered, below = sorted(values), 0.0
    for rank, value in enumerate(ordered):
        below += math.comb(len(ordered), rank) / 2 ** len(ordered)
        if below >= confidence:
            return value
    return math.inf


# --- the arms -------------------------------------------------------------------------------------------------------


def raw_length(handles: Sequence[Any], payload: Any) -> list[int]:
    import ray

    argument = ray.put(payload) if payload.nbytes >= PUT and len(handles) > 1 else payload
    return list(ray.get([handle.length.remote(argument) for handle in handles], timeout=600))


def raw_same(handles: Sequence[Any], batch: Any) -> Any:
    import ray

    parts = ray.get([h.same.remote(part) for h, part in zip(handles, np.array_split(batch, len(handles)))], timeout=600)
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def arms(group: Any, handles: Sequence[Any], method: str, payload: Any) -> list[Arm]:
    """Return the two arms that call a method; results are compared by their lengths and sums."""
    raw = {"length": raw_length, "same": raw_same}[method]
    ours = getattr(group, method)

    def digest(result: Any) -> Any:
        return result if isinstance(result, list) else (result.shape, int(result[:, 0].sum()))

    return [
        Arm("raw Ray", lambda turn: digest(raw(handles, payload))),
        Arm("worker group", lambda turn: digest(ours(payload))),
    ]


def paired(arms: Sequence[Arm], seconds: float, case: str) -> list[Measurement]:
    """Measure as `alternate` does, for about `seconds` seconds, with the arms of each round in random order.

    Taking turns would bias the result: what the object store has just freed depends on the calls before. With payloads
    of 64 MiB a fixed order showed a difference of 5% between the arms, and a random order showed none.
    """
    warmup = alternate(arms, warmup=3, repetitions=2, case=case)
    a_round = sum(arm.median for arm in warmup)
    rounds = min(MOST, max(FEWEST, int(seconds / a_round)))
    measured: dict[str, list[float]] = {arm.name: [] for arm in arms}
    order = random.Random(0)
    for _ in range(rounds):
        for arm in alternate(order.sample(arms, len(arms)), warmup=0, repetitions=1):
            measured[arm.arm] += arm.seconds
    return [Measurement(arm.name, tuple(measured[arm.name]), case) for arm in arms]


def measure(actors: int, payloads: Sequence[str], seconds: float) -> tuple[list[Measurement], dict[str, float]]:
    """Measure every case with this number of actors, with the bounds of each."""
    measured: list[Measurement] = []
    metrics: dict[str, float] = {}
    group = WorkerGroup(Target, [{"num_cpus": 0}] * actors)
    bits = np.random.default_rng(0)
    try:
        handles = group.handles
        for method in ("length", "same"):
            for name in payloads:
                payload = bits.integers(256, size=(PAYLOADS[name] // ROW, ROW), dtype=np.uint8)
                case = f"{method} {actors} × {name}"
                raw, ours = paired(arms(group.workers, handles, method, payload), seconds, case)
                measured += [raw, ours]
                found = bounds(raw.seconds, ours.seconds)
                metrics |= {f"{key}_{method}_{actors}_{name.replace(' ', '')}": value for key, value in found.items()}
                print(f"{case}: {', '.join(f'{key} {value:.3g}' for key, value in found.items())}", flush=True)
    finally:
        group.close()
    return measured, metrics


def bounds(raw: Sequence[float], ours: Sequence[float]) -> dict[str, float]:
    """Return upper bounds of the paired rounds' median ratio and of their median difference in milliseconds."""
    return {
        "ratio_bound": upper_bound([b / a for a, b in zip(raw, ours, strict=True)]),
        "extra_ms_bound": upper_bound([(b - a) * 1e3 for a, b in zip(raw, ours, strict=True)]),
    }


def summary(metrics: dict[str, float]) -> dict[str, float]:
    """Return the worst case of each number of actors, which the goals refer to."""
    found = {}
    for name, key, counts in (
        ("ratio", "ratio_bound", RATIO_ACTORS),
        ("extra_ms", "extra_ms_bound", DIFFERENCE_ACTORS),
    ):
        for actors in counts:
            cases = [v for k, v in metrics.items() if k.startswith(key) and k.split("_")[-2] == str(actors)]
            if cases:
                found[f"{name}_{actors}_actors"] = max(cases)
    return found


# --- the simulated fan-out ------------------------------------------------------------------------------------------


@contextmanager
def counted() -> Iterator[list[str]]:
    """Record the actor calls and the puts of this process."""
    import ray
    from ray.actor import ActorHandle

    calls: list[str] = []

    def noting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return function(*args, **kwargs)

        return noted

    with (
        patch.object(ActorHandle, "_actor_method_call", noting("call", ActorHandle._actor_method_call)),
        patch.object(ray, "put", noting("put", ray.put)),
    ):
        yield calls


def fan_out(workers: int, nodes: int) -> int:
    """Return the driver's calls and puts for one call of a group in which each actor answers for a node's ranks."""
    from trlx_hybrid_ray.worker_group.group import GroupMethod
    from trlx_hybrid_ray.worker_group.registration import registered, worker_class
    from trlx_hybrid_ray.worker_group.worker import Location
    from trlx_hybrid_ray.worker_group.workers import Workers

    actors = Workers(worker_class(Target, local=False), [{"num_cpus": 0}] * nodes, 1, (), {})
    actors.start(60.0)
    actors.world = actors.replicas = workers
    actors.handles = [actors.handles[rank * nodes // workers] for rank in range(workers)]
    actors.locations = [Location(f"node {rank * nodes // workers}") for rank in range(workers)]
    actors.relay(60.0, pinned=False)
    try:
        same = GroupMethod(registered(Target)["same"], actors, 60.0)
        with counted() as calls:
            answers = same(list(range(workers)))
        if answers != list(range(workers)):
            raise RuntimeError(f"{workers} workers were called, and did not answer what they were asked.")
        return len(calls)
    finally:
        actors.close(at_once=True)


def run(actors: Sequence[int], payloads: Sequence[str], seconds: float, simulated: int) -> Result:
    """Run the benchmark, on a cluster of its own."""
    measured: list[Measurement] = []
    metrics: dict[str, float] = {}
    with connect(cpus=64, object_store_memory=1 << 30):
        for count in actors:
            more, found = measure(count, payloads, seconds)
            measured, metrics = measured + more, metrics | found
        calls = fan_out(simulated, NODES)
    whole = tuple(actors) == ACTORS and tuple(payloads) == tuple(PAYLOADS) and simulated == SIMULATED
    return Result(
        benchmark="ray_dispatch" if whole else "ray_dispatch_part",  # goals refer to all cases
        device=cpu(),
        peer="raw Ray",
        measurements=measured,
        metrics=summary(metrics) | {"driver_calls_above_nodes_1024": float(calls - NODES)} | metrics,
        settings={
            "bound": "one-sided 95%, of the median of paired rounds, by the sign test",
            "seconds_per_case": seconds,
            "row_bytes": ROW,
            "put_once_from_bytes": PUT,
            "simulated_workers": simulated,
            "simulated_nodes": NODES,
        },
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ray_dispatch", description=__doc__)
    parser.add_argument("--seconds", type=float, default=10.0, help="that each of 32 cases is measured (default: 10)")
    parser.add_argument("--actors", type=int, action="append", help="repeat for several (default: 1, 4, 16, 32)")
    parser.add_argument("--payload", choices=list(PAYLOADS), action="append", help="repeat for several (default: all)")
    arguments = parser.parse_args(argv)
    run(arguments.actors or ACTORS, arguments.payload or list(PAYLOADS), arguments.seconds, SIMULATED).publish()


if __name__ == "__main__":
    main()
