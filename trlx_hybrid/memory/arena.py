"""The host buffer for all tensors that are offloaded: its memory is allocated once, reused in every step, and kept
until the run ends."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..errors import ConfigError, HybridError, MemoryPlanError

ALIGNMENT = 512  # bytes; alignment of buffers, so that one odd size does not slow down all later copies
CHUNK_BYTES = 256 << 20  # a power of two, or torch's pinned allocator rounds up; limits unused pinned memory


class Arena:
    """A persistent host buffer, pinned for a CUDA device. It grows by whole chunks, and shrinks only at `close`.

    Buffers are handed out one after the other, and from the start again once all have been given back, which happens in
    every training step. Every copy to or from the buffer must run on `stream`. Since copies run there in order, memory
    may be handed out again while copies from it are still under way.

    Args:
        device: the run's device, CUDA or CPU. With a CPU the memory is not pinned.
        chunk_bytes: size of a chunk in bytes, a power of two of at least 512; a buffer that crosses the end of a chunk
            continues in the next.

    Attributes:
        stream: the CUDA stream of all copies; None with a CPU.
        bytes_taken: bytes that are handed out, padding included.

    Raises:
        ConfigError: the device is neither CUDA nor CPU.
    """

    def __init__(self, device: torch.device | str, chunk_bytes: int = CHUNK_BYTES) -> None:
        device = torch.device(device)
        if device.type not in ("cuda", "cpu"):
            raise ConfigError(f"Offloading knows CUDA and CPU devices, not {device}: leave it off there.")
        if device.type == "cuda" and device.index is None:  # storages know their index: make the two comparable
            device = torch.device("cuda", torch.cuda.current_device())
        self.device = device
        self.stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.bytes_taken = 0
        self._chunk_bytes = chunk_bytes
        self._chunks: list[Tensor] = []
        self._next = 0  # where the next buffer starts, counted over all chunks

    @property
    def bytes(self) -> int:
        """The host memory that the arena has allocated, in bytes, handed out or not."""
        return len(self._chunks) * self._chunk_bytes

    def reserve(self, nbytes: int) -> None:
        """Allocate chunks until `nbytes` more can be handed out. Pinning takes a fraction of a second per GiB, so call
        this before the first step.

        Raises:
            MemoryPlanError: the host has no more memory. The chunks allocated so far stay.
        """
        while self.bytes - self._next < nbytes:
            self._chunks.append(self._chunk())

    def take(self, sizes: Sequence[int]) -> list[list[Tensor]]:
        """Hand out memory for several buffers of `sizes` bytes, growing where needed. Takes all or none.

        Returns:
            For each buffer its pieces, uint8 tensors on the host: one, or more where it crosses the end of a chunk.
            They are valid until they are given back.

        Raises:
            MemoryPlanError: the host has no more memory; nothing was handed out.
        """
        self.reserve(sum(aligned(size) for size in sizes))
        self.bytes_taken += sum(aligned(size) for size in sizes)
        return [self._cut(size) for size in sizes]

    def _cut(self, nbytes: int) -> list[Tensor]:
        pieces: list[Tensor] = []
        while nbytes:
            chunk, start = divmod(self._next, self._chunk_bytes)
            pieces.append(self._chunks[chunk][start : start + nbytes])  # up to the chunk's end
            nbytes -= len(pieces[-1])
            self._next += aligned(len(pieces[-1]))
        return pieces

    def give_back(self, sizes: Sequence[int]) -> None:
        """Mark buffers of these sizes as no longer used. Copies from them may still be under way on `stream`."""
        self.bytes_taken -= sum(aligned(size) for size in sizes)
        if not self.bytes_taken:
            self._next = 0

    @contextlib.contextmanager
    def copies(self) -> Iterator[torch.cuda.Event | None]:
        """Return a context for copies between device and arena. Copies that are queued inside run on `stream`, after
        all work that was queued on the current stream before. The context yields the event that marks the end of the
        copies; None on a CPU.

        Copies to the host must wait for the work that computes the tensors. Copies to the device must also wait,
        because queued work may still use the memory that has been allocated for them. The allocator treats memory as
        free as soon as its last user on the current stream is queued.
        """
        if self.stream is None:
            yield None
            return
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        end = torch.cuda.Event()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self.stream):
            yield end
            end.record(self.stream)

    def close(self) -> None:
        """Free the host memory, after all copies under way. May be called twice; the arena can be used again
        afterwards.

        Raises:
            HybridError: some memory that was handed out has not been given back.
        """
        if self.bytes_taken:
            raise HybridError(
                f"The host arena still holds {self.bytes_taken} bytes that have not returned to {self.device}. Call "
                "`start_return()` and `finish_return()` on every Offload first."
            )
        if self.stream is not None:
            self.stream.synchronize()
        pinned = self.stream is not None and bool(self._chunks)
        self._chunks.clear()
        if pinned:  # torch caches freed pinned memory and has no public way to give it back
            for name in ("_accelerator_emptyHostCache", "_host_emptyCache"):
                if (empty := getattr(torch._C, name, None)) is not None:
                    empty()
                    break

    def _chunk(self) -> Tensor:
        size = self._chunk_bytes
        try:
            chunk = torch.empty(size, dtype=torch.uint8, pin_memory=self.stream is not None)
            return chunk if self.stream is not None else chunk.fill_(0)  # pinning touches the pages, malloc does not
        except RuntimeError as error:
            raise MemoryPlanError(
                f"The host arena holds {self.bytes >> 20} MiB, and the host gives no {size >> 20} MiB more ({error}). "
                "Give the container more memory, raise `ulimit -l`, offload fewer owners, or shrink the KV cache.",
                owner="host arena",
            ) from error


def aligned(nbytes: int) -> int:
    """Return `nbytes` rounded up to the next offset at which a buffer may start."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
