"""Weights over gloo, through host memory: vLLM's own transfer engines all need GPUs, and an NCCL that it can use.

Registered with vLLM's two factories and driven as its `nccl` engine is: the trainer's rank 0 hosts a store, every
worker of every engine joins it, and an update is a series of broadcasts. Every wait ends with the deadline.
"""

from __future__ import annotations

import functools
import math
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, wait
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, ClassVar

import torch
from torch import Tensor
from trlx_hybrid.deadline import REACH_SECONDS, in_thread, listen, unreachable
from trlx_hybrid.errors import SyncError
from vllm.distributed.weight_transfer import (
    ParamMeta,
    TrainerWeightTransferEngine,
    VLLMWeightSyncClient,
    WeightSource,
    WeightTransferEngine,
    WeightTransferEngineFactory,
    WeightTransferTrainerFactory,
)
from vllm.distributed.weight_transfer.base import TrainerInitInfo, WeightTransferInitInfo, WeightTransferUpdateInfo

NAME = "gloo"
BUCKET = 64 << 20  # bytes of a message
WATCH_EVERY = 2.0  # seconds


@functools.cache
def register() -> None:
    """Make it known to vLLM's factories in this process.

    Raises:
        ValueError: somebody else's has the name.
    """
    WeightTransferEngineFactory.register_engine(NAME, GlooWeightTransferEngine)
    WeightTransferTrainerFactory.register_engine(NAME, GlooTrainerWeightTransferEngine)


class GlooGroup:
    """The trainer's rank 0 and all workers, apart from any process group that they have.

    Args:
        listener: of rank 0, a listening socket; the others connect to it.
        deadline: seconds for everything that waits for another process.
    """

    def __init__(
        self, host: str, port: int, rank: int, world: int, deadline: float, listener: socket.socket | None = None
    ) -> None:
        from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
        from torch.distributed.distributed_c10d import ProcessGroupGloo

        self._timeout = timedelta(seconds=deadline)
        if listener is None:  # torch would try for the whole deadline, and not say what
            why = unreachable(host, port, min(REACH_SECONDS, deadline))
            if why is not None:
                raise SyncError(
                    f"the engine does not reach port {port} of {host}, where the trainer waits: {why}. Open the ports "
                    "between the nodes: process groups choose theirs freely."
                )
        self._store = TCPStore(
            host,
            port,
            world,
            is_master=listener is not None,
            wait_for_workers=False,
            timeout=self._timeout,
            master_listen_fd=listener.detach() if listener is not None else None,
        )
        self._group: Any = ProcessGroupGloo(PrefixStore("weights", self._store), rank, world, self._timeout)

    def broadcast(self, message: Tensor) -> None:
        """From rank 0, in place."""
        from torch.distributed.distributed_c10d import BroadcastOptions

        options = BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = 0, 0, self._timeout
        self._group.broadcast([message], options).wait()


# --- an engine's worker -----------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class GlooInitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Where the trainer waits. `rank_offset` is the rank of this engine's first worker."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    deadline: float
    bucket_bytes: int


@dataclass(kw_only=True)
class GlooUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """What is about to be sent."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]

    def described(self) -> Iterator[ParamMeta]:
        """The same, tensor by tensor."""
        for name, dtype, shape in zip(self.names, self.dtype_names, self.shapes, strict=True):
            yield ParamMeta(name, getattr(torch, dtype), tuple(shape))


class GlooWeightTransferEngine(WeightTransferEngine):  # type: ignore[misc]
    """In a worker: writes what arrives through the model's own loader, in place."""

    init_info_cls = GlooInitInfo
    update_info_cls = GlooUpdateInfo

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._group: GlooGroup | None = None
        self._bucket_bytes = BUCKET

    def init_transfer_engine(self, init_info: GlooInitInfo) -> None:
        """Join the trainer; leaves a group that was joined before."""
        config = self.parallel_config
        rank = init_info.rank_offset + config.data_parallel_index * config.world_size + config.rank
        self._bucket_bytes = init_info.bucket_bytes
        self._group = None
        self._group = GlooGroup(
            init_info.master_address, init_info.master_port, rank, init_info.world_size, init_info.deadline
        )

    def start_weight_update(self) -> None:
        """On a GPU layers may keep weights in another form, which vLLM then makes anew layer by layer."""
        if self.device.type != "cpu":
            from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

            initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive and load all of it. The base class would wait for an accelerator that may not be there."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: GlooUpdateInfo) -> None:
        """One load per message, of which one is held at a time."""
        if self._group is None:
            raise RuntimeError("init_weight_transfer_engine comes before update_weights")
        for bucket in buckets(update_info.described(), self._bucket_bytes):
            message = torch.empty(bucket.bytes, dtype=torch.uint8)
            if bucket.bytes:
                self._group.broadcast(message)
            self.model.load_weights(bucket.unpack(message))

    def finish_weight_update(self) -> None:
        """Put back what no weight came for."""
        if self.device.type != "cpu":
            from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

            finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Leave the group."""
        self._group = None


# --- the trainer ------------------------------------------------------------------------------------------------------


@dataclass
class GlooTrainerInitInfo(TrainerInitInfo):  # type: ignore[misc]
    """`master_address` is this machine's, as engines reach it; `world_size` counts rank 0 and all workers."""

    backend: ClassVar[str] = NAME

    master_address: str
    world_size: int
    deadline: float
    bucket_bytes: int = BUCKET


