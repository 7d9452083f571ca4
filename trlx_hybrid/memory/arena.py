"""One host buffer for all that leaves the device: made once, handed out from its start, kept until the run ends."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..errors import ConfigError, HybridError, MemoryPlanError

ALIGNMENT = 512  # bytes; where buffers start, so that one odd size does not slow the copies of all that follow
CHUNK_BYTES = 256 << 20  # a power of two, or torch's pinned allocator rounds up; bounds what is pinned in vain


class Arena:
    """Persistent host memory, pinned for a CUDA device. Grows by whole chunks, shrinks at `close` only.

    Buffers follow each other; the first one is taken from the start again once all have been given back, as they are
    in every training step. Every copy to or from it must be put on `stream`: that order is what makes memory safe to
    hand out again while copies from it are still under way, whoever owned it before.

    Args:
        device: the run's device, CUDA or CPU. With a CPU the memory is plain.
        chunk_bytes: size of a chunk, a power of two from 512 on; what crosses the end of one goes on in the next.

    Attributes:
        stream: the CUDA stream of all copies; None with a CPU.
        bytes_taken: how much of it is handed out, padding included.

    Raises:
        ConfigError: another kind of device.
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
        """Host memory held."""
        return len(self._chunks) * self._chunk_bytes

    def reserve(self, nbytes: int) -> None:
        """Grow until `nbytes` more can be taken. Pinning takes a fraction of a second per GiB: do it before the first
        step.

        Raises:
            MemoryPlanError: the host has no more memory to give. What was grown so far stays.
        """
        while self.bytes - self._next < nbytes:
            self._chunks.append(self._chunk())

    def take(self, sizes: Sequence[int]) -> list[list[Tensor]]:
        """Memory for several buffers of `sizes` bytes, growing where needed. All or none.

        Returns:
            The pieces of each, uint8 on the host, valid until they are given back.

        Raises:
            MemoryPlanError: see `reserve`.
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
        """Buffers of these sizes are done with. Copies from them may still be under way on `stream`."""
        self.bytes_taken -= sum(aligned(size) for size in sizes)
        if not self.bytes_taken:
            self._next = 0

    @contextlib.contextmanager
    def copies(self) -> Iterator[torch.cuda.Event | None]:
        """Work on `stream`, after all that the current stream was given so far; yields the event of its end.

        Going out, that work wrote what is read here. Coming in, it may still use the memory just allocated, which
        the allocator takes for free as soon as its last user on the current stream is queued.
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
        """Free the memory, after copies under way. Safe to call twice; the arena may be used anew.

        Raises:
            HybridError: somebody's bytes are still in it.
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
    """`nbytes` rounded up to where the next buffer may start."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
