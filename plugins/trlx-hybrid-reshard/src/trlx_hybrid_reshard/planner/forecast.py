"""The forecast of a weight sync between two layouts (how trainer and engines shard the parameters): for every rank the
bytes, the least possible, the extra memory and a time."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..buckets import bucketed
from ..layouts import Model
from ..plan import ModelSharding, RankPlan, nodes_of, plan
from ..sharding import Ints

NVLINK = 322e9
"""Bytes per second that each of 4 H200 received in an all-to-all."""
NETWORK = 50e9
"""Bytes per second that each rank is assumed to send, and to receive, between nodes: one 400 Gb/s port for each GPU."""


@dataclass(frozen=True, slots=True, eq=False)
class Forecast:
    """The forecast of a weight sync between two layouts.

    Attributes:
        ranks: for each rank a dictionary: its number (`rank`), its bytes (the entries of `RankPlan.totals`), how many
            of them cross nodes (`inter_receives_bytes`, `inter_sends_bytes`), and the time of its busiest link
            (`seconds`).
        busiest: the number of the rank that receives the most.
        kinds: the bytes of the busiest rank, one dictionary for each kind of parameter (`Parameter.kind`): its name
            (`kind`) and the entries of `RankPlan.totals`.
        traffic: the bytes that the row's rank receives from the column's rank, int64 of shape (ranks, ranks).
        nodes: the number of nodes.
        peak_bytes: the extra memory of the worst rank in bytes, with two buffers.
        plan_seconds: the time that it took to plan the slowest rank.
    """

    ranks: Sequence[Mapping[str, Any]]
    busiest: int
    kinds: Sequence[Mapping[str, Any]]
    traffic: Ints
    nodes: int
    peak_bytes: int
    plan_seconds: float

    @property
    def seconds(self) -> float:
        """The estimated time of the sync in seconds: the time of the busiest link of all ranks, without latencies and
        without packing."""
        return float(max(rank["seconds"] for rank in self.ranks))

    @property
    def inter_node_bytes(self) -> int:
        """The bytes that a sync sends between nodes, over all ranks."""
        return sum(rank["inter_receives_bytes"] for rank in self.ranks)

    @property
    def intra_node_bytes(self) -> int:
        """The bytes that a sync sends from rank to rank within nodes, over all ranks."""
        return int(self.traffic.sum()) - self.inter_node_bytes


def forecast(
    model: Model, source: ModelSharding, target: ModelSharding, *, ranks_per_node: int = 0, network: float = NETWORK
) -> Forecast:
    """Plan the transfers of every rank for a weight sync between two layouts, and add up the bytes and times.

    Args:
        model: the parameters to move.
        source: the layout before.
        target: the layout after.
        ranks_per_node: the number of consecutive ranks that share a node; 0 for a single node.
        network: the bytes per second that a rank receives, and sends, between nodes.

    Raises:
        ConfigError: the layouts differ in their number of ranks, a size does not divide a parameter, or no rank holds
            some of the elements that another needs.
    """
    node = nodes_of(source.world, ranks_per_node)
    traffic = np.zeros((source.world, source.world), dtype=np.int64)
    ranks, slowest = [], 0.0
    busiest: RankPlan | None = None
    for rank in range(source.world):
        started = time.perf_counter()
        one = plan(model, source, target, rank, ranks_per_node=ranks_per_node)
        slowest = max(slowest, time.perf_counter() - started)
        if busiest is None or one.floor_bytes > busiest.floor_bytes:
            busiest = one
        traffic[rank] = one.receives
        away, totals = node != node[rank], one.totals()
        crossing = {
            "inter_receives_bytes": int(traffic[rank][away].sum()),
            "inter_sends_bytes": int(one.sends[away].sum()),
        }
        inside = [totals[way] - crossing[f"inter_{way}"] for way in ("receives_bytes", "sends_bytes")]
        seconds = max(max(inside) / NVLINK, max(crossing.values()) / network)
        ranks.append({"rank": rank, **totals, **crossing, "seconds": seconds})
    assert busiest is not None, "a layout has at least one rank"
    kinds = [{"kind": k, **busiest.totals(k)} for k in dict.fromkeys(c.parameter.kind for c in busiest.classes)]
    peak = bucketed(model, source, target).peak_bytes
    return Forecast(ranks, busiest.rank, kinds, traffic, int(node[-1]) + 1, peak, slowest)
