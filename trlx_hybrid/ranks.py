"""The processes of a run, seen through accelerate: the few collectives the host needs."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable
from concurrent.futures import wait
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from .deadline import in_thread
from .errors import HybridError

if TYPE_CHECKING:
    from accelerate import Accelerator

T = TypeVar("T")


class Ranks:
    """All methods but the attributes are collective: every process must call them.

    Attributes:
        rank, local_rank, world: this process's index, the one on its node, and how many there are.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator: Any = accelerator
        self.rank: int = accelerator.process_index
        self.local_rank: int = accelerator.local_process_index
        self.world: int = accelerator.num_processes

    def any(self, flag: bool) -> bool:
        """Whether any process says so: a decision all of them take alike."""
        return self.sum(int(flag)) > 0

    def sum(self, value: int) -> int:
        """Sum over the processes."""
        if self.world == 1:
            return value
        return int(self.total(torch.tensor(value, device=self._accelerator.device)))

    def total(self, values: Tensor) -> Tensor:
        """Sum over the processes of each element, on the device of this one, which nothing here waits for."""
        return self._accelerator.reduce(values, reduction="sum")  # type: ignore[no-any-return]

    def gather(self, value: T) -> list[T]:
        """As `gathered`, of these processes."""
        return gathered(value)

    def broadcast(self, value: T) -> T:
        """Return rank 0's value on every process. Any picklable object; what the other ranks pass is not sent."""
        from accelerate.utils import broadcast_object_list

        held = [value if self.rank == 0 else None]
        broadcast_object_list(held)
        return held[0]  # type: ignore[return-value]

    def by_first(self, work: Callable[[], T]) -> T:
        """As the function `by_first`, of these processes."""
        return by_first(work)


def gathered(value: T) -> list[T]:
    """One value per process, in rank order, on every process. Any picklable object. Collective."""
    from accelerate.utils import gather_object

    return list(gather_object([value]))


def by_first(work: Callable[[], T]) -> T:
    """Have rank 0 do something, and return what it returned on every process. Any picklable object. Collective, in
    torch's default process group; without one, this process is the first.

    Raises:
        HybridError: what `work` raised, on every process. Of another error, which may not be sent, the other ranks get
            the text.
        Exception: on rank 0, what was raised there: also by pickle, of a value that it cannot take.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return work()
    value: Any = None
    sent: list[bytes | None] = [None, None]  # of the value, of the error
    failed: Exception | None = None
    if dist.get_rank() == 0:
        try:
            value = work()
            sent[0] = pickle.dumps(value)  # here: torch would pickle it where the other ranks wait already
        except Exception as error:  # whatever it is, the other ranks wait for it
            failed = error
            sent[1] = _pickled(error)
    dist.broadcast_object_list(sent, src=0)
    if failed is not None:
        raise failed
    if sent[1] is not None:
        raise pickle.loads(sent[1])
    return value if sent[0] is None or dist.get_rank() == 0 else pickle.loads(sent[0])  # type: ignore[no-any-return]


def _pickled(error: Exception) -> bytes:
    """Return an error of ours as it is, and any other one, or one that pickle does not restore, by its text."""
    if isinstance(error, HybridError):
        with suppress(Exception):
            found = pickle.dumps(error)
            pickle.loads(found)
            return found
    return pickle.dumps(HybridError(f"{type(error).__name__}: {error}"))


def abort(groups: Iterable[Any], seconds: float = 0.0) -> None:
    """End what NCCL's groups do on the device, where their kernels wait for a peer, and forget the groups.

    To destroy one is to wait for all its ranks: on two GPUs, with a rank that was alive and elsewhere, the other one
    could not end until that rank's process had. To abort one may wait as well, for kernels, for other groups, for
    recordings of its operations (destroy those first: vLLM's pynccl.py says the same). Hence a thread of its own.

    Args:
        seconds: to wait for it.
    """

    def run() -> None:
        for group in groups:
            with suppress(Exception):  # of a group that is gone already; there is nobody to tell
                dist.distributed_c10d._abort_process_group(group)  # type: ignore[attr-defined]

    wait([in_thread(run, "abort-groups")], seconds)
