"""The program of a weight sync: all copies and messages on this rank, with the views of tensors that they read and
write. Every view is made once, so that each sync is only a few kernel launches per bucket (a limited number of bytes
that are sent together).

A slice is a box (one index range per dimension) of one parameter that goes from one rank to another. Slices are grouped
into messages. A large slice is a message of its own, so that it can be sent from, and received into, its final place.
Small slices that share a bucket and a peer are packed into one message. Both ends know sizes and order of the slices,
so both find the same messages.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from trlx_hybrid.contract.protocols import Region
from trlx_hybrid.errors import SyncError

from .descriptors import Descriptors, Slices
from .sharding import Ints

ALONE = 1 << 20
"""The size in bytes from which a slice of a parameter is sent as a message of its own. A message costs about 10 µs, the
time in which NVLink moves 3 MB."""
ALIGNMENT = 256
"""The alignment in bytes of slices that are packed into one buffer, which suits copy kernels and the network."""

new_stream: Callable[..., torch.cuda.Stream] = torch.cuda.Stream
"""The constructor of CUDA streams, `torch.cuda.Stream`, annotated with a type, which torch leaves out."""


@dataclass(frozen=True, slots=True, eq=False)
class Message:
    """The data that goes from one rank to another in one send or receive. Messages are divided into buckets, which move
    one after the other.

    Attributes:
        peer: the rank at the other end.
        slices: the boxes (one index range per dimension of a parameter) that the message contains, of dtype
            `descriptors.SLICE`, in the order of its bytes.
        sizes: the number of elements of each box.
    """

    peer: int
    slices: Slices
    sizes: tuple[int, ...]

    @property
    def content(self) -> bytes:
        """A key that is equal for messages that send the same data to different ranks, which are packed once."""
        return b"".join(self.slices[name].tobytes() for name in ("parameter", "start", "stop"))

    @property
    def elements(self) -> int:
        """The number of elements in the message."""
        return sum(self.sizes)


def messages_of(slices: Slices, bucket: int, itemsize: int, alone: int = ALONE) -> list[Message]:
    """Group the boxes of one bucket and one direction into messages, by peer, in the order on which both ends agree.

    Args:
        slices: the boxes (one index range per dimension of a parameter) of that direction, of all buckets, sorted as
            `descriptors.lower` sorts them.
        bucket: the number of the bucket.
        itemsize: bytes per element as it is sent.
        alone: the size in bytes from which a box is a message of its own.
    """
    first, last = np.searchsorted(slices["bucket"], [bucket, bucket + 1])
    found = slices[first:last]
    sizes = (found["stop"] - found["start"]).prod(axis=1)
    edges = np.flatnonzero(np.diff(found["peer"], prepend=-1, append=-1))
    return [m for a, b in itertools.pairwise(edges) for m in _of_peer(found[a:b], sizes[a:b], alone // itemsize)]


def _of_peer(slices: Slices, sizes: Ints, alone: int) -> Iterator[Message]:
    """Yield the messages to or from one peer: one for each box of at least `alone` elements, and one for all smaller
    boxes.

    Args:
        slices: the boxes, as an array of dtype `descriptors.SLICE`.
        sizes: the number of elements of each box.
        alone: the number of elements from which a box is a message of its own.
    """
    large = sizes >= alone
    for i in np.flatnonzero(large):
        yield Message(int(slices["peer"][i]), slices[i : i + 1], (int(sizes[i]),))
    if not large.all():
        yield Message(int(slices["peer"][0]), slices[~large], tuple(sizes[~large].tolist()))


@dataclass(slots=True)
class Copies:
    """A list of tensor copies that are launched together, and that cast if dtypes differ. A pair is a destination and a
    source. All contiguous pairs are copied by one kernel, and every other pair by a kernel of its own.

    Attributes:
        dense: the contiguous pairs, as a list of destinations and a list of sources, flattened.
        strided: all other pairs, as a list of destinations and a list of sources.
    """

    dense: tuple[list[Tensor], list[Tensor]] = field(default_factory=lambda: ([], []))
    strided: tuple[list[Tensor], list[Tensor]] = field(default_factory=lambda: ([], []))
    _graph: torch.cuda.CUDAGraph | None = None

    def add(self, to: Tensor, source: Tensor) -> None:
        """Add a copy of `source` into `to`, which has the same shape."""
        if to.is_contiguous() and source.is_contiguous() and to.device == source.device:
            pair, to, source = self.dense, to.view(-1), source.view(-1)
        else:
            pair, (to, source) = self.strided, widened(to, source)
        pair[0].append(to)
        pair[1].append(source)

    def record(self, device: torch.device) -> None:
        """Record the copies as one CUDA graph, which `run` replays from now on. The copies must have run once before;
        afterwards no tensor may be moved or added.

        For a 7B model the hundreds of copies of a sync cost the host about 5 ms. Recorded, they cost a few launches.

        Only copies are recorded, no messages. NCCL registers the buffers of point-to-point operations in a graph
        (`NCCL_GRAPH_REGISTER` of NVIDIA/nccl). An engine that sleeps unmaps these buffers, and maps other memory at the
        same addresses when it wakes. From then on, every replay would write to pages that are gone. A graph with
        messages would also prevent the destruction of their communicator. Copies only refer to addresses.
        """
        if len(self.strided[0]) + bool(self.dense[0]) <= 1:
            return
        graph = torch.cuda.CUDAGraph()
        stream = new_stream(device)
        # Other threads of this process, such as NCCL's watchdog, call CUDA during the capture.
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            self._launch()
        self._graph = graph

    def run(self) -> None:
        """Launch the copies on the current stream."""
        if self._graph is None:
            self._launch()
        else:
            self._graph.replay()

    def _launch(self) -> None:
        for to, sources in (self.dense, self.strided):
            if to:
                torch._foreach_copy_(to, sources)


def widened(to: Tensor, source: Tensor) -> tuple[Tensor, Tensor]:
    """Return views of two tensors in the widest elements that their rows and addresses allow, so that a copy between
    them is faster. If the copy casts, the tensors are returned as they are.

    The time of a strided copy grows with the number of elements. Viewed in elements of 16 bytes, a bf16 tensor has one
    eighth of the elements.
    """
    if to.dtype != source.dtype or not to.dim() or not to.stride(-1) == source.stride(-1) == 1:
        return to, source
    for dtype in (torch.complex128, torch.int64, torch.int32):
        if dtype.itemsize > to.itemsize and _fits(to, dtype) and _fits(source, dtype):
            return to.view(dtype), source.view(dtype)
    return to, source


def _fits(tensor: Tensor, dtype: torch.dtype) -> bool:
    """Return whether a tensor can be viewed in this wider dtype: its rows, strides and address must be multiples of the
    new element's size."""
    times = dtype.itemsize // tensor.itemsize
    counts = (tensor.shape[-1], tensor.storage_offset(), *tensor.stride()[:-1])
    return all(n % times == 0 for n in counts) and tensor.data_ptr() % dtype.itemsize == 0


