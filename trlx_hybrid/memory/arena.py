"""One host buffer for all that leaves the device: made once, handed out in byte ranges, kept until the run ends."""

from __future__ import annotations

import bisect
import contextlib
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import ConfigError, HybridError, MemoryPlanError

CHUNK_BYTES = 256 << 20  # a power of two, or torch's pinned allocator rounds up; bounds what is pinned in vain


class Arena:
    """Persistent host memory, pinned for a CUDA device. Grows by whole chunks, shrinks at `close` only.

    Every copy to or from it must be put on `stream`. Its order is what makes a range safe to hand out again while
    copies from it are still under way, whoever owned it before.

    Args:
        device: the run's device, CUDA or CPU. With a CPU the memory is plain.
        chunk_bytes: size of a chunk, a power of two; what is larger than one is split over several.

    Attributes:
        stream: the CUDA stream of all copies; None with a CPU.

    Raises:
        ConfigError: another kind of device, or a chunk size that is no power of two from 512 on.
    """

    def __init__(self, device: torch.device | str, chunk_bytes: int = CHUNK_BYTES) -> None:
        device = torch.device(device)
        if device.type not in ("cuda", "cpu"):
            raise ConfigError(f"Offloading knows CUDA and CPU devices, not {device}: leave it off there.")
        if chunk_bytes < ALIGNMENT or chunk_bytes & (chunk_bytes - 1):
            raise ConfigError(f"chunk_bytes must be a power of two from {ALIGNMENT} on, got {chunk_bytes}.")
        if device.type == "cuda" and device.index is None:  # storages know their index: make the two comparable
            device = torch.device("cuda", torch.cuda.current_device())
        self.device = device
        self.stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._chunks: list[Tensor] = []
        self._free = FreeRanges(chunk_bytes)

    @property
    def bytes(self) -> int:
        """Host memory held."""
        return len(self._chunks) * self._free.chunk_bytes

    @property
    def bytes_taken(self) -> int:
        """How much of it is handed out, padding included."""
        return self.bytes - self._free.bytes

    def reserve(self, nbytes: int) -> None:
        """Grow until `nbytes` are free. Pinning takes a fraction of a second per GiB: do it before the first step.

        Raises:
            MemoryPlanError: the host has no more memory to give. What was grown so far stays.
        """
        while self._free.bytes < nbytes:
            self._chunks.append(self._chunk())
            self._free.grow()

    def take(self, sizes: Sequence[int]) -> list[list[ByteRange]]:
        """Ranges for several buffers of `sizes` bytes, growing where needed. All or none.

        Raises:
            MemoryPlanError: see `reserve`.
        """
        self.reserve(sum(aligned(size) for size in sizes))
        return [self._free.take(size) for size in sizes]

    def give_back(self, pieces: Iterable[ByteRange]) -> None:
        """Let others have these ranges. Copies from them may still be under way on `stream`."""
        self._free.give_back(pieces)

    def view(self, piece: ByteRange) -> Tensor:
        """Its memory: uint8, on the host. Valid until it is given back."""
        return self._chunks[piece.chunk][piece.start : piece.stop]

    @contextlib.contextmanager
    def copies(self) -> Iterator[Span]:
        """Work on `stream`, after all that the current stream was given so far.

        Going out, that work wrote what is read here. Coming in, it may still use the memory just allocated, which
        the allocator takes for free as soon as its last user on the current stream is queued.
        """
        span = Span()
        if self.stream is None:
            started = time.perf_counter()
            yield span
            span.host_seconds = time.perf_counter() - started
            return
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            begin, span.end = _event(), _event()
            span.begin = begin
            begin.record(self.stream)
            yield span
            span.end.record(self.stream)

    def close(self, *, discard: bool = False) -> None:
        """Free the memory, after copies under way. Safe to call twice; the arena may be used anew.

        Args:
            discard: lose what is still in it, when a run has failed anyway.

        Raises:
            HybridError: somebody's bytes are still in it.
        """
        if self.bytes_taken and not discard:
            raise HybridError(
                f"The host arena still holds {self.bytes_taken} bytes that have not returned to {self.device}. Call "
                "`start_return()` and `finish_return()` on every Offload first, or `close(discard=True)` to lose them."
            )
        if self.stream is not None:
            self.stream.synchronize()
        pinned = self.stream is not None and bool(self._chunks)
        self._chunks.clear()
        self._free = FreeRanges(self._free.chunk_bytes)
        if pinned:  # torch caches freed pinned memory and has no public way to give it back
            for name in ("_accelerator_emptyHostCache", "_host_emptyCache"):
                if (empty := getattr(torch._C, name, None)) is not None:
                    empty()
                    break

    def _chunk(self) -> Tensor:
        size = self._free.chunk_bytes
        try:
            chunk = torch.empty(size, dtype=torch.uint8, pin_memory=self.stream is not None)
            return chunk if self.stream is not None else chunk.fill_(0)  # pinning touches the pages, malloc does not
        except RuntimeError as error:
            raise MemoryPlanError(
                f"The host arena holds {self.bytes >> 20} MiB, and the host gives no {size >> 20} MiB more ({error}). "
                "Give the container more memory, raise `ulimit -l`, offload fewer owners, or shrink the KV cache.",
                owner="host arena",
            ) from error


