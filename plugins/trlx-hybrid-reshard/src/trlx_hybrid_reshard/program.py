"""A plan on this rank's tensors: every view made once, so that a replay is a few launches per bucket."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from trlx_hybrid.errors import SyncError
from trlx_hybrid.protocols import Region

from .descriptors import Descriptors
from .messages import ALONE, Message, messages
from .recording import Recording
from .staging import Staging, aligned


@dataclass(slots=True)
class Copies:
    """Copies that are launched together, cast on the way. Pairs that are dense are one kernel; the rest, one each."""

    dense: tuple[list[Tensor], list[Tensor]] = field(default_factory=lambda: ([], []))
    strided: tuple[list[Tensor], list[Tensor]] = field(default_factory=lambda: ([], []))
    _recording: Recording | None = None

    def add(self, to: Tensor, source: Tensor) -> None:
        """Copy `source` into `to`, of the same shape."""
        if to.is_contiguous() and source.is_contiguous() and to.device == source.device:
            pair, to, source = self.dense, to.view(-1), source.view(-1)
        else:
            pair, (to, source) = self.strided, widened(to, source)
        pair[0].append(to)
        pair[1].append(source)

    def record(self, device: torch.device) -> None:
        """From now on `run` is one launch. No tensor may move any more, nor be added."""
        if len(self.strided[0]) + bool(self.dense[0]) > 1:
            self._recording = Recording(self._launch, device)

    def run(self) -> None:
        """Launch them."""
        if self._recording is None:
            self._launch()
        else:
            self._recording.replay()

    def _launch(self) -> None:
        for to, sources in (self.dense, self.strided):
            if to:
                torch._foreach_copy_(to, sources)


def widened(to: Tensor, source: Tensor) -> tuple[Tensor, Tensor]:
    """Views of both with the widest elements that their rows and addresses allow, where no bit changes on the way.

    A strided copy takes as long as its elements are many: bf16 in elements of 16 bytes is one eighth of them.
    """
    if to.dtype != source.dtype or not to.dim() or not to.stride(-1) == source.stride(-1) == 1:
        return to, source
    for dtype in (torch.complex128, torch.int64, torch.int32):
        if dtype.itemsize > to.itemsize and _fits(to, dtype) and _fits(source, dtype):
            return to.view(dtype), source.view(dtype)
    return to, source


def _fits(tensor: Tensor, dtype: torch.dtype) -> bool:
    times = dtype.itemsize // tensor.itemsize
    counts = (tensor.shape[-1], tensor.storage_offset(), *tensor.stride()[:-1])
    return all(n % times == 0 for n in counts) and tensor.data_ptr() % dtype.itemsize == 0


@dataclass(frozen=True, slots=True, eq=False)
class Wire:
    """One message on its way.

    Attributes:
        tensor: flat; in the place it belongs to, or staged.
        tag: tells apart the messages of a pair of ranks, alike on both.
    """

    peer: int
    tensor: Tensor
    tag: int


@dataclass(frozen=True, slots=True, eq=False)
class Bucket:
    """What moves at one time: packed first, unpacked when it has arrived."""

    pack: Copies
    sends: list[Wire]
    receives: list[Wire]
    unpack: Copies


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """All of one sync on this rank.

    Attributes:
        local: from this rank's shards into its own engine.
        echoes: what the engine keeps twice, from its first place to the others; comes last.
        received_bytes, sent_bytes: over the wire.
    """

    buckets: list[Bucket]
    local: Copies
    echoes: Copies
    staging: Staging
    tensors: int
    received_bytes: int
    sent_bytes: int

    @property
    def copies(self) -> list[Copies]:
        """All of them."""
        return [self.local, self.echoes, *(c for b in self.buckets for c in (b.pack, b.unpack))]

    def on(self, device: torch.device) -> bool:
        """Whether all its memory is that device's."""
        return all(t.device == device for c in self.copies for side in (*c.dense, *c.strided) for t in side)

    def record(self, device: torch.device) -> None:
        """Replay the copies from now on. The staging buffers they name are kept, and must have memory now."""
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
    """Make every view.

    Args:
        names: of the parameters, as the descriptors count them.
        lowered: this rank's slices.
        buckets: how many there are.
        shards: what this rank holds of each parameter, in the training dtype.
        regions: what this rank's engine holds of each.
        dtype: on the wire, and of the engine's memory.
        device: of the engine's memory.
        alone: bytes, see `messages`.
    """
    first: dict[str, dict[Any, Region]] = {}
    echoes = Copies()
    for name in names:
        for region in regions.get(name, ()):
            kept = first.setdefault(name, {}).setdefault(region.box, region)
            if kept is not region:
                echoes.add(region.memory, kept.memory)
    places = _Places(names, shards, {name: list(boxes.values()) for name, boxes in first.items()}, dtype, device)
    local = Copies()
    for piece, there in zip(lowered.copies, lowered.there, strict=True):
        local.add(places.target(piece), places.source(piece, there))
    both = [
        [messages(slices, bucket, dtype.itemsize, alone) for bucket in range(buckets)]
        for slices in (lowered.sends, lowered.receives)
    ]
    sizes = [places.staged(sends, received) for sends, received in zip(*both, strict=True)]
    staging = Staging(max(sizes, default=0), min(2, max(1, buckets)), dtype, device)
    made = [places.bucket(staging, b, *pair) for b, pair in enumerate(zip(*both, strict=True))]
    staging.release()
    sent, received = (sum(m.elements for bucket in way for m in bucket) * dtype.itemsize for way in both)
    return Program(made, local, echoes, staging, len(first), received, sent)


