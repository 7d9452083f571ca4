"""Memory that messages are packed into and received in, held only while a sync runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

ALIGNMENT = 256
"""Bytes. What a copy kernel and the network like to start at."""


class Staging:
    """Buffers of equal size, used in turn: one is on the wire while the other is packed or written.

    Views of them are made once, before the first `release`. Between syncs the storages are empty, and the views stay
    valid; unless the buffers are kept, because a recording names their addresses.

    Args:
        elements: of one buffer.
        count: of buffers.
    """

    def __init__(self, elements: int, count: int, dtype: torch.dtype, device: torch.device) -> None:
        self._buffers = [torch.empty(elements, dtype=dtype, device=device) for _ in range(count)]
        self._size = elements * dtype.itemsize
        self._kept = False

    @property
    def bytes(self) -> int:
        """Of all buffers, while a sync runs."""
        return self._size * len(self._buffers)

    def view(self, number: int, start: int, elements: int) -> Tensor:
        """A range of buffer `number` modulo the count; flat."""
        return self._buffers[number % len(self._buffers)].as_strided((elements,), (1,), start)

    @contextmanager
    def held(self) -> Iterator[None]:
        """While it has memory."""
        if not self._kept:
            for buffer in self._buffers:
                buffer.untyped_storage().resize_(self._size)
        try:
            yield
        finally:
            self.release()

    def keep(self) -> None:
        """From now on, while it is held: never give it back."""
        self._kept = True

    def release(self) -> None:
        """Give the memory back, unless it is kept."""
        if not self._kept:
            for buffer in self._buffers:
                buffer.untyped_storage().resize_(0)


def aligned(elements: int, itemsize: int) -> int:
    """The next number of elements at which something may start."""
    unit = max(1, ALIGNMENT // itemsize)
    return -(-elements // unit) * unit
