"""Worker groups: many workers called as one object, in Ray actors or in this process."""

from .errors import DeadlineError, DispatchError, WorkerDiedError, WorkerError
from .group import LocalWorkerGroup, WorkerGroup
from .registration import register
from .worker import WorkerInfo, this_worker
from .workers import Future

__all__ = [
    "DeadlineError",
    "DispatchError",
    "Future",
    "LocalWorkerGroup",
    "WorkerDiedError",
    "WorkerError",
    "WorkerGroup",
    "WorkerInfo",
    "register",
    "this_worker",
]