class Staging:
    """A few buffers of equal size, used in turn, into which messages are packed and received. One is on the wire while
    the other is packed or unpacked.

    Between syncs the buffers' memory is freed (`release`); a sync runs inside the context `held`, in which they have
    memory. Views of the buffers are made once, before the first `release`, and can be used again in each such context.
    The owner of a CUDA graph that uses the buffers' addresses calls `keep`, after which the memory is not freed.

    Args:
        elements: the number of elements of one buffer.
        count: the number of buffers.
        dtype, device: the dtype and the device of the buffers.
    """

    def __init__(self, elements: int, count: int, dtype: torch.dtype, device: torch.device) -> None:
        self._buffers = [torch.empty(elements, dtype=dtype, device=device) for _ in range(count)]
        self._size = elements * dtype.itemsize
        self._kept = False

    @property
    def bytes(self) -> int:
        """The bytes that all buffers take while a sync runs."""
        return self._size * len(self._buffers)

    def view(self, number: int, start: int, elements: int) -> Tensor:
        """Return a flat view of part of a buffer.

        Args:
            number: the number of the bucket; buckets use the buffers in turn.
            start: the first element of the view.
            elements: the number of elements of the view.
        """
        return self._buffers[number % len(self._buffers)].as_strided((elements,), (1,), start)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Return a context in which the buffers have memory. The memory is freed when the context ends, unless `keep`
        was called."""
        if not self._kept:
            for buffer in self._buffers:
                buffer.untyped_storage().resize_(self._size)
        try:
            yield
        finally:
            self.release()

    def keep(self) -> None:
        """Keep the buffers' memory from now on, even in `release`, because a CUDA graph that is about to be recorded
        refers to its addresses. Call it inside the context `held()`, in which the buffers have memory."""
        self._kept = True

    def release(self) -> None:
        """Free the buffers' memory, unless `keep` was called because a CUDA graph refers to it."""
        if not self._kept:
            for buffer in self._buffers:
                buffer.untyped_storage().resize_(0)


@dataclass(frozen=True, slots=True, eq=False)
class Transfer:
    """A message to be sent or received, with the memory that it is read from or written to.

    Attributes:
        peer: the rank at the other end.
        tensor: a flat view of that memory: the trainer's shard or the engine's weights where they can be used directly,
            else a staging buffer.
        tag: a number that distinguishes the messages between two ranks, the same on both.
    """

    peer: int
    tensor: Tensor
    tag: int


