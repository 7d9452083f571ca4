"""Slices grouped into messages: what goes from one rank to another in one piece.

A large slice is a message of its own, so that it can be sent from, and received into, the place it belongs to. Small
ones that share a bucket and a peer travel together, packed. Both ends know sizes and order of the slices, so both find
the same messages.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from .descriptors import Slices

ALONE = 1 << 20
"""Bytes from which a slice is a message of its own: far above what a message costs, 10 µs or 3 MB of NVLink's time."""


@dataclass(frozen=True, slots=True, eq=False)
class Message:
    """One message of a bucket.

    Attributes:
        peer: the rank at the other end.
        slices: (slices,) of `descriptors.SLICE`, in the order of the bytes.
        sizes: elements of each.
    """

    peer: int
    slices: Slices
    sizes: tuple[int, ...]

    @property
    def content(self) -> bytes:
        """Equal for messages of the same bytes to other ranks."""
        return b"".join(self.slices[name].tobytes() for name in ("parameter", "start", "stop"))

    @property
    def elements(self) -> int:
        """Of all slices."""
        return sum(self.sizes)


def messages(slices: Slices, bucket: int, itemsize: int, alone: int = ALONE) -> list[Message]:
    """The messages of one bucket in one direction, by peer, in the order both ends agree on.

    Args:
        slices: of that direction, of all buckets, sorted as `descriptors.lower` sorts them.
        itemsize: bytes per element on the wire.
    """
    first, last = np.searchsorted(slices["bucket"], [bucket, bucket + 1])
    found = slices[first:last]
    sizes = (found["stop"] - found["start"]).prod(axis=1)
    edges = np.flatnonzero(np.diff(found["peer"], prepend=-1, append=-1))
    return [m for a, b in itertools.pairwise(edges) for m in _of_peer(found[a:b], sizes[a:b], alone // itemsize)]


def _of_peer(slices: Slices, sizes: np.ndarray[tuple[int], np.dtype[np.int64]], alone: int) -> Iterator[Message]:
    large = sizes >= alone
    for i in np.flatnonzero(large):
        yield Message(int(slices["peer"][i]), slices[i : i + 1], (int(sizes[i]),))
    if not large.all():
        yield Message(int(slices["peer"][0]), slices[~large], tuple(sizes[~large].tolist()))
