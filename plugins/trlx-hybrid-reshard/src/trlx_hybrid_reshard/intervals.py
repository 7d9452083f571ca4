"""Half-open index ranges along one dimension, as arrays: what a rank holds of a dimension is a few of them.

`parts` has shape (parts, intervals, 2) and dtype int64: for each part its ranges [start, stop), ascending; empty ranges
fill up where parts have different numbers of them. A rank's piece of a tensor is a product of one part per dimension,
so the overlap of two pieces is the product of the overlaps per dimension.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Ints: TypeAlias = NDArray[np.int64]


def whole(size: int) -> Ints:
    """The one part that is everything; (1, 1, 2)."""
    return np.array([[[0, size]]], dtype=np.int64)


def chunks(size: int, ways: int) -> Ints:
    """(ways, 1, 2), as `torch.chunk` cuts: all but the last of equal size, the last ones shorter or empty."""
    edges = np.minimum(np.arange(ways + 1, dtype=np.int64) * -(-size // ways), size)
    return np.stack([edges[:-1], edges[1:]], axis=-1)[:, None]


def segmented(size: int, ways: int, segments: int) -> Ints:
    """(ways, segments, 2): the same even share of each of `segments` fused blocks; `ways` divides each block."""
    block = size // segments
    share = block // ways
    starts = np.arange(ways, dtype=np.int64)[:, None] * share + np.arange(segments, dtype=np.int64) * block
    return np.stack([starts, starts + share], axis=-1)


def rechunked(parts: Ints, ways: int) -> Ints:
    """(parts * ways, intervals, 2): each part, its ranges laid end to end, cut as `torch.chunk` would."""
    lengths = parts[..., 1] - parts[..., 0]
    ends = lengths.cumsum(axis=1)
    total = ends[:, -1:]
    edges = np.minimum(np.arange(ways + 1, dtype=np.int64) * -(-total // ways), total)
    before = (ends - lengths)[:, None]
    start = np.clip(edges[:, :-1, None] - before, 0, lengths[:, None]) + parts[:, None, :, 0]
    stop = np.clip(edges[:, 1:, None] - before, 0, lengths[:, None]) + parts[:, None, :, 0]
    return np.stack([start, stop], axis=-1).reshape(-1, parts.shape[1], 2)


def length(parts: Ints) -> Ints:
    """Indices in each part; any leading shape."""
    result: Ints = (parts[..., 1] - parts[..., 0]).sum(axis=-1)
    return result


def crossings(left: Ints, right: Ints) -> Ints:
    """(..., intervals of left * intervals of right, 2): the ranges common to both, empty ones as start = stop.

    Leading shapes broadcast.
    """
    a, b = left[..., :, None, :], right[..., None, :, :]
    start = np.maximum(a[..., 0], b[..., 0])
    stop = np.maximum(np.minimum(a[..., 1], b[..., 1]), start)
    return np.stack([start, stop], axis=-1).reshape(*start.shape[:-2], start.shape[-2] * start.shape[-1], 2)


def overlap(left: Ints, right: Ints) -> Ints:
    """How many indices both hold; leading shapes broadcast."""
    a, b = left[..., :, None, :], right[..., None, :, :]
    common = np.minimum(a[..., 1], b[..., 1]) - np.maximum(a[..., 0], b[..., 0])
    result: Ints = np.maximum(common, 0).sum(axis=(-2, -1))
    return result


def local(part: Ints, index: Ints) -> Ints:
    """Where global indices lie in a part whose ranges are laid end to end; `part` is (intervals, 2), `index` any shape.

    Each index must be in the part.
    """
    lengths = part[:, 1] - part[:, 0]
    before = lengths.cumsum() - lengths
    inside = (index[..., None] >= part[:, 0]) & (index[..., None] < part[:, 1])
    which = inside.argmax(axis=-1)
    result: Ints = index - part[which, 0] + before[which]
    return result