@dataclass(frozen=True, slots=True, eq=False)
class _Places:
    """Where slices lie on this rank."""

    names: Sequence[str]
    shards: Mapping[str, Tensor]
    regions: Mapping[str, Sequence[Region]]
    dtype: torch.dtype
    device: torch.device

    def source(self, piece: Any, here: Any) -> Tensor:
        tensor = self.shards[self.names[piece["parameter"]]].detach()
        for d in range(tensor.dim()):
            tensor = tensor.narrow(d, int(here[d]), int(piece["stop"][d] - piece["start"][d]))
        return tensor

    def target(self, piece: Any) -> Tensor:
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
        """Elements that a bucket stages. What goes to several ranks is packed once."""
        total, packed = 0, set[bytes]()
        for sending, found in zip((True, False), directions, strict=True):
            for message in found:
                if self._in_place(message, sending) is None and not (sending and message.content in packed):
                    packed.add(message.content)
                    total += aligned(message.elements, self.dtype.itemsize)
        return total

    def bucket(self, staging: Staging, number: int, sends: list[Message], receives: list[Message]) -> Bucket:
        bucket = Bucket(Copies(), [], [], Copies())
        start = 0
        for sending, found, wires in ((True, sends, bucket.sends), (False, receives, bucket.receives)):
            tags: dict[int, int] = {}
            packed: dict[bytes, Tensor] = {}
            for message in found:
                tag = tags[message.peer] = tags.get(message.peer, number << 16) + 1
                tensor = self._in_place(message, sending)
                if tensor is None and sending:
                    tensor = packed.get(message.content)
                if tensor is None:
                    tensor = packed[message.content] = staging.view(number, start, message.elements)
                    start += aligned(message.elements, self.dtype.itemsize)
                    self._stage(message, tensor, sending, bucket)
                wires.append(Wire(message.peer, tensor, tag))
        return bucket

    def _stage(self, message: Message, staged: Tensor, sending: bool, bucket: Bucket) -> None:
        for piece, part in zip(message.slices, torch.split(staged, list(message.sizes)), strict=True):
            if sending:
                source = self.source(piece, piece["here"])
                bucket.pack.add(part.view(source.shape), source)
            else:
                target = self.target(piece)
                bucket.unpack.add(target, part.view(target.shape))

    def _in_place(self, message: Message, sending: bool) -> Tensor | None:
        """The memory that a message can go out of, or come into, as it is."""
        if len(message.slices) > 1:
            return None
        piece = message.slices[0]
        tensor = self.source(piece, piece["here"]) if sending else self.target(piece)
        plain = tensor.dtype == self.dtype and tensor.device == self.device and tensor.is_contiguous()
        return tensor.view(-1) if plain else None
