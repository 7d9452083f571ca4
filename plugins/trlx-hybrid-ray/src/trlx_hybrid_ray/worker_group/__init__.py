"""Worker groups: many Ray actors, or threads of this process, called as one object."""

from ..errors import DeadlineError, DispatchError, WorkerDiedError, WorkerError
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
