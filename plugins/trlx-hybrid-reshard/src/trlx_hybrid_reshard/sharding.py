"""Shardings of one parameter: which part of it each rank holds, as one set of index ranges per dimension.

Ranges are half-open and lie in int64 arrays. An array of parts has shape (parts, intervals, 2): for each part of a
dimension, its ranges [start, stop), ascending. Parts that have fewer ranges than others are filled up with empty ones.
A piece is what a rank holds of a tensor: the product of one part per dimension. So the overlap of two pieces is the
product of the overlaps per dimension.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Ints: TypeAlias = NDArray[np.int64]
"""An int64 array."""


@dataclass(frozen=True, slots=True, eq=False)
class Sharding:
    """A parameter cut into pieces, and the piece that each rank holds. A piece is the product of one part (a set of
    index ranges) per dimension. Pieces are disjoint and cover the parameter; several ranks may hold the same piece, and
    a rank may hold none.

    Attributes:
        world: the number of ranks.
        parts: for each dimension, the parts into which it is cut, int64 of shape (parts, intervals, 2). The first
            dimension counts the model's layers.
        coordinates: for each dimension, the number of the part that each rank holds, int64 of shape (ranks,).
        held: whether each rank holds a piece, bool of shape (ranks,).
    """

    world: int
    parts: tuple[Ints, ...]
    coordinates: tuple[Ints, ...]
    held: NDArray[np.bool_]

    def holds(self, rank: int) -> bool:
        """Return whether the rank holds some of the parameter. True also if what it holds has no elements, as an FSDP
        shard may."""
        return bool(self.held[rank])

    def piece(self, rank: int) -> tuple[Ints, ...]:
        """Return the index ranges of the parameter that one rank holds: for each dimension, int64 of shape (intervals,
        2) with the start and end of each range. Call it only for a rank for which `holds` is True."""
        return tuple(part[at[rank]] for part, at in zip(self.parts, self.coordinates, strict=True))

    def pieces_of(self, ranks: Ints) -> tuple[Ints, ...]:
        """Return the index ranges of the parameter that several ranks hold: for each dimension, int64 of shape (ranks,
        intervals, 2) with the start and end of each range. Give only ranks for which `holds` is True."""
        return tuple(part[at[ranks]] for part, at in zip(self.parts, self.coordinates, strict=True))

    def within(self, extent: tuple[int, ...]) -> Sharding:
        """Return this sharding without padding: ranges that go beyond the parameter end where it ends.

        Args:
            extent: the parameter's shape without padding, layers first.
        """
        parts = tuple(np.minimum(part, size) for part, size in zip(self.parts, extent, strict=True))
        return Sharding(self.world, parts, self.coordinates, self.held)

    def elements(self, rank: int) -> int:
        """Return the number of elements that the rank holds; 0 if it holds nothing."""
        return math.prod(int(length(part)) for part in self.piece(rank)) if self.holds(rank) else 0

    @property
    def replicated(self) -> bool:
        """True if several ranks hold the same index ranges of the parameter."""
        return int(self.held.sum()) != math.prod(len(p) for p in self.parts)

    def pieces(self) -> Ints:
        """Return, for each rank, a number that identifies what it holds: int64 of shape (ranks,), -1 if it holds
        nothing. Ranks with the same number hold the same index ranges of the parameter."""
        number = np.zeros(self.world, dtype=np.int64)
        for parts, coordinates in zip(self.parts, self.coordinates, strict=True):
            number = number * len(parts) + coordinates
        return np.where(self.held, number, -1)

    def per_rank(self, values: tuple[Ints, ...]) -> Ints:
        """Return a number for each rank: the product, over all dimensions, of the value that belongs to the part which
        the rank holds in that dimension. If the values are the lengths of the parts, the products are the ranks'
        numbers of elements.

        Args:
            values: for each dimension, one value for each of its parts, int64 of shape (parts,).

        Returns:
            int64 of shape (ranks,), 0 for a rank that holds nothing.
        """
        product = self.held.astype(np.int64)
        for value, coordinates in zip(values, self.coordinates, strict=True):
            product *= value[coordinates]
        return product


def uncut(size: int) -> Ints:
    """Return the single part that covers a whole dimension of this size: the range [0, size), int64 of shape (1, 1,
    2)."""
    return np.array([[[0, size]]], dtype=np.int64)


def segmented(size: int, ways: int, segments: int) -> Ints:
    """Cut a dimension that consists of fused blocks, such as gate and up, so that each rank gets the same even share of
    every block.

    Args:
        size: the number of indices of the dimension.
        ways: the number of ranks, which divides each block.
        segments: the number of blocks of equal size.

    Returns:
        For each rank its ranges, int64 of shape (ways, segments, 2).
    """
    block = size // segments
    share = block // ways
    starts = np.arange(ways, dtype=np.int64)[:, None] * share + np.arange(segments, dtype=np.int64) * block
    return np.stack([starts, starts + share], axis=-1)


def rechunked(parts: Ints, ways: int) -> Ints:
    """Cut each part of a dimension into `ways` smaller parts, of the sizes that `torch.chunk` would give. If a part has
    several index ranges, they are laid end to end and then cut.

    Args:
        parts: the parts of one dimension, int64 of shape (parts, intervals, 2).
        ways: the number of smaller parts of each part.

    Returns:
        The smaller parts, shape (parts * ways, intervals, 2).
    """
    lengths = parts[..., 1] - parts[..., 0]
    ends = lengths.cumsum(axis=1)
    total = ends[:, -1:]
    edges = np.minimum(np.arange(ways + 1, dtype=np.int64) * -(-total // ways), total)
    inside = np.minimum(np.maximum(edges[..., None] - (ends - lengths)[:, None], 0), lengths[:, None])
    inside += parts[:, None, :, 0]
    return np.stack([inside[:, :-1], inside[:, 1:]], axis=-1).reshape(-1, parts.shape[1], 2)


def length(parts: Ints) -> Ints:
    """Return the number of indices in each part, that is, the sum over its index ranges: from shape (..., intervals, 2)
    to shape (...)."""
    result: Ints = (parts[..., 1] - parts[..., 0]).sum(axis=-1)
    return result


def crossings(left: Ints, right: Ints) -> Ints:
    """Return the index ranges that two parts of a dimension have in common. Leading dimensions broadcast.

    Args:
        left, right: parts, int64 of shape (..., intervals, 2): the start and end of each range.

    Returns:
        The common ranges, shape (..., intervals of left * intervals of right, 2). Empty ones have start = stop.
    """
    a, b = left[..., :, None, :], right[..., None, :, :]
    start = np.maximum(a[..., 0], b[..., 0])
    stop = np.maximum(np.minimum(a[..., 1], b[..., 1]), start)
    return np.stack([start, stop], axis=-1).reshape(*start.shape[:-2], start.shape[-2] * start.shape[-1], 2)


def overlap(left: Ints, right: Ints) -> Ints:
    """Return the number of indices that two parts of a dimension have in common: from shape (..., intervals, 2), the
    start and end of each range, to shape (...). Leading dimensions broadcast."""
    a, b = left[..., :, None, :], right[..., None, :, :]
    common = np.minimum(a[..., 1], b[..., 1]) - np.maximum(a[..., 0], b[..., 0])
    result: Ints = np.maximum(common, 0).sum(axis=(-2, -1))
    return result


def position_in(part: Ints, index: Ints) -> Ints:
    """Return where global indices lie in a part whose ranges are laid end to end, as in a rank's local tensor.

    Args:
        part: the ranges of the part, int64 of shape (intervals, 2).
        index: global indices of any shape, each of which must lie in the part.

    Returns:
        The positions, in the shape of `index`.
    """
    lengths = part[:, 1] - part[:, 0]
    before = lengths.cumsum() - lengths
    inside = (index[..., None] >= part[:, 0]) & (index[..., None] < part[:, 1])
    which = inside.argmax(axis=-1)
    result: Ints = index - part[which, 0] + before[which]
    return result
