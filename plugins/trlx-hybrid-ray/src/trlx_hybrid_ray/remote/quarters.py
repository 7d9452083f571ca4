"""Where a remote part's actors live: reserved first, so that what cannot be had is refused and not waited for."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from .. import debugging
from ..placing import Placed, place
from ..role import Role


class Quarters:
    """Places for the actors of one remote part.

    Args:
        name: for messages, and for whoever looks up who holds what.

    Raises:
        ConfigError: the resources make no sense.
        PlacementError: they cannot be had.
    """

    def __init__(self, name: str, workers: int, cpus: float, gpus: float) -> None:
        role = Role(name=name, replicas=workers, cpus=cpus, gpus=gpus, strategy="spread")
        self.placed: Placed = place([role], show=None)
        self._slots = self.placed.placement.of(name)

    def __len__(self) -> int:
        return len(self._slots)

    def gpus(self, rank: int) -> tuple[str, ...]:
        """Of a worker: ids of its GPUs, as its node numbers them."""
        return self._slots[rank].gpu_ids

    def options(self, rank: int) -> Mapping[str, Any]:
        """Of a worker: what Ray's `.options()` takes."""
        found = self.placed.options(self._slots[rank])
        variables = found["runtime_env"]["env_vars"] | dict(debugging.variables())
        return found | {"runtime_env": {"env_vars": variables}}

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
