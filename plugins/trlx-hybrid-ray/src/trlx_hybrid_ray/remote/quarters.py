"""Where a remote part's actors live: reserved first, so that what cannot be had is refused and not waited for."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from .. import debugging
from ..placement import Request, reserve


class Quarters:
    """Places for the actors of one remote part.

    Args:
        name: for messages, and for whoever looks up who holds what.

    Raises:
        ConfigError: the resources make no sense.
        PlacementError: they cannot be had.
    """

    def __init__(self, name: str, workers: int, cpus: float, gpus: float) -> None:
        self.placed = reserve(Request(name=name, replicas=workers, cpus=cpus, gpus=gpus, strategy="spread"))

    def __len__(self) -> int:
        return len(self.placed)

    def options(self, rank: int) -> Mapping[str, Any]:
        """What Ray's `.options()` takes for a worker."""
        return self.placed.options(rank) | {"runtime_env": {"env_vars": dict(debugging.variables())}}

    def gpus(self, rank: int) -> tuple[str, ...]:
        """A worker's GPUs, as its node numbers them."""
        return self.placed.gpus(rank)

    def close(self) -> None:
        """Give the places back; ends the actors in them."""
        import ray

        if ray.is_initialized():
            self.placed.remove()


def show_gpus(gpus: Sequence[str]) -> None:
    """Let this process see these GPUs and no others, before CUDA starts in it.

    Ray does so by itself, but not below a rank of `trlx-hybrid launch`: whose setting to see all of its node's GPUs the
    actors that it starts inherit.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
