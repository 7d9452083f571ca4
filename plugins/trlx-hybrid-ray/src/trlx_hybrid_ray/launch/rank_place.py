"""Ranks, and where each of them lives. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from ..placement import Slot
from ..role import Role
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


def role_of(job: Job) -> Role:
    """What a job asks a place for: as many ranks on each of its nodes, and no node twice."""
    return Role(
        name=ROLE,
        replicas=job.nodes,
        size=job.processes_per_node,
        gpus=1 if job.gpus else 0,
        cpus=job.cpus_per_process,
        strategy="strict_spread",
    )


def places(slots: Sequence[Slot]) -> tuple[RankPlace, ...]:
    """The ranks, in order. Slots come by node and GPU already; those of a node follow each other."""
    by_node = [list(group) for _, group in groupby(slots, key=lambda slot: slot.node)]
    return tuple(
        RankPlace(
            rank=slot.rank,
            local_rank=local_rank,
            node_rank=node_rank,
            world=len(slots),
            local_world=len(here),
            nodes=len(by_node),
            node=slot.node,
            address=slot.address,
            node_devices=tuple(gpu_id for neighbour in here for gpu_id in neighbour.gpu_ids),
            group=slot.group,
            bundle=slot.bundle,
        )
        for node_rank, here in enumerate(by_node)
        for local_rank, slot in enumerate(here)
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
