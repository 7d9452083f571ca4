"""The errors of a worker group's calls."""

from __future__ import annotations

import functools

from trlx_hybrid.errors import HybridError


class DispatchError(HybridError, ValueError):
    """The error for arguments that cannot be split into a part for each worker, or results that cannot be joined. It
    names the place in the data."""


class WorkerError(HybridError):
    """The error for an exception that a worker raised. `__cause__` is the worker's exception if it could be pickled.

    Attributes:
        rank: the worker's rank.
        method: the called method's name.
        node: the node on which the worker runs, as text.
        traceback: the traceback in the worker's process, as text.
    """

    def __init__(self, message: str, *, rank: int, method: str, node: str, traceback: str = "") -> None:
        super().__init__(message)
        self.rank, self.method, self.node, self.traceback = rank, method, node, traceback

    def __reduce__(self) -> tuple[object, ...]:  # a worker may itself call a group, and fail with it
        given = {name: getattr(self, name) for name in ("rank", "method", "node")}
        return functools.partial(type(self), str(self), **given), (), vars(self)


class WorkerDiedError(WorkerError):
    """The error for a worker whose process or node is gone. The group cannot be called any more."""


class DeadlineError(WorkerError, TimeoutError):
    """The error for a worker that did not answer in time. The worker may still be at work, and `Future.result` can be
    called again."""
