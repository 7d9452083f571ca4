"""What goes wrong in a worker group."""

from __future__ import annotations

import functools
from typing import Any

from trlx_hybrid.errors import HybridError


class DispatchError(HybridError, ValueError):
    """Arguments cannot be split, or results cannot be joined. Names the place in the data."""


class WorkerError(HybridError):
    """A worker raised. `__cause__` is its exception, where it could be pickled.

    Attributes:
        rank: the worker's rank.
        method: what it was called for.
        node: where it runs.
        traceback: as text, of the worker's process.
    """

    def __init__(self, message: str, *, rank: int, method: str, node: str, traceback: str = "") -> None:
        super().__init__(message)
        self.rank, self.method, self.node, self.traceback = rank, method, node, traceback

    def __reduce__(self) -> tuple[Any, ...]:  # a worker may itself call a group, and fail with it
        given = {name: getattr(self, name) for name in ("rank", "method", "node")}
        return functools.partial(type(self), str(self), **given), (), vars(self)


class WorkerDiedError(WorkerError):
    """A worker's process or node is gone. The group cannot be called any more."""


class DeadlineError(WorkerError, TimeoutError):
    """A worker did not answer in time. It may still be at work; a future can be asked again."""
