"""Milliseconds of planning a reshard on one rank, and the planned bytes, from 0.5B to a trillion parameters."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trlx_hybrid.errors import ConfigError
from trlx_hybrid_reshard.buckets import bucketed
from trlx_hybrid_reshard.descriptors import Descriptors, lower
from trlx_hybrid_reshard.layouts import MeshLayout, Model, mesh_coordinates
from trlx_hybrid_reshard.plan import RankPlan, plan
from trlx_hybrid_reshard.planner.architectures import SHAPES, describe

from .harness import Measurement
from .result import Result, cpu

MODELS = {"0.5B": ("0.5b", "0.6b"), "7B": ("7b", "8b"), "70B": ("70b",), "1T MoE": ("1t-moe",)}
"""The shapes of each size, of which the first that the TP size divides is used.

4 and 8 ranks cannot serve 14 and 28 heads.
"""
PAIRS = ((1, 1), (2, 2), (4, 2), (4, 4), (8, 4), (16, 4), (64, 8), (1024, 8))
"""The pairs of layouts: (ranks of FSDP, TP of the engines)."""
RANKS_PER_NODE = 8
TO_ROLLOUT, TO_TRAIN = "plan, FSDP to TP", "plan, TP to FSDP"
LOWERING = "lower to descriptors"


@dataclass(frozen=True, slots=True)
class Case:
    """One model, and the two layouts that it is resharded between."""

    size: str
    model: Model
    train: MeshLayout
    rollout: MeshLayout

    @property
    def name(self) -> str:
        """The name in the table."""
        return f"{self.size} ({self.train.world},{self.rollout.tp})"


def cases() -> list[Case]:
    return [_case(size, n, t) for size in MODELS for n, t in PAIRS]


def _case(size: str, n: int, t: int) -> Case:
    train, rollout = MeshLayout(fsdp=n), MeshLayout(tp=t).served().over(n)
    for shape in MODELS[size]:
        model = describe(SHAPES[shape], name=shape)
        try:
            plan(model, train, rollout, 0)
        except ConfigError:
            continue
        return Case(size, model, train, rollout)
    raise ConfigError(f"No shape of {size} can be served by tp={t}: of {', '.join(MODELS[size])}.")


def planned(case: Case, rank: int, *, back: bool = False) -> tuple[float, RankPlan]:
    """Return the seconds of one plan, made without cached coordinates, and the plan."""
    mesh_coordinates.cache_clear()
    ends = (case.rollout, case.train) if back else (case.train, case.rollout)
    started = time.perf_counter()
    made = plan(case.model, *ends, rank, ranks_per_node=RANKS_PER_NODE)
    return time.perf_counter() - started, made


def lowered(case: Case, rank: int) -> tuple[float, Descriptors]:
    """Return the seconds from the two layouts to the explicit slices of one rank, and the slices."""
    started = time.perf_counter()
    buckets = bucketed(case.model, case.train, case.rollout)
    found = lower(plan(case.model, case.train, case.rollout, rank, ranks_per_node=RANKS_PER_NODE), buckets)
    return time.perf_counter() - started, found


def worst_ranks(case: Case) -> tuple[dict[str, Any], list[int]]:
    """Plan all ranks; return the bytes of the worst, and the ranks to time: first, middle, last, busiest, slowest."""
    found = [planned(case, rank) for rank in range(case.train.world)]
    received = [int(made.receives.sum()) for _, made in found]
    sent = [int(made.sends.sum()) for _, made in found]
    busiest = max(range(len(found)), key=lambda r: received[r] + sent[r])
    slowest = max(range(len(found)), key=lambda r: found[r][0])
    bytes_ = {
        "shape": case.model.name,
        "model_bytes": case.model.bytes,
        "receives_bytes": max(received),
        "receive_floor_bytes": max(made.floor_bytes for _, made in found),
        "sends_bytes": max(sent),
        "send_floor_bytes": max(made.send_floor_bytes for _, made in found),
        "ranks_above_floor": sum(r != made.floor_bytes for r, (_, made) in zip(received, found)),
        "peak_bytes": bucketed(case.model, case.train, case.rollout).peak_bytes,
    }
    return bytes_, sorted({0, len(found) // 2, len(found) - 1, busiest, slowest})


def measured(case: Case, repetitions: int) -> tuple[list[Measurement], dict[str, Any]]:
    """Measure the slowest of the timed ranks in each direction, and the lowering of one rank."""
    settings, ranks = worst_ranks(case)
    found = []
    for arm, back in ((TO_ROLLOUT, False), (TO_TRAIN, True)):
        rounds = [[planned(case, rank, back=back)[0] for rank in ranks] for _ in range(repetitions + 1)][1:]
        found.append(max((Measurement(arm, seconds, case.name) for seconds in zip(*rounds)), key=lambda m: m.median))
    times = [lowered(case, ranks[len(ranks) // 2]) for _ in range(min(repetitions, 3))]
    found.append(Measurement(LOWERING, tuple(seconds for seconds, _ in times), case.name))
    descriptors = times[0][1]
    settings |= {"timed_ranks": ranks, "slices": len(descriptors.receives) + len(descriptors.sends)}
    return found, settings


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reshard_plan", description=__doc__)
    parser.add_argument("--repetitions", type=int, default=20, help="of each arm (default: 20)")
    arguments = parser.parse_args(argv)
    measurements, settings = [], {}
    for case in cases():
        found, settings[case.name] = measured(case, arguments.repetitions)
        measurements += found
    by_case = {m.case: m.median * 1e3 for m in measurements if m.arm == TO_ROLLOUT}
    both = {case: max(m.median * 1e3 for m in measurements if m.case == case and m.arm != LOWERING) for case in by_case}
    Result(
        benchmark="reshard_plan",
        device=cpu(),
        peer=TO_ROLLOUT,
        measurements=measurements,
        metrics={
            "plan_ms_70b_1024": both["70B (1024,8)"],
            "plan_ms_1t_moe_1024": both["1T MoE (1024,8)"],
            "plan_ms_worst": max(both.values()),
            "ranks_above_floor": float(sum(s["ranks_above_floor"] for s in settings.values())),
        },
        settings={"ranks_per_node": RANKS_PER_NODE, "all_ranks_planned_for_bytes": True, "cases": settings},
    ).publish()
    print(f"\n{'case':18}{'shape':>8}{'received':>12}{'floor':>12}{'sent':>12}{'floor':>12}{'staged':>12}   worst rank")
    for name, s in settings.items():
        columns = ("receives_bytes", "receive_floor_bytes", "sends_bytes", "send_floor_bytes", "peak_bytes")
        print(f"{name:18}{s['shape']:>8}" + "".join(f"{s[column] / 1e9:>9.3f} GB" for column in columns))


if __name__ == "__main__":
    main()
