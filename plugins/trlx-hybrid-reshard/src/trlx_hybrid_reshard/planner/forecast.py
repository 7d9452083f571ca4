"""What a reshard will cost on every rank: bytes, floors, links, extra memory and a time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ..buckets import bucketed
from ..layouts import Model
from ..plan import Placement, RankPlan, nodes, plan
from ..sharding import Ints
from .advice import total

NVLINK = 322e9
"""Bytes per second that each of 4 H200 received in an all-to-all."""
NETWORK = 50e9
"""Bytes per second and rank between nodes: one 400 Gb/s port for each GPU."""


@dataclass(frozen=True, slots=True)
class RankForecast:
    """One rank's bytes.

    Attributes:
        floor_bytes: the least it must receive.
        send_floor_bytes: what it must send, or its fair share of it where others hold the same.
        inter_receives_bytes, inter_sends_bytes: the part that crosses nodes.
        seconds: of its busiest link.
    """

    rank: int
    receives_bytes: int
    sends_bytes: int
    floor_bytes: int
    send_floor_bytes: int
    local_copy_bytes: int
    zero_bytes: int
    inter_receives_bytes: int
    inter_sends_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class KindForecast:
    """The part of one rank's bytes that is of one kind of parameter, see `Parameter.kind`."""

    kind: str
    receives_bytes: int
    sends_bytes: int
    floor_bytes: int
    send_floor_bytes: int
    local_copy_bytes: int
    zero_bytes: int


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
    model: Model, source: Placement, target: Placement, *, ranks_per_node: int = 0, network: float = NETWORK
) -> Forecast:
    """Plan every rank and add up.

    Args:
        network: bytes per second that a rank receives, and sends, between nodes.

    Raises:
        ConfigError: see `plan.plan`.
    """
    world = source.world
    node = nodes(world, ranks_per_node)
    traffic = np.zeros((world, world), dtype=np.int64)
    found, slowest = [], 0.0
    busiest: RankPlan | None = None
    for rank in range(world):
        started = time.perf_counter()
        made = plan(model, source, target, rank, ranks_per_node=ranks_per_node)
        slowest = max(slowest, time.perf_counter() - started)
        received, sent, away = made.receives, made.sends, node != node[rank]
        traffic[rank] = received
        if busiest is None or made.floor_bytes > busiest.floor_bytes:
            busiest = made
        inside = max(total(received[~away]), total(sent[~away])) / NVLINK
        outside = max(total(received[away]), total(sent[away])) / network
        found.append(
            RankForecast(
                rank=rank,
                receives_bytes=total(received),
                sends_bytes=total(sent),
                floor_bytes=made.floor_bytes,
                send_floor_bytes=made.send_floor_bytes,
                local_copy_bytes=made.local_copy_bytes,
                zero_bytes=made.zero_bytes,
                inter_receives_bytes=total(received[away]),
                inter_sends_bytes=total(sent[away]),
                seconds=max(inside, outside),
            )
        )
    peak = bucketed(model, source, target).peak_bytes
    assert busiest is not None, "a layout has at least one rank"
    return Forecast(tuple(found), busiest.rank, tuple(_by_kind(busiest)), traffic, node, peak, slowest)


def _by_kind(made: RankPlan) -> Iterator[KindForecast]:
    for kind in dict.fromkeys(c.parameter.kind for c in made.classes):
        these = [c for c in made.classes if c.parameter.kind == kind]
        yield KindForecast(
            kind=kind,
            receives_bytes=sum(total(c.receives) for c in these),
            sends_bytes=sum(total(c.sends) for c in these),
            floor_bytes=sum(c.floor for c in these),
            send_floor_bytes=sum(c.send_floor for c in these),
            local_copy_bytes=sum(c.local for c in these),
            zero_bytes=sum(c.zero for c in these),
        )