@dataclass(frozen=True, slots=True, eq=False)
class BucketViews:
    """The copies and messages of one bucket on this rank. A bucket is a limited number of bytes that are sent together.

    Attributes:
        pack: copies into staging buffers, done before the messages are sent.
        sends, receives: the messages.
        unpack: copies out of staging buffers, done when the messages have arrived.
    """

    pack: Copies = field(default_factory=Copies)
    sends: list[Transfer] = field(default_factory=list)
    receives: list[Transfer] = field(default_factory=list)
    unpack: Copies = field(default_factory=Copies)


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """All copies and messages of one weight sync on this rank.

    Attributes:
        buckets: the copies and messages that move together, in the order in which they move.
        local: the copies from this rank's shards into its own engine.
        duplicates: the copies of weights that the engine keeps several times, from the first place to the others; they
            run last.
        staging: the buffers for messages that need packing or unpacking.
        tensors: the number of parameters of which this rank's engine holds something.
        received_bytes, sent_bytes: the bytes that this rank receives from, and sends to, other ranks.
    """

    buckets: list[BucketViews]
    local: Copies
    duplicates: Copies
    staging: Staging
    tensors: int
    received_bytes: int
    sent_bytes: int

    @property
    def copies(self) -> list[Copies]:
        """All copies of the sync on this rank: from its own shards, between duplicates in the engine, and into and out
        of staging buffers."""
        return [self.local, self.duplicates, *(c for b in self.buckets for c in (b.pack, b.unpack))]

    def on(self, device: torch.device) -> bool:
        """Return whether all memory that the copies read and write is on the device."""
        return all(t.device == device for c in self.copies for side in (*c.dense, *c.strided) for t in side)

    def record(self, device: torch.device) -> None:
        """Record the copies as CUDA graphs, which are replayed from now on. The staging buffers must have memory when
        this is called, and keep it from then on."""
        self.staging.keep()
        for copies in self.copies:
            copies.record(device)


def program(
    names: Sequence[str],
    lowered: Descriptors,
    buckets: int,
    shards: Mapping[str, Tensor],
    regions: Mapping[str, Sequence[Region]],
    dtype: torch.dtype,
    device: torch.device,
    alone: int = ALONE,
) -> Program:
    """Make this rank's program for a weight sync, with every view of its tensors.

    Args:
        names: the parameters' names, in the order in which `lowered` numbers them.
        lowered: the boxes (one index range per dimension of a parameter) that this rank sends, receives and copies.
        buckets: the number of buckets.
        shards: this rank's shard of each parameter, by name, in the training dtype.
        regions: the memory that holds each parameter in this rank's engine, by name.
        dtype: the dtype in which weights are sent, and in which the engine's memory holds them.
        device: the device of the engine's memory.
        alone: the size in bytes from which a box is a message of its own.
    """
    first: dict[str, dict[tuple[tuple[int, int], ...], Region]] = {}
    duplicates = Copies()
    for name in names:
        for region in regions.get(name, ()):
            kept = first.setdefault(name, {}).setdefault(region.box, region)
            if kept is not region:
                duplicates.add(region.memory, kept.memory)
    places = _Places(names, shards, {name: list(boxes.values()) for name, boxes in first.items()}, dtype, device)
    local = Copies()
    for piece, there in zip(lowered.copies, lowered.there, strict=True):
        local.add(places.target(piece), places.source(piece, there))
    both = [
        [messages_of(slices, bucket, dtype.itemsize, alone) for bucket in range(buckets)]
        for slices in (lowered.sends, lowered.receives)
    ]
    sizes = [places.staged(sends, received) for sends, received in zip(*both, strict=True)]
    staging = Staging(max(sizes, default=0), min(2, max(1, buckets)), dtype, device)
    made = [places.bucket(staging, b, *pair) for b, pair in enumerate(zip(*both, strict=True))]
    staging.release()
    sent, received = (sum(m.elements for bucket in way for m in bucket) * dtype.itemsize for way in both)
    return Program(made, local, duplicates, staging, len(first), received, sent)


