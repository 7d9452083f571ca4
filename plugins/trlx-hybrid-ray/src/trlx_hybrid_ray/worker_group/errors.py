"""Errors of a worker group."""

from __future__ import annotations

import functools
from typing import Any

from trlx_hybrid.errors import HybridError


class DispatchError(HybridError, ValueError):
    """An error of arguments that cannot be split, or of results that cannot be joined. Names the place in the data."""


class WorkerError(HybridError):
    """An exception that a worker raised. `__cause__` is the worker's exception, where it could be pickled.

    Attributes:
        rank: the worker's rank.
        method: the called method's name.
        node: the node on which the worker runs.
        traceback: the traceback in the worker's process, as text.
    """

    def __init__(self, message: str, *, rank: int, method: str, node: str, traceback: str = "") -> None:
        super().__init__(message)
        self.rank, self.method, self.node, self.traceback = rank, method, node, traceback

    def __reduce__(self) -> tuple[Any, ...]:  # a worker may itself call a group, and fail with it
        given = {name: getattr(self, name) for name in ("rank", "method", "node")}
        return functools.partial(type(self), str(self), **given), (), vars(self)


class WorkerDiedError(WorkerError):
    """The error of a worker whose process or node is gone. The group cannot be called any more."""


class DeadlineError(WorkerError, TimeoutError):
    """The error of a worker that did not answer in time. The worker may still be at work; `Future.result` can be called
    again."""
