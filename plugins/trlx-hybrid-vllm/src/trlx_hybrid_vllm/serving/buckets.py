"""Many tensors as few messages: which lie in which, and where. Both ends compute it from the same list."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

ALIGNMENT = 16  # bytes: a tensor of any dtype can begin there


@dataclass(frozen=True, slots=True)
class Described:
    """A tensor that is to be sent."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Without what fills it up to the alignment."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Bucket:
    """One message.

    Attributes:
        tensors: in the order in which they come; offsets: where each begins, in bytes.
        bytes: of the message.
    """

    tensors: tuple[Described, ...]
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
            yield message[offset : offset + tensor.bytes].view(tensor.dtype).view(tensor.shape)


def buckets(tensors: Iterable[Described], limit: int) -> Iterator[Bucket]:
    """Fill one bucket after the other, none above `limit` bytes but one that holds a single larger tensor."""
    held: list[Described] = []
    offsets: list[int] = []
    end = 0
    for tensor in tensors:
        size = -(-tensor.bytes // ALIGNMENT) * ALIGNMENT
        if held and end + size > limit:
            yield Bucket(tuple(held), tuple(offsets), end)
            held, offsets, end = [], [], 0
        held.append(tensor)
        offsets.append(end)
        end += size
    if held:
        yield Bucket(tuple(held), tuple(offsets), end)
