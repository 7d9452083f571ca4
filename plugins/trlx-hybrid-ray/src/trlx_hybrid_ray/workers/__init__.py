"""Worker groups: many workers called as one object, in Ray actors or in this process."""

from .failure import DeadlineError, DispatchError, WorkerDiedError, WorkerError
from .future import Arrival, Future
from .grid import Grid
from .local_group import LocalWorkerGroup
from .member import Member, this_worker
from .pool import FreePool, Pool
from .register import register
from .worker_group import WorkerGroup

__all__ = [
    "Arrival",
    "DeadlineError",
    "DispatchError",
    "FreePool",
    "Future",
    "Grid",
    "LocalWorkerGroup",
    "Member",
    "Pool",
    "WorkerDiedError",
    "WorkerError",
    "WorkerGroup",
    "register",
    "this_worker",
]
