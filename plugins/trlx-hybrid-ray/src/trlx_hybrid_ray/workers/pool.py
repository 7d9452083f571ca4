"""Where the ranks of a group run: what a group needs to know of a placement, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from trlx_hybrid.errors import ConfigError


class Pool(Protocol):
    """A place for each rank. A `Placement` is one."""

    def __len__(self) -> int:
        """How many ranks."""

    def options(self, rank: int) -> Mapping[str, Any]:
        """What Ray's `.options()` takes for the actor of a rank: its resources, and how it is scheduled."""

    def gpus(self, rank: int) -> tuple[str, ...]:
        """Its GPU ids, as its node numbers them; empty where it has none, or where Ray chooses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FreePool:
    """Ranks that are put wherever the cluster has room: for tests, and for workers that talk to nobody.

    Attributes:
        ranks: how many.
        cpus_each, gpus_each: what each claims.
        nodes: Ray's ids of the nodes to use; ranks go to them in equal blocks. None leaves it to Ray.
    """

    ranks: int
    cpus_each: float = 1.0
    gpus_each: float = 0.0
    nodes: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.ranks < 1 or (self.nodes is not None and (not self.nodes or self.ranks % len(self.nodes))):
            where = "any node" if self.nodes is None else f"{len(self.nodes)} nodes"
            raise ConfigError(f"A pool of {self.ranks} ranks on {where}: ask for at least one, and as many on each.")

    def __len__(self) -> int:
        return self.ranks

    def options(self, rank: int) -> Mapping[str, Any]:
        """See `Pool`."""
        found: dict[str, Any] = {"num_cpus": self.cpus_each, "num_gpus": self.gpus_each}
        if self.nodes is not None:
            from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

            node = self.nodes[rank * len(self.nodes) // self.ranks]
            found["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node, soft=False)
        return found

    def gpus(self, rank: int) -> tuple[str, ...]:
        """See `Pool`: Ray chooses."""
        return ()


def pool_of(pool: Pool | int) -> Pool:
    """A pool, or so many ranks wherever there is room."""
    return FreePool(ranks=pool) if isinstance(pool, int) else pool
