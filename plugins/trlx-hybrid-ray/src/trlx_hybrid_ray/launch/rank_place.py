"""Ranks, and where each of them lives. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from ..placement import Placement, Request
from .job import Job

ROLE = "rank"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """One rank.

    Attributes:
        rank, local_rank, node_rank: its number among all, among those of its node, and its node's number.
        world, local_world, nodes: how many there are of each.
        node, address: Ray's id of the node, and its address.
        node_devices: GPUs of all ranks of its node as `CUDA_VISIBLE_DEVICES` takes them; its own is number
            `local_rank`. Empty on CPUs.
        group, bundle: what Ray has reserved for it.
    """

    rank: int
    local_rank: int
    node_rank: int
    world: int
    local_world: int
    nodes: int
    node: str
    address: str
    node_devices: tuple[str, ...]
    group: int
    bundle: int

    @property
    def where(self) -> str:
        """For messages."""
        device = f", GPU {self.node_devices[self.local_rank]}" if self.node_devices else ""
        return f"node {self.address} ({self.node[:6]}){device}"


def request_of(job: Job) -> Request:
    """What a job asks a place for: as many ranks on each of its nodes, and no node twice."""
    return Request(
        name=ROLE,
        replicas=job.nodes,
        size=job.processes_per_node,
        gpus=1 if job.gpus else 0,
        cpus=job.cpus_per_process,
        strategy="strict_spread",
    )


def places(placement: Placement) -> tuple[RankPlace, ...]:
    """The ranks, in order."""
    size, nodes = placement.request.size, placement.bundles
    return tuple(
        RankPlace(
            rank=node_rank * size + local_rank,
            local_rank=local_rank,
            node_rank=node_rank,
            world=len(placement),
            local_world=size,
            nodes=len(nodes),
            node=bundle.node.id,
            address=bundle.node.address,
            node_devices=bundle.gpus,
            group=0,
            bundle=bundle.index,
        )
        for node_rank, bundle in enumerate(nodes)
        for local_rank in range(size)
    )


def drawn(ranks: Sequence[RankPlace]) -> str:
    """A line per node: which ranks run there, and on which GPUs."""
    lines = []
    for _, here in groupby(ranks, key=lambda place: place.node_rank):
        first, *_, last = (members := list(here)) * 2
        numbers = f"{first.rank}-{last.rank}" if len(members) > 1 else str(first.rank)
        gpus = f", GPU {', '.join(first.node_devices)}" if first.node_devices else ""
        lines.append(f"rank {numbers} on node {first.address} ({first.node[:6]}){gpus}")
    return "\n".join(lines)