class Span:
    """A batch of copies that was started: when it is done, and how long it took."""

    def __init__(self) -> None:
        self.begin: torch.cuda.Event | None = None
        self.end: torch.cuda.Event | None = None
        self.host_seconds: float | None = None

    def wait(self, device: torch.device) -> None:
        """Make the current stream wait for the end; the host goes on."""
        if self.end is not None:
            torch.cuda.current_stream(device).wait_event(self.end)

    @property
    def seconds(self) -> float | None:
        """Time the copies took; None while they run. Waits for nothing."""
        if self.begin is None or self.end is None:
            return self.host_seconds
        return self.begin.elapsed_time(self.end) / 1e3 if self.end.query() else None  # type: ignore[no-untyped-call,no-any-return]


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call,no-any-return]


ALIGNMENT = 512  # bytes; where ranges start, so that one odd size does not slow the copies of all that follow


@dataclass(frozen=True, slots=True, order=True)
class ByteRange:
    """Bytes `start` to `stop` (exclusive) of a chunk."""

    chunk: int
    start: int
    stop: int

    @property
    def bytes(self) -> int:
        """How many."""
        return self.stop - self.start


class FreeRanges:
    """The holes of the chunks.

    Attributes:
        chunks: how many there are; bytes: how many are free.
    """

    def __init__(self, chunk_bytes: int) -> None:
        self.chunk_bytes = chunk_bytes
        self.chunks = self.bytes = 0
        self._holes: list[ByteRange] = []  # sorted and disjoint, neighbours joined

    def grow(self) -> None:
        """One more chunk, all free."""
        self._holes.append(ByteRange(self.chunks, 0, self.chunk_bytes))
        self.chunks += 1
        self.bytes += self.chunk_bytes

    def take(self, nbytes: int) -> list[ByteRange]:
        """Pieces of `nbytes` together: the first hole that holds them all, else as many holes as it takes, in order.

        Raises:
            ValueError: fewer bytes are free.
        """
        need = aligned(nbytes)
        if need > self.bytes:
            raise ValueError(f"{nbytes} bytes asked for, {self.bytes} are free.")
        fitting = next((i for i, hole in enumerate(self._holes) if hole.bytes >= need), None)
        index, taken = fitting or 0, []
        while need:
            hole = self._holes[index]
            size = min(need, hole.bytes)
            taken.append(ByteRange(hole.chunk, hole.start, hole.start + size))
            rest = ByteRange(hole.chunk, hole.start + size, hole.stop)
            self._holes[index : index + 1] = [rest] if rest.bytes else []
            self.bytes -= size
            need -= size
        if taken:  # the padding of the last one is taken too, but not shown
            last = taken[-1]
            taken[-1] = ByteRange(last.chunk, last.start, last.stop - (aligned(nbytes) - nbytes))
        return taken

    def give_back(self, pieces: Iterable[ByteRange]) -> None:
        """Free what `take` returned.

        Raises:
            ValueError: some of it is free already.
        """
        for piece in pieces:
            start, stop = piece.start, aligned(piece.stop)
            at = bisect.bisect(self._holes, piece)
            before = self._holes[at - 1] if at and self._holes[at - 1].chunk == piece.chunk else None
            after = self._holes[at] if at < len(self._holes) and self._holes[at].chunk == piece.chunk else None
            if (before and before.stop > start) or (after and after.start < stop):
                raise ValueError(f"{piece} is free already.")
            first, last = at, at
            if before and before.stop == start:
                first, start = at - 1, before.start
            if after and after.start == stop:
                last, stop = at + 1, after.stop
            self._holes[first:last] = [ByteRange(piece.chunk, start, stop)]
            self.bytes += aligned(piece.stop) - piece.start


def aligned(nbytes: int) -> int:
    """`nbytes` rounded up to where the next range may start."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
