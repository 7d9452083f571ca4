"""The shape of a group."""

from __future__ import annotations

from dataclasses import dataclass

from trlx_hybrid.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Grid:
    """Ranks of a group: replicas of `tensor_parallel` ranks each, rank numbers running fastest within a replica."""

    ranks: int
    tensor_parallel: int = 1

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.tensor_parallel < 1 or self.ranks % self.tensor_parallel:
            raise ConfigError(
                f"{self.ranks} workers cannot be replicas of tensor_parallel={self.tensor_parallel}: it must divide "
                "their number, and both must be 1 or more."
            )

    @property
    def replicas(self) -> int:
        """Data-parallel size."""
        return self.ranks // self.tensor_parallel
