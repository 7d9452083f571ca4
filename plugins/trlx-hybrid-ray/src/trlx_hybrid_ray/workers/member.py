"""Which worker of a group this code runs in. Asked from inside a worker's methods, its constructor included."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from trlx_hybrid.errors import ConfigError

from .grid import Grid


@dataclass(frozen=True, slots=True)
class Member:
    """A worker, as it sees itself in its group.

    Attributes:
        rank: from 0.
        grid: the group's shape.
        gpus: the GPU ids that its pool gave it, as its node numbers them.
    """

    rank: int
    grid: Grid
    gpus: tuple[str, ...] = ()

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.grid.ranks

    @property
    def replica(self) -> int:
        """Data-parallel rank."""
        return self.rank // self.grid.tensor_parallel

    @property
    def tensor_rank(self) -> int:
        """Rank within the replica."""
        return self.rank % self.grid.tensor_parallel


_of_thread = threading.local()
_of_process: list[Member] = []


def become(member: Member, *, whole_process: bool) -> None:
    """From now on, this thread is that worker; with `whole_process`, so is every other."""
    _of_thread.member = member
    if whole_process:
        _of_process[:] = [member]


def this_worker() -> Member:
    """The worker that calls.

    Raises:
        ConfigError: this code runs in no worker, or in a thread that a local worker started.
    """
    found = getattr(_of_thread, "member", None) or next(iter(_of_process), None)
    if found is None:
        raise ConfigError(
            "this_worker() was called outside of a worker: it is known in a group's workers' own methods."
        )
    return found
