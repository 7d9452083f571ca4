"""What a reshard will cost on every rank: bytes, floors, links, extra memory and a time."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np

from ..buckets import bucketed
from ..layouts import Model
from ..plan import ClassPlan, ModelSharding, RankPlan, nodes_of, plan
from ..sharding import Ints

NVLINK = 322e9
"""Bytes per second that each of 4 H200 received in an all-to-all."""
NETWORK = 50e9
"""Bytes per second and rank between nodes: one 400 Gb/s port for each GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBytes:
    """What one rank moves.

    Attributes:
        floor_bytes: the least it must receive.
        send_floor_bytes: what it must send, or its fair share of it where others hold the same.
    """

    receives_bytes: int
    sends_bytes: int
    floor_bytes: int
    send_floor_bytes: int
    local_copy_bytes: int
    zero_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankForecast(RankBytes):
    """All that one rank moves.

    Attributes:
        inter_receives_bytes, inter_sends_bytes: the part that crosses nodes.
        seconds: of its busiest link.
    """

    rank: int
    inter_receives_bytes: int
    inter_sends_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class KindForecast(RankBytes):
    """The part of one rank's bytes that is of one kind of parameter, see `Parameter.kind`."""

    kind: str


@dataclass(frozen=True, slots=True, eq=False)
class Forecast:
    """A reshard between two layouts.

    Attributes:
        busiest: number of the rank that receives the most.
        kinds: what that rank's bytes are made of.
        traffic: (world, world), bytes that the rank of the row receives from the rank of the column.
        node: (world,), the node of each rank.
        peak_bytes: extra memory of the worst rank, buckets double-buffered.
        plan_seconds: what the slowest rank took to plan.
    """

    ranks: tuple[RankForecast, ...]
    busiest: int
    kinds: tuple[KindForecast, ...]
    traffic: Ints
    node: Ints
    peak_bytes: int
    plan_seconds: float

    @property
    def seconds(self) -> float:
        """Of the busiest link of all; latencies and packing left out."""
        return max(rank.seconds for rank in self.ranks)

    @property
    def inter_node_bytes(self) -> int:
        """Over all ranks."""
        return sum(rank.inter_receives_bytes for rank in self.ranks)

    @property
    def intra_node_bytes(self) -> int:
        """Over all ranks."""
        return sum(rank.receives_bytes for rank in self.ranks) - self.inter_node_bytes


def forecast(
    model: Model, source: ModelSharding, target: ModelSharding, *, ranks_per_node: int = 0, network: float = NETWORK
) -> Forecast:
    """Plan every rank and add up.

    Args:
        network: bytes per second that a rank receives, and sends, between nodes.

    Raises:
        ConfigError: see `plan.plan`.
    """
    node = nodes_of(source.world, ranks_per_node)
    traffic = np.zeros((source.world, source.world), dtype=np.int64)
    found, slowest = [], 0.0
    busiest: RankPlan | None = None
    for rank in range(source.world):
        started = time.perf_counter()
        one = plan(model, source, target, rank, ranks_per_node=ranks_per_node)
        slowest = max(slowest, time.perf_counter() - started)
        if busiest is None or one.floor_bytes > busiest.floor_bytes:
            busiest = one
        traffic[rank] = one.receives
        away = node != node[rank]
        received, sent = int(traffic[rank][away].sum()), int(one.sends[away].sum())
        bytes_ = _sums(one)
        inside = max(bytes_["receives_bytes"] - received, bytes_["sends_bytes"] - sent) / NVLINK
        seconds = max(inside, max(received, sent) / network)
        found.append(
            RankForecast(rank=rank, inter_receives_bytes=received, inter_sends_bytes=sent, seconds=seconds, **bytes_)
        )
    assert busiest is not None, "a layout has at least one rank"
    by_kind: dict[str, list[ClassPlan]] = {}
    for c in busiest.classes:
        by_kind.setdefault(c.parameter.kind, []).append(c)
    kinds = tuple(
        KindForecast(kind=kind, **_sums(replace(busiest, classes=tuple(its)))) for kind, its in by_kind.items()
    )
    peak = bucketed(model, source, target).peak_bytes
    return Forecast(tuple(found), busiest.rank, kinds, traffic, node, peak, slowest)


def _sums(made: RankPlan) -> dict[str, int]:
    """The fields of `RankBytes`."""
    return {
        "receives_bytes": int(made.receives.sum()),
        "sends_bytes": int(made.sends.sum()),
        "floor_bytes": made.floor_bytes,
        "send_floor_bytes": made.send_floor_bytes,
        "local_copy_bytes": made.local_copy_bytes,
        "zero_bytes": made.zero_bytes,
    }
