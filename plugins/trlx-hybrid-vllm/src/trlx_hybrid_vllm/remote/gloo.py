"""A weight transfer over gloo, through host memory, for machines where vLLM's own transfer engines do not work.

vLLM's own transfer engines need GPUs, and a version of NCCL that vLLM can use.

The transfer over gloo is registered with vLLM's two factories, and is used like vLLM's `nccl` engine: the trainer's
rank 0 hosts a store, every worker of every engine joins it, and an update is a series of broadcasts. Every wait ends
with the deadline.
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
from trlx_hybrid.errors import SyncError
from trlx_hybrid.interprocess.deadline import REACH_SECONDS, in_thread, listen, unreachable
from vllm.distributed.weight_transfer import (
    ParamMeta,
    TrainerWeightTransferEngine,
    VLLMWeightSyncClient,
    WeightSource,
    WeightTransferEngineFactory,
    WeightTransferTrainerFactory,
)
from vllm.distributed.weight_transfer.base import TrainerInitInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine, NCCLWeightTransferUpdateInfo

NAME = "gloo"
BUCKET = 64 << 20  # bytes of a message
WATCH_EVERY = 2.0  # seconds


@functools.cache
def register() -> None:
    """Register this module's weight transfer as "gloo" with vLLM's factories in this process.

    Raises:
        ValueError: another transfer is registered as "gloo".
    """
    WeightTransferEngineFactory.register_engine(NAME, GlooWeightTransferEngine)
    WeightTransferTrainerFactory.register_engine(NAME, GlooTrainerWeightTransferEngine)


class GlooGroup:
    """A gloo process group of the trainer's rank 0 and all workers of the engines, outside of torch's default group.

    Args:
        info: the address of the store, and the settings of the group.
        rank: this process's rank in the group.
        listener: on rank 0, the listening socket to which the other ranks connect; None on the other ranks.

    Raises:
        SyncError: this process cannot reach rank 0.
    """

    def __init__(self, info: GlooInitInfo, rank: int, listener: socket.socket | None = None) -> None:
        from torch._C._distributed_c10d import TCPStore
        from torch.distributed.distributed_c10d import PrefixStore, ProcessGroupGloo

        host, port, world = info.master_address, info.master_port, info.world_size
        self._timeout = timedelta(seconds=info.deadline)
        if listener is None:  # torch would try until the deadline, and not say what it tries
            why = unreachable(host, port, min(REACH_SECONDS, info.deadline))
            if why is not None:
                raise SyncError(
                    f"the engine does not reach port {port} of {host}, where the trainer waits: {why}. Open the ports "
                    "between the nodes: torch.distributed uses ports chosen at random."
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
        """Broadcast rank 0's tensor, in place, into the tensors of the other ranks.

        The elements are sent as bytes, because gloo does not know all dtypes.

        Args:
            message: the contiguous tensor that is sent or overwritten, of equal size on all ranks.
        """
        if not message.numel():
            return
        from torch.distributed.distributed_c10d import BroadcastOptions

        options = BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = 0, 0, self._timeout
        self._group.broadcast([message.view(torch.uint8)], options).wait()


# --- an engine's worker -----------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class GlooInitInfo:
    """The address where the trainer waits, and the settings of the transfer.

    Attributes:
        master_address, master_port: host and port of the trainer's store.
        rank_offset: the rank of this engine's first worker in the group.
        world_size: the number of ranks in the group: 1 for the trainer, and all workers of all engines.
        deadline: how many seconds any wait for another process may take.
        bucket_bytes: the largest message in bytes, unless a single tensor is larger.
    """

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    deadline: float
    bucket_bytes: int


class GlooWeightTransferEngine(NCCLWeightTransferEngine):  # type: ignore[misc]
    """The vLLM worker's end of the gloo weight transfer: receives the trainer's tensors, and loads them into the model.

    The tensors are written in place, by the model's own `load_weights`. On a GPU, some layers keep their weights in
    another form than they were loaded in; vLLM then converts them again layer by layer, as it does for its `nccl`
    transfer.
    """

    init_info_cls = GlooInitInfo

    def init_transfer_engine(self, init_info: GlooInitInfo) -> None:
        """Join the trainer's group, and leave a group that was joined before."""
        config = self.parallel_config
        rank = init_info.rank_offset + config.data_parallel_index * config.world_size + config.rank
        self._bucket_bytes = init_info.bucket_bytes
        self.model_update_group = None
        self.model_update_group = GlooGroup(init_info, rank)

    def start_weight_update(self) -> None:
        """Begin a weight update: on a GPU, vLLM prepares its layers for a reload; on a CPU nothing is needed."""
        if self.device.type != "cpu":
            super().start_weight_update()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive and load all weights; unlike vLLM's base class, also works where there is no accelerator.

        Args:
            update_info: names, dtypes and shapes of the tensors, in the order in which they are sent.
        """
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: NCCLWeightTransferUpdateInfo) -> None:
        """Receive the messages one by one, and load the tensors of each before the next one is received.

        Args:
            update_info: names, dtypes and shapes of the tensors, in the order in which they are sent.
        """
        if self.model_update_group is None:
            raise RuntimeError("init_weight_transfer_engine comes before update_weights")
        columns = zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True)
        tensors = [ParamMeta(name, getattr(torch, dtype), tuple(shape)) for name, dtype, shape in columns]
        for described in messages(tensors, self._bucket_bytes):
            message = torch.empty(sum(math.prod(t.shape) for t in described), dtype=described[0].dtype)
            self.model_update_group.broadcast(message)
            self.model.load_weights(unpacked(message, described))

    def finish_weight_update(self) -> None:
        """Finish a weight update: on a GPU, vLLM restores the weights of layers for which no tensor was sent."""
        if self.device.type != "cpu":
            super().finish_weight_update()


# --- the trainer ------------------------------------------------------------------------------------------------------


@dataclass
class GlooTrainerInitInfo(TrainerInitInfo):  # type: ignore[misc]
    """The settings of the trainer's end of the gloo weight transfer.

    Attributes:
        backend: the transfer's name in vLLM's factories.
        master_address: this machine's address, as the engines reach it.
        world_size: the number of ranks in the group: 1 for the trainer, and all workers of all engines.
        deadline: how many seconds any wait for another process may take.
        bucket_bytes: the largest message in bytes, unless a single tensor is larger.
    """

    backend: ClassVar[str] = NAME

    master_address: str
    world_size: int
    deadline: float
    bucket_bytes: int = BUCKET


class GlooTrainerWeightTransferEngine(TrainerWeightTransferEngine):  # type: ignore[misc]
    """The trainer's end of the gloo weight transfer: rank 0 sends the policy's tensors to the engines' workers.

    The trainer's other ranks only iterate over the tensors, because it takes all ranks to gather sharded tensors.
    """

    init_info_cls = GlooTrainerInitInfo

    def __init__(self, *, client: VLLMWeightSyncClient, source: WeightSource, info: GlooTrainerInitInfo) -> None:
        super().__init__(client=client, source=source, is_sender=info.is_sender)
        self._info = info
        self._group: GlooGroup | None = None

    @classmethod
    def trainer_init(
        cls, init_info: GlooTrainerInitInfo, *, client: VLLMWeightSyncClient, source: WeightSource | None = None
    ) -> GlooTrainerWeightTransferEngine:
        """Return this rank's end of the transfer; rank 0 first opens the group and waits until every worker joined."""
        assert source is not None, "the whole model is sent each time, from a source"
        engine = cls(client=client, source=source, info=init_info)
        if not engine.is_sender:
            return engine
        listener = listen(init_info.master_address)
        fields = {name: value for name, value in asdict(init_info).items() if name != "rank"}
        worker = GlooInitInfo(**fields, master_port=listener.getsockname()[1], rank_offset=1)
        _, engine._group = in_threads(
            lambda: client.init_weight_transfer_engine(asdict(worker)), lambda: GlooGroup(worker, 0, listener)
        )
        return engine

    def send_weights(self) -> None:
        """Send all of the policy's weights to the engines, which load each message while the next one is read."""
        described = metadata_of(self.source)
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
        for expected in messages(described, self._info.bucket_bytes):
            found = [next(weights) for _ in expected]
            if [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in found] != expected:
                raise ValueError(f"{', '.join(name for name, _ in found)} came where {expected} were announced")
            self._group.broadcast(packed(tensor for _, tensor in found))

    def shutdown(self) -> None:
        """Leave the group; engines that wait for a message from this rank then fail."""
        self._group = None