class GlooTrainerWeightTransferEngine(TrainerWeightTransferEngine):  # type: ignore[misc]
    """In the trainer: rank 0 sends, the others read along, since reading sharded weights takes all of them."""

    init_info_cls = GlooTrainerInitInfo

    def __init__(self, *, client: VLLMWeightSyncClient, source: WeightSource, info: GlooTrainerInitInfo) -> None:
        super().__init__(client=client, source=source, is_sender=info.is_sender)
        self._info = info
        self._group: GlooGroup | None = None

    @classmethod
    def trainer_init(
        cls, init_info: GlooTrainerInitInfo, *, client: VLLMWeightSyncClient, source: WeightSource | None = None
    ) -> GlooTrainerWeightTransferEngine:
        """Host the store and wait for every worker."""
        assert source is not None, "the whole model is sent each time, from a source"
        engine = cls(client=client, source=source, info=init_info)
        if not engine.is_sender:
            return engine
        host, world, deadline = init_info.master_address, init_info.world_size, init_info.deadline
        listener = listen(host)
        port = listener.getsockname()[1]
        worker = GlooInitInfo(
            master_address=host,
            master_port=port,
            rank_offset=1,
            world_size=world,
            deadline=deadline,
            bucket_bytes=init_info.bucket_bytes,
        )
        _, engine._group = in_threads(
            lambda: client.init_weight_transfer_engine(asdict(worker)),
            lambda: GlooGroup(host, port, 0, world, deadline, listener),
        )
        return engine

    def send_weights(self) -> None:
        """Send all of the source. Engines load each message while the next one is read."""
        described = self.source.metadata()
        if not self.is_sender:
            for _ in self.source:
                pass
            return
        update = {
            "names": [t.name for t in described],
            "dtype_names": [str(t.dtype).removeprefix("torch.") for t in described],
            "shapes": [list(t.shape) for t in described],
        }
        self.client.start_weight_update()
        in_threads(lambda: self.client.update_weights(update), lambda: self._broadcast(described))
        self.client.finish_weight_update()

    def _broadcast(self, described: list[ParamMeta]) -> None:
        assert self._group is not None
        weights = iter(self.source)
        for bucket in buckets(described, self._info.bucket_bytes):
            tensors = []
            for expected in bucket.tensors:
                name, tensor = next(weights)
                if ParamMeta(name, tensor.dtype, tuple(tensor.shape)) != expected:
                    raise ValueError(f"{name!r} came where {expected} was announced")
                tensors.append(tensor)
            if bucket.bytes:
                self._group.broadcast(bucket.pack(tensors))

    def shutdown(self) -> None:
        """Leave the group; engines that wait in it see it close."""
        self._group = None


# --- messages ---------------------------------------------------------------------------------------------------------

ALIGNMENT = 16  # bytes: a tensor of any dtype can begin there


@dataclass(frozen=True, slots=True)
class Bucket:
    """One message.

    Attributes:
        tensors: in the order in which they come; offsets: where each begins, in bytes.
        bytes: of the message.
    """

    tensors: tuple[ParamMeta, ...]
    offsets: tuple[int, ...]
    bytes: int

    def pack(self, tensors: Sequence[Tensor]) -> Tensor:
        """The message, (bytes,) uint8 on the CPU."""
        message = torch.empty(self.bytes, dtype=torch.uint8)
        for place, tensor in zip(self._places(message), tensors, strict=True):
            place.copy_(tensor)
        return message

    def unpack(self, message: Tensor) -> list[tuple[str, Tensor]]:
        """Names and tensors; views of the message."""
        return [(t.name, place) for t, place in zip(self.tensors, self._places(message), strict=True)]

    def _places(self, message: Tensor) -> Iterator[Tensor]:
        for tensor, offset in zip(self.tensors, self.offsets, strict=True):
            size = math.prod(tensor.shape) * tensor.dtype.itemsize
            yield message[offset : offset + size].view(tensor.dtype).view(tensor.shape)


def buckets(tensors: Iterable[ParamMeta], limit: int) -> Iterator[Bucket]:
    """Fill one bucket after the other, none above `limit` bytes but one that holds a single larger tensor."""
    held: list[ParamMeta] = []
    offsets: list[int] = []
    end = 0
    for tensor in tensors:
        size = -(-math.prod(tensor.shape) * tensor.dtype.itemsize // ALIGNMENT) * ALIGNMENT
        if held and end + size > limit:
            yield Bucket(tuple(held), tuple(offsets), end)
            held, offsets, end = [], [], 0
        held.append(tensor)
        offsets.append(end)
        end += size
    if held:
        yield Bucket(tuple(held), tuple(offsets), end)


# --- both ends at once ------------------------------------------------------------------------------------------------


def in_threads(
    *works: Callable[[], Any], seconds: float = math.inf, watch: Callable[[], None] = lambda: None
) -> list[Any]:
    """Do all at once, each in a thread on this thread's device, without gradients; returns their results in order.

    The first error is raised without waiting for the others, which may be waiting for what has just failed; their
    threads end with their own deadlines, or with the process.

    Args:
        seconds: that all of it may take.
        watch: called while they work; what it raises ends the wait as an error of theirs would.

    Raises:
        TimeoutError: they took longer.
    """
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]

    def here(work: Callable[[], Any]) -> Any:
        with torch.no_grad(), nullcontext() if device is None else torch.cuda.device(device):
            return work()

    calls = [in_thread(functools.partial(here, work), f"in_threads {index}") for index, work in enumerate(works)]
    end = time.monotonic() + seconds
    while True:
        done, pending = wait(calls, WATCH_EVERY, FIRST_EXCEPTION)
        for call in done:
            call.result()
        if not pending:
            return [call.result() for call in calls]
        watch()
        if time.monotonic() > end:
            raise TimeoutError(f"not done within {seconds:g} s")
