"""Worker groups: many workers called as one object, in Ray actors or in this process."""

from .errors import DeadlineError, DispatchError, WorkerDiedError, WorkerError
from .group import Future
from .local_group import LocalWorkerGroup
from .ray_group import WorkerGroup
from .registration import register
from .worker import WorkerInfo, this_worker

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
