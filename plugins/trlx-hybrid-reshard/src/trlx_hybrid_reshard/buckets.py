"""Buckets of transfers: the transfers of all ranks in one common order, cut where a bucket is full.

Every rank computes the same buckets from the two layouts, so that both ends of a transfer agree on when it happens. The
order is that of the layers within their pipeline stage of the target, so that stages fill at the same time. A parameter
larger than a bucket moves in rounds. Round k is the k-th share of the rows of every rank's own piece, the smaller of
its source and its target piece that has enough rows, so that all ranks send and receive in every round.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from .layouts import Model, Stage
from .plan import ModelSharding
from .sharding import Ints, Sharding, length, overlap

CAPACITY = 256 << 20
"""The capacity of a bucket: the bytes that one rank receives and packs in it, unless a single row is larger."""


@dataclass(frozen=True, slots=True, eq=False)
class Buckets:
    """The schedule of a reshard: the bucket in which each piece moves.

    Attributes:
        rounds: per parameter class, the number of shares of rows that a layer's piece is cut into.
        by_source: per parameter class, whether the source's pieces are cut, rather than the target's.
        numbers: per parameter class, an array (layers of a stage, rounds) of bucket numbers.
        count: the number of buckets.
        staged: the bytes of the fullest bucket that need staging, because they cannot be sent from or received into
            their final place.
    """

    rounds: tuple[int, ...]
    by_source: tuple[bool, ...]
    numbers: tuple[Ints, ...]
    count: int
    staged: int

    @property
    def peak_bytes(self) -> int:
        """The extra memory of the worst rank, in bytes: two buckets, one on the wire while the other is packed or
        written."""
        return 2 * self.staged


def bucketed(
    model: Model, source: ModelSharding, target: ModelSharding, capacity: int = CAPACITY, *, cast: bool = False
) -> Buckets:
    """Return the buckets of a reshard, the same on every rank.

    Args:
        cast: whether the sent tensors have another dtype than the wire, so that all of them are packed.
    """
    shardings = [(source.sharding(p), target.sharding(p).within(p.extent)) for p in model.parameters]
    costs = [_cost(*pair, model.itemsize, cast) for pair in shardings]
    cuts = [_rounds(*pair, moved, capacity) for pair, (moved, _) in zip(shardings, costs, strict=True)]
    rounds = tuple(shares for shares, _ in cuts)
    depths = [int(length(real.parts[0]).max()) for _, real in shardings]
    numbers = tuple(np.zeros((d, r), dtype=np.int64) for d, r in zip(depths, rounds, strict=True))
    bucket, used, staged, fullest = 0, 0, 0, 0
    for c, layer in _order(model, depths):
        moved, kept = (-(-cost // rounds[c]) for cost in costs[c])
        for share in range(rounds[c]):
            if used and used + moved > capacity:
                bucket, used, staged = bucket + 1, 0, 0
            numbers[c][layer, share] = bucket
            used, staged = used + moved, staged + kept
            fullest = max(fullest, staged)
    return Buckets(rounds, tuple(by_source for _, by_source in cuts), numbers, bucket + 1, fullest)


def _rounds(source: Sharding, target: Sharding, moved: int, capacity: int) -> tuple[int, bool]:
    """Return the number of shares, and whether the source's rows are cut. A row is never cut."""
    needed = max(1, -(-moved // capacity))
    held, asked = (int(length(sharding.parts[1]).max()) for sharding in (source, target))
    by_source = needed <= held <= asked or asked < needed
    return min(needed, held if by_source else asked), by_source


def _order(model: Model, depths: list[int]) -> Iterator[tuple[int, int]]:
    """Yield (class, layer within its stage) in the order of a forward pass."""
    stages = [p.stage for p in model.parameters]
    yield from ((c, 0) for c, stage in enumerate(stages) if stage in (Stage.FIRST, Stage.ENDS))
    layered = [c for c, stage in enumerate(stages) if stage is Stage.LAYERS]
    for layer in range(max((depths[c] for c in layered), default=0)):
        yield from ((c, layer) for c in layered if layer < depths[c])
    yield from ((c, 0) for c, stage in enumerate(stages) if stage is Stage.LAST)


def _cost(source: Sharding, target: Sharding, itemsize: int, cast: bool) -> tuple[int, int]:
    """Return the bytes of one layer that the worst rank receives and packs, and how many of them need staging."""
    wanted, own = _one_layer(target), _kept(source, target)
    received = int((wanted - own).max()) * itemsize
    if received == 0:
        return 0, 0
    packed = 0
    if cast or not _unbroken(source, target):
        stages = len(target.parts[0])  # all stages fill at the same time
        once = stages == 1 and not target.replicated  # no other rank wants the part that a rank keeps
        packed = int((_one_layer(source) - own * once).max()) * stages * itemsize
    return received + packed, packed + (0 if _unbroken(target, source) else received)


def _one_layer(sharding: Sharding) -> Ints:
    """Return the elements of one layer that each rank holds, (world,)."""
    one = np.ones(len(sharding.parts[0]), dtype=np.int64)
    return sharding.per_rank((one, *(length(parts) for parts in sharding.parts[1:])))


def _kept(source: Sharding, target: Sharding) -> Ints:
    """Return the elements of one layer that each rank has already, (world,); 0 where a rank lacks some layer of its
    target."""
    kept, every = (source.held & target.held).astype(np.int64), np.arange(source.world)
    for d, (asked, held) in enumerate(zip(target.pieces_of(every), source.pieces_of(every), strict=True)):
        common = overlap(asked, held)
        kept *= common if d else common == length(asked)
    return kept


def _unbroken(mine: Sharding, other: Sharding) -> bool:
    """Return whether any two ranks' common part is whole rows of `mine`, and so contiguous in its memory."""
    for own, others in zip(mine.parts[2:], other.parts[2:], strict=True):
        common = overlap(own[:, None], others[None])
        if own.shape[1] > 1 or not ((common == 0) | (common == length(own)[:, None])).all():
            return False
    return True
