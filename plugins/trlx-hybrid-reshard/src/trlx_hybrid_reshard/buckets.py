"""The schedule of a reshard (a move of the weights from one sharding to another): all transfers between all ranks in
one common order, divided into buckets of limited size.

Every rank computes the same buckets from the two layouts, so that sender and receiver agree on when a transfer happens.
The transfers are ordered by layer, counted within the engine's pipeline stage, so that all stages fill at the same
time. A parameter larger than a bucket moves in rounds: each rank's part of it is cut along its rows into as many shares
as there are rounds, and round k moves share k of every rank. So all ranks send and receive in every round. The shares
are cut either from the ranks' parts in the source layout (before the reshard) or from their parts in the target layout
(after the reshard). The layout with fewer rows per rank is cut, unless it has fewer rows than there are rounds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from .layouts import Model, Stage
from .plan import ModelSharding
from .sharding import Ints, Sharding, length, overlap

CAPACITY = 256 << 20
"""The default capacity of a bucket in bytes: what one rank receives and packs for it, unless a single row of a tensor
is larger."""


@dataclass(frozen=True, slots=True, eq=False)
class Buckets:
    """The schedule of a reshard: the number of the bucket in which each part of each parameter moves. A bucket is a
    limited number of bytes that are sent together.

    A parameter class is one parameter, such as `q_proj.weight`, in all layers. The tuples `rounds`, `by_source` and
    `numbers` have one entry per class.

    Attributes:
        rounds: into how many shares the rows of one layer are cut. In each round one share of every rank moves.
        by_source: True if the shares are cut from the ranks' parts before the reshard, False if they are cut from the
            ranks' parts after the reshard.
        numbers: the bucket numbers, int64 of shape (layers of a pipeline stage, rounds).
        count: the number of buckets.
        staged: the bytes of the fullest bucket that need a staging buffer, because they cannot be sent from or received
            into their final place.
    """

    rounds: tuple[int, ...]
    by_source: tuple[bool, ...]
    numbers: tuple[Ints, ...]
    count: int
    staged: int

    @property
    def peak_bytes(self) -> int:
        """The extra memory of the worst rank in bytes: two buckets, of which one is on the wire while the other is
        packed or unpacked."""
        return 2 * self.staged


def bucketed(
    model: Model, source: ModelSharding, target: ModelSharding, capacity: int = CAPACITY, *, cast: bool = False
) -> Buckets:
    """Divide the transfers of a reshard into buckets (each a limited number of bytes that are sent together), in the
    same way on every rank.

    Args:
        model: the parameters to move.
        source: the layout of the model before the reshard: which rank holds which part of each parameter.
        target: its layout after the reshard.
        capacity: the bytes that one rank receives and packs for one bucket.
        cast: whether the weights are stored in another dtype than they are sent in, so that all of them are packed.
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
    """Return the number of rounds in which one layer of a parameter moves, and from which sharding its shares are cut.
    Each round moves one share of the rows, which fits into a bucket if there are enough rows.

    Args:
        source: the parameter's sharding before the reshard.
        target: its sharding after the reshard.
        moved: the bytes of one layer that the worst rank receives and packs.
        capacity: the bytes of a bucket.

    Returns:
        The number of rounds, and True if the shares are cut from the ranks' parts in `source`, False if they are cut
            from their parts in `target`.
    """
    needed = max(1, -(-moved // capacity))
    held, asked = (int(length(sharding.parts[1]).max()) for sharding in (source, target))
    by_source = needed <= held <= asked or asked < needed
    return min(needed, held if by_source else asked), by_source


def _order(model: Model, depths: list[int]) -> Iterator[tuple[int, int]]:
    """Yield the layers of all parameters in the order of a forward pass, as pairs: the number of the parameter class
    (one parameter in all its layers), and the number of the layer within its pipeline stage.

    Args:
        model: the parameters.
        depths: for each parameter class, the most layers of it in one pipeline stage.
    """
    stages = [p.stage for p in model.parameters]
    yield from ((c, 0) for c, stage in enumerate(stages) if stage in (Stage.FIRST, Stage.ENDS))
    layered = [c for c, stage in enumerate(stages) if stage is Stage.LAYERS]
    for layer in range(max((depths[c] for c in layered), default=0)):
        yield from ((c, layer) for c in layered if layer < depths[c])
    yield from ((c, 0) for c, stage in enumerate(stages) if stage is Stage.LAST)


def _cost(source: Sharding, target: Sharding, itemsize: int, cast: bool) -> tuple[int, int]:
    """Return two numbers of bytes for one layer of a parameter: what the worst rank receives and packs, and how much of
    that needs a staging buffer.

    Args:
        source: the parameter's sharding before the reshard.
        target: its sharding after the reshard.
        itemsize: bytes per element as it is sent.
        cast: whether the weights are stored in another dtype than they are sent in, so that all of them are packed.
    """
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
    """Return the number of elements of one layer that each rank holds, int64 of shape (ranks,)."""
    one = np.ones(len(sharding.parts[0]), dtype=np.int64)
    return sharding.per_rank((one, *(length(parts) for parts in sharding.parts[1:])))


def _kept(source: Sharding, target: Sharding) -> Ints:
    """Return the number of elements of one layer that each rank holds both before and after the reshard, int64 of shape
    (ranks,).

    The number counts elements that a rank keeps in every layer that it holds after the reshard. So it is 0 for a rank
    that holds some of these layers only after the reshard."""
    kept, every = (source.held & target.held).astype(np.int64), np.arange(source.world)
    for d, (asked, held) in enumerate(zip(target.pieces_of(every), source.pieces_of(every), strict=True)):
        common = overlap(asked, held)
        kept *= common if d else common == length(asked)
    return kept


def _unbroken(mine: Sharding, other: Sharding) -> bool:
    """Return whether every slice of a parameter that is sent or received is contiguous in the memory of the ranks in
    the layout `mine`. A slice is contiguous if it consists of whole rows of the part that the rank holds; it can then
    be sent or received without a buffer.

    Args:
        mine: the parameter's sharding whose memory is examined: before the reshard for sending, after it for receiving.
        other: the parameter's sharding at the other end of the transfer.
    """
    for own, others in zip(mine.parts[2:], other.parts[2:], strict=True):
        common = overlap(own[:, None], others[None])
        if own.shape[1] > 1 or not ((common == 0) | (common == length(own)[:, None])).all():
            return False
    return True
