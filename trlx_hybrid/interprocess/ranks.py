"""The ranks of a run: the few collective operations that this package needs, through accelerate and torch."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterable
from concurrent.futures import wait
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import HybridError
from .deadline import in_thread

if TYPE_CHECKING:
    from accelerate import Accelerator

T = TypeVar("T")


class Ranks:
    """The processes of a run. All methods are collective: every process must call them. Reading attributes is not.

    Attributes:
        rank, local_rank, world: this process's index, its index on its node, and the number of processes.
        alone: a note for the run's header where a launcher has started several processes, and accelerate has not
            connected this one with the others; else None. Each of them then trains a model of its own.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self.rank: int = accelerator.process_index
        self.local_rank: int = accelerator.local_process_index
        self.world: int = accelerator.num_processes
        started = int(os.environ.get("WORLD_SIZE", "1"))
        self.alone: str | None = None
        if started > 1 and self.world == 1:
            self.alone = (
                f"processes: {started} were started (WORLD_SIZE), and this one trains by itself. On CPUs, use_cpu=True "
                "is needed in the arguments of every trainer of the script; on GPUs, each process needs one."
            )

    def any(self, flag: bool) -> bool:
        """Return whether the flag is true on any process, so that all processes decide alike."""
        return self.sum(int(flag)) > 0

    def sum(self, value: int) -> int:
        """Return the sum of the numbers that the processes pass."""
        if self.world == 1:
            return value
        return int(self.total(torch.tensor(value, device=self._accelerator.device)))

    def total(self, values: Tensor) -> Tensor:
        """Return the elementwise sum of the processes' tensors, on this process's device. Does not wait for the
        device."""
        return cast("Tensor", self._accelerator.reduce(values, reduction="sum"))

    def gather(self, value: T) -> list[T]:
        """Return the values of all processes, in rank order. Takes any picklable object."""
        return gathered(value)

    def broadcast(self, value: T) -> T:
        """Return rank 0's value, any picklable object, on every process; the values of the other ranks are not sent."""
        from accelerate.utils import broadcast_object_list

        held = [value if self.rank == 0 else None]
        broadcast_object_list(held)
        return cast("T", held[0])

    def by_first(self, work: Callable[[], T]) -> T:
        """Call a function on rank 0 only, and return its result, or raise its error, on every process; see the function
        `by_first`."""
        return by_first(work)


def gathered(value: T) -> list[T]:
    """Return the values of all processes, in rank order, on every process. Takes any picklable object. Collective."""
    from accelerate.utils import gather_object

    return list(gather_object([value]))


def by_first(work: Callable[[], T]) -> T:
    """Call a function on rank 0 only, and return its result on every process. The result may be any picklable object.
    Collective, in torch's default process group; without one, this process counts as rank 0.

    Raises:
        HybridError: `work` failed. Every process raises its HybridError; for an error of another class, which might not
            be picklable, the other ranks raise a HybridError with its text.
        Exception: on rank 0, the error itself that `work` raised, or that pickle raised for its result.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return work()
    value: Any = None
    sent: list[bytes | None] = [None, None]  # pickled value, pickled error
    failed: Exception | None = None
    if dist.get_rank() == 0:
        try:
            value = work()
            sent[0] = pickle.dumps(value)  # here, since torch would pickle it while the other ranks wait
        except Exception as error:  # the other ranks wait for any error
            failed = error
            sent[1] = _pickled(error)
    dist.broadcast_object_list(sent, src=0)
    if failed is not None:
        raise failed
    if sent[1] is not None:
        raise pickle.loads(sent[1])
    return cast("T", value if sent[0] is None or dist.get_rank() == 0 else pickle.loads(sent[0]))


def _pickled(error: Exception) -> bytes:
    """Pickle an error for the other ranks: a HybridError as it is; any other error, or one that pickle cannot restore,
    as a HybridError with its text."""
    if isinstance(error, HybridError):
        with suppress(Exception):
            found = pickle.dumps(error)
            pickle.loads(found)
            return found
    return pickle.dumps(HybridError(f"{type(error).__name__}: {error}"))


def abort(groups: Iterable[Any], seconds: float = 0.0) -> None:
    """Abort the operations of NCCL process groups whose kernels may wait for a lost peer, and remove the groups.

    Destroying a group instead would wait for all its ranks: in a test on two GPUs, a rank could not end while the other
    was alive but busy elsewhere. Aborting may wait as well: for kernels, for other groups, and for CUDA graphs of the
    group's operations (destroy those first: vLLM's pynccl.py says the same). So the groups are aborted in a thread.

    Args:
        groups: the process groups; those that are gone already are passed over.
        seconds: how long to wait for the thread.
    """

    def run() -> None:
        for group in groups:
            with suppress(Exception):  # the group may be gone already
                dist.distributed_c10d._abort_process_group(group)

    wait([in_thread(run, "abort-groups")], seconds)
