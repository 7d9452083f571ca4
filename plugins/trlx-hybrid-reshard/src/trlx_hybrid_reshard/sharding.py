"""Shardings of one parameter: the piece that each rank holds, as a product of index ranges, one set of them per
dimension.

Ranges are half-open and lie in arrays. `parts` has shape (parts, intervals, 2) and dtype int64: for each part its
ranges [start, stop), ascending; empty ranges fill up parts that have fewer ranges than others. A rank's piece of a
tensor is a product of one part per dimension, so the overlap of two pieces is the product of the overlaps per
dimension.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Ints: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Sharding:
    """A parameter cut into pieces. Pieces are disjoint and cover the parameter; several ranks may hold the same piece,
    and a rank may hold none.

    Attributes:
        world: the number of ranks.
        parts: for each dimension, starting with the layers', its parts: an array (parts, intervals, 2).
        coordinates: for each dimension, the number of the part that each rank holds, (world,).
        held: (world,), whether each rank holds a piece.
    """

    world: int
    parts: tuple[Ints, ...]
    coordinates: tuple[Ints, ...]
    held: NDArray[np.bool_]

    def holds(self, rank: int) -> bool:
        """Return whether the rank has a piece, even an empty one."""
        return bool(self.held[rank])

    def piece(self, rank: int) -> tuple[Ints, ...]:
        """Return the rank's ranges (intervals, 2) of each dimension. The rank must have a piece."""
        return tuple(part[at[rank]] for part, at in zip(self.parts, self.coordinates, strict=True))

    def pieces_of(self, ranks: Ints) -> tuple[Ints, ...]:
        """Return the ranges (ranks, intervals, 2) of each dimension, of several ranks. All of these must have a
        piece."""
        return tuple(part[at[ranks]] for part, at in zip(self.parts, self.coordinates, strict=True))

    def within(self, extent: tuple[int, ...]) -> Sharding:
        """Return this sharding without the padding: ranges end where the parameter does."""
        parts = tuple(np.minimum(part, size) for part, size in zip(self.parts, extent, strict=True))
        return Sharding(self.world, parts, self.coordinates, self.held)

    def elements(self, rank: int) -> int:
        """Return the number of elements of the rank's piece; 0 where it has none."""
        return math.prod(int(length(part)) for part in self.piece(rank)) if self.holds(rank) else 0

    @property
    def replicated(self) -> bool:
        """True where some piece has more than one holder."""
        return int(self.held.sum()) != math.prod(len(p) for p in self.parts)

    def pieces(self) -> Ints:
        """Return the number of the piece that each rank holds, (world,); -1 for none."""
        number = np.zeros(self.world, dtype=np.int64)
        for parts, coordinates in zip(self.parts, self.coordinates, strict=True):
            number = number * len(parts) + coordinates
        return np.where(self.held, number, -1)

    def per_rank(self, values: tuple[Ints, ...]) -> Ints:
        """Return, for each rank, the product of `values[d]` over the parts that it holds, (world,). `values[d]` has one
        value per part of dimension d."""
        product = self.held.astype(np.int64)
        for value, coordinates in zip(values, self.coordinates, strict=True):
            product *= value[coordinates]
        return product


def uncut(size: int) -> Ints:
    """Return the single part that covers a whole dimension, (1, 1, 2)."""
    return np.array([[[0, size]]], dtype=np.int64)


def segmented(size: int, ways: int, segments: int) -> Ints:
    """Return, for each of `ways` ranks, the same even share of each of `segments` fused blocks, (ways, segments, 2).
    `ways` divides each block."""
    block = size // segments
    share = block // ways
    starts = np.arange(ways, dtype=np.int64)[:, None] * share + np.arange(segments, dtype=np.int64) * block
    return np.stack([starts, starts + share], axis=-1)


def rechunked(parts: Ints, ways: int) -> Ints:
    """Return each part, its ranges laid end to end, cut as `torch.chunk` would cut it, (parts * ways, intervals, 2)."""
    lengths = parts[..., 1] - parts[..., 0]
    ends = lengths.cumsum(axis=1)
    total = ends[:, -1:]
    edges = np.minimum(np.arange(ways + 1, dtype=np.int64) * -(-total // ways), total)
    inside = np.minimum(np.maximum(edges[..., None] - (ends - lengths)[:, None], 0), lengths[:, None])
    inside += parts[:, None, :, 0]
    return np.stack([inside[:, :-1], inside[:, 1:]], axis=-1).reshape(-1, parts.shape[1], 2)


def length(parts: Ints) -> Ints:
    """Return the number of indices in each part; any leading shape."""
    result: Ints = (parts[..., 1] - parts[..., 0]).sum(axis=-1)
    return result


def crossings(left: Ints, right: Ints) -> Ints:
    """Return the ranges common to both, (..., intervals of left * intervals of right, 2). Empty ones have start = stop.

    Leading shapes broadcast.
    """
    a, b = left[..., :, None, :], right[..., None, :, :]
    start = np.maximum(a[..., 0], b[..., 0])
    stop = np.maximum(np.minimum(a[..., 1], b[..., 1]), start)
    return np.stack([start, stop], axis=-1).reshape(*start.shape[:-2], start.shape[-2] * start.shape[-1], 2)


def overlap(left: Ints, right: Ints) -> Ints:
    """Return the number of indices that both hold; leading shapes broadcast."""
    a, b = left[..., :, None, :], right[..., None, :, :]
    common = np.minimum(a[..., 1], b[..., 1]) - np.maximum(a[..., 0], b[..., 0])
    result: Ints = np.maximum(common, 0).sum(axis=(-2, -1))
    return result


def position_in(part: Ints, index: Ints) -> Ints:
    """Return the positions of global indices in a part whose ranges are laid end to end. `part` is (intervals, 2),
    `index` any shape.

    Each index must be in the part.
    """
    lengths = part[:, 1] - part[:, 0]
    before = lengths.cumsum() - lengths
    inside = (index[..., None] >= part[:, 0]) & (index[..., None] < part[:, 1])
    which = inside.argmax(axis=-1)
    result: Ints = index - part[which, 0] + before[which]
    return result