def metadata_of(source: WeightSource) -> list[ParamMeta]:
    """Return name, dtype and shape of each tensor that a source of weights yields, in order.

    The source's `metadata` is a method up to vLLM 0.32, and an attribute from 0.33 on.
    """
    found: Any = source.metadata
    return list(found() if callable(found) else found)


# --- messages ---------------------------------------------------------------------------------------------------------


def messages(tensors: Iterable[ParamMeta], limit: int) -> Iterator[list[ParamMeta]]:
    """Group tensors, in their order, into messages of one dtype and at most `limit` bytes.

    A tensor that is larger than the limit is a message by itself.

    Yields:
        The tensors of each message.
    """
    held: list[ParamMeta] = []
    size = 0
    for tensor in tensors:
        more = math.prod(tensor.shape) * tensor.dtype.itemsize
        if held and (size + more > limit or tensor.dtype != held[0].dtype):
            yield held
            held, size = [], 0
        held.append(tensor)
        size += more
    if held:
        yield held


def packed(tensors: Iterable[Tensor]) -> Tensor:
    """Concatenate tensors of one dtype to one message, (elements,) on the CPU."""
    return torch.cat([tensor.reshape(-1).cpu() for tensor in tensors])


def unpacked(message: Tensor, described: Sequence[ParamMeta]) -> list[tuple[str, Tensor]]:
    """Split a message into its tensors, and return their names and the tensors, which are views of the message.

    Args:
        message: (elements,), all tensors one after the other.
        described: name, dtype and shape of each tensor in the message.
    """
    parts = torch.split(message, [math.prod(t.shape) for t in described])
    return [(t.name, part.view(t.shape)) for t, part in zip(described, parts, strict=True)]


# --- both ends at once ------------------------------------------------------------------------------------------------


def in_threads(
    *works: Callable[[], Any], seconds: float = math.inf, watch: Callable[[], None] = lambda: None
) -> list[Any]:
    """Run functions at the same time, each in a thread on this thread's device, without gradients; return their results
    in order.

    The first error is raised without waiting for the other threads, which may be waiting for what has just failed. They
    end with their own deadlines, or with the process.

    Args:
        works: functions without arguments.
        seconds: how long all of them together may take.
        watch: called every few seconds while the functions run; an error that it raises is raised at once as well.

    Raises:
        TimeoutError: the functions took longer.
    """
    initialized: Callable[[], bool] = torch.cuda.is_initialized
    device = torch.cuda.current_device() if initialized() else None

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