@dataclass(frozen=True, slots=True, eq=False)
class _Places:
    """A lookup of the memory of a box on this rank, in the trainer's shards or in the engine. A box is one index range
    per dimension of a parameter.

    Attributes:
        names: the parameters' names, by their number in the boxes.
        shards: this rank's shard of each parameter, by name.
        regions: the memory that holds each parameter in this rank's engine, by name, without duplicates.
        dtype: the dtype in which weights are sent.
        device: the device of the engine's memory.
    """

    names: Sequence[str]
    shards: Mapping[str, Tensor]
    regions: Mapping[str, Sequence[Region]]
    dtype: torch.dtype
    device: torch.device

    def source(self, piece: np.void, here: Ints) -> Tensor:
        """Return a view of the trainer's shard that covers one box (one index range per dimension of a parameter).

        Args:
            piece: the box, one entry of dtype `descriptors.SLICE`: its parameter, start and stop.
            here: where the box begins in the shard, one index per dimension.
        """
        tensor = self.shards[self.names[piece["parameter"]]].detach()
        for d in range(tensor.dim()):
            tensor = tensor.narrow(d, int(here[d]), int(piece["stop"][d] - piece["start"][d]))
        return tensor

    def target(self, piece: np.void) -> Tensor:
        """Return a view of the engine's memory that covers one box (one index range per dimension of a parameter).

        Args:
            piece: the box, one entry of dtype `descriptors.SLICE`: its parameter, start and stop.

        Raises:
            SyncError: the engine does not hold that box.
        """
        name = self.names[piece["parameter"]]
        start, stop = piece["start"].tolist(), piece["stop"].tolist()
        for region in self.regions[name]:
            if all(a <= x and y <= b for (a, b), x, y in zip(region.box, start, stop)):
                tensor = region.memory
                for d, (a, _) in enumerate(region.box):
                    tensor = tensor.narrow(d, start[d] - a, stop[d] - start[d])
                return tensor
        raise SyncError(f"No memory of the engine holds {list(zip(start, stop, strict=True))} of {name}.")

    def staged(self, *directions: Iterable[Message]) -> int:
        """Return the number of elements of a bucket's messages that need a staging buffer, because they are cast or not
        contiguous. A message that goes to several ranks is packed once.

        Args:
            directions: the messages to send, then the messages to receive.
        """
        total, packed = 0, set[bytes]()
        for sending, found in zip((True, False), directions, strict=True):
            for message in found:
                if self._in_place(message, sending) is None and not (sending and message.content in packed):
                    packed.add(message.content)
                    total += self._aligned(message.elements)
        return total

    def bucket(self, staging: Staging, number: int, sends: list[Message], receives: list[Message]) -> BucketViews:
        """Prepare the transfers of one bucket, which is a set of messages that are sent together. Make views of the
        tensors that are sent or received, and the copies that pack the tensors into `staging` or unpack them from
        there.

        Args:
            staging: the buffers for messages that need packing or unpacking.
            number: the number of the bucket.
            sends, receives: the bucket's messages that this rank sends and receives.
        """
        bucket = BucketViews()
        start = 0
        for sending, found, transfers in ((True, sends, bucket.sends), (False, receives, bucket.receives)):
            tags: dict[int, int] = {}
            packed: dict[bytes, Tensor] = {}
            for message in found:
                tag = tags[message.peer] = tags.get(message.peer, number << 16) + 1
                tensor = self._in_place(message, sending)
                if tensor is None and sending:
                    tensor = packed.get(message.content)
                if tensor is None:
                    tensor = packed[message.content] = staging.view(number, start, message.elements)
                    start += self._aligned(message.elements)
                    self._stage(message, tensor, sending, bucket)
                transfers.append(Transfer(message.peer, tensor, tag))
        return bucket

    def _stage(self, message: Message, staged: Tensor, sending: bool, bucket: BucketViews) -> None:
        """Add the copies that pack a message into its staging memory, or unpack it from there, to the bucket's `pack`
        or `unpack`.

        Args:
            message: the message.
            staged: the part of a staging buffer that holds it.
            sending: whether the message is sent and so packed; otherwise it is received and unpacked.
            bucket: the bucket to which the copies are added.
        """
        for piece, part in zip(message.slices, torch.split(staged, list(message.sizes)), strict=True):
            if sending:
                source = self.source(piece, piece["here"])
                bucket.pack.add(part.view(source.shape), source)
            else:
                target = self.target(piece)
                bucket.unpack.add(target, part.view(target.shape))

    def _in_place(self, message: Message, sending: bool) -> Tensor | None:
        """Return a flat view of the memory that a message can be sent from, or received into, without a staging buffer;
        None if it needs one.

        Args:
            message: the message.
            sending: whether it is sent, from the trainer's shard; otherwise it is received, into the engine's memory.
        """
        if len(message.slices) > 1:
            return None
        piece = message.slices[0]
        tensor = self.source(piece, piece["here"]) if sending else self.target(piece)
        plain = tensor.dtype == self.dtype and tensor.device == self.device and tensor.is_contiguous()
        return tensor.view(-1) if plain else None

    def _aligned(self, elements: int) -> int:
        """Round a number of elements up to a multiple of `ALIGNMENT` bytes."""
        unit = max(1, ALIGNMENT // self.dtype.itemsize)
        return -(-elements // unit) * unit
