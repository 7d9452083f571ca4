"""The function `this_worker`, which tells a worker of a worker group its rank and the other workers, and the torch
process group that a group's workers can form."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass

from trlx_hybrid.errors import ConfigError
from trlx_hybrid.interprocess import deadline

from ..errors import ClusterError
from ..internals import node_address


@dataclass(frozen=True, slots=True)
class Location:
    """The node, process and GPUs of a worker.

    Attributes:
        node: Ray's id of the node; "this process" for a worker that is a thread.
        address: the node's IP address.
        pid: the id of the worker's process.
        gpus: ids of the GPUs that Ray gave to the worker, as the node numbers them.
        port: the port on which rank 0 listens for the other workers of its group; 0 for the other workers.
    """

    node: str
    address: str = ""
    pid: int = 0
    gpus: tuple[str, ...] = ()
    port: int = 0

    def __str__(self) -> str:
        return f"node {self.node[:12]} at {self.address}, pid {self.pid}" if self.address else self.node


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """A worker's rank, and the other workers of its group, as `this_worker()` returns them in the worker.

    Attributes:
        rank: the worker's rank, from 0.
        tensor_parallel: the number of workers per replica. All workers of a replica get the same part of a batch, and
            have consecutive ranks.
        locations: node, process and GPUs of each worker, by rank.
    """

    rank: int
    tensor_parallel: int
    locations: tuple[Location, ...]

    @property
    def world(self) -> int:
        """The number of workers in the group."""
        return len(self.locations)

    @property
    def replica(self) -> int:
        """The index of the worker's replica, which is its data-parallel rank."""
        return self.rank // self.tensor_parallel

    @property
    def tensor_rank(self) -> int:
        """The worker's rank within its replica, which is its tensor-parallel rank."""
        return self.rank % self.tensor_parallel

    @property
    def gpus(self) -> tuple[str, ...]:
        """The ids of the GPUs that Ray gave to this worker, as its node numbers them."""
        return self.locations[self.rank].gpus

    def init_process_group(self, backend: str | None = None) -> None:
        """Make torch's default process group of all workers of this group; every worker must call it, before CUDA
        starts.

        It sets the variables that `torchrun` would set, so that accelerate and vLLM find the group: `RANK`,
        `LOCAL_RANK`, `WORLD_SIZE`, `LOCAL_WORLD_SIZE`, `MASTER_ADDR`, `MASTER_PORT`. A worker with a GPU sees the GPUs
        of all workers on its node; its own GPU has the number `LOCAL_RANK`, and is torch's current device.

        The ranks meet at a `TCPStore` of torch on rank 0's node, which has no authentication.

        Args:
            backend: the argument of `torch.distributed.init_process_group`; by default torch's choice for each device.

        Raises:
            ConfigError: this is one of several workers in one process, CUDA has started, or a worker has two GPUs.
            ClusterError: rank 0's node cannot be reached.
        """
        first, here = self.locations[0], self.locations[self.rank]
        node = [rank for rank, location in enumerate(self.locations) if location.node == here.node]
        if not here.address and self.world > 1:
            raise ConfigError(
                f"{self.world} workers in one process form no process group. Use a LocalWorkerGroup of one worker, or "
                "a WorkerGroup, whose workers are processes."
            )
        import torch
        from torch.distributed import HashStore, TCPStore, init_process_group  # type: ignore[attr-defined]

        if not here.address:
            init_process_group(backend, store=HashStore(), rank=0, world_size=1)
            return
        gpus = [gpu for rank in node for gpu in self.locations[rank].gpus]
        if gpus and any(len(self.locations[rank].gpus) != 1 for rank in node):
            raise ConfigError(f"{len(node)} workers of one node have GPUs {', '.join(gpus)}: give each exactly one.")
        if gpus:
            cuda_started: Callable[[], bool] = torch.cuda.is_initialized
            if cuda_started():
                raise ConfigError("CUDA has started in this worker: call init_process_group() first.")
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        if self.rank and (why := deadline.unreachable(first.address, first.port)):
            raise ClusterError(
                f"{here} does not reach port {first.port} of {first.address}, where rank 0 waits for the group: {why}. "
                "Open the ports between the nodes: torch.distributed uses ports chosen at random."
            )
        store = TCPStore(
            first.address,
            first.port,
            self.world,
            is_master=self.rank == 0,
            wait_for_workers=False,
            master_listen_fd=_taken_listener() if self.rank == 0 else None,
        )
        os.environ |= {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world),
            "LOCAL_RANK": str(node.index(self.rank)),
            "LOCAL_WORLD_SIZE": str(len(node)),
            "MASTER_ADDR": first.address,
            "MASTER_PORT": str(first.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # torch finds the store at this address instead of making one
        }
        if gpus and torch.cuda.is_available():
            torch.cuda.set_device(node.index(self.rank))
        init_process_group(backend, store=store, rank=self.rank, world_size=self.world)


_of_thread = threading.local()
_of_process: list[WorkerInfo] = []
"""The worker that this process is, as the only item; empty in a process that is no worker."""
_listener: list[socket.socket] = []
"""The socket on which rank 0 listens for its group's `TCPStore`, as the only item. The port is held from the beginning:
between a check that a port is free and its use, another process may take it."""


def located(rank: int) -> Location:
    """Return the node, process and GPUs of the actor that calls this. Rank 0 also begins to listen for the other
    workers."""
    import ray

    context = ray.get_runtime_context()
    address = node_address()
    port = 0
    if rank == 0:
        _listener[:] = [deadline.listen(address)]
        port = int(_listener[0].getsockname()[1])
    gpus = tuple(context.get_accelerator_ids().get("GPU", ()))
    return Location(context.get_node_id(), address, os.getpid(), gpus, port)


def _taken_listener() -> int:
    """Return the file descriptor of the socket on which rank 0 listens for the other workers, and give the socket up:
    the `TCPStore` that gets the descriptor closes it.

    Raises:
        ConfigError: the socket was taken before, so the process group exists.
    """
    if not _listener:
        raise ConfigError("init_process_group() was called before in this worker: its process group exists.")
    return _listener.pop().detach()


def set_this_worker(worker: WorkerInfo, *, whole_process: bool) -> None:
    """Store what `this_worker` returns in this thread.

    Args:
        worker: the worker's rank and group.
        whole_process: whether all other threads of this process are the same worker.
    """
    _of_thread.worker = worker
    if whole_process:
        _of_process[:] = [worker]


def this_worker() -> WorkerInfo:
    """Return the rank and the group of the worker in whose method this is called.

    Raises:
        ConfigError: the caller is no worker, or it is a thread that a worker of a `LocalWorkerGroup` started.
    """
    found = getattr(_of_thread, "worker", None) or next(iter(_of_process), None)
    if found is None:
        raise ConfigError(
            "this_worker() was called outside of a worker: it is known in a group's workers' own methods."
        )
    return found
