"""Lists of all boxes that one rank sends, receives and copies in a reshard (a move of the weights from one sharding to
another). A box is one index range per dimension of a parameter's layer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .buckets import Buckets
from .plan import LayerAssignment, RankPlan
from .sharding import Ints, Sharding, crossings, position_in, rechunked

DIMENSIONS = 5
"""The largest number of dimensions that a parameter may have, layers not counted: 5, as a convolution over video frames
has. A box of a tensor with fewer dimensions has the range [0, 1) in the others."""

SLICE = np.dtype(
    [
        ("bucket", np.int32),
        ("peer", np.int32),
        ("parameter", np.int32),
        ("layer", np.int32),
        ("start", np.int64, (DIMENSIONS,)),
        ("stop", np.int64, (DIMENSIONS,)),
        ("here", np.int64, (DIMENSIONS,)),
    ]
)
"""The numpy dtype that describes one box to be moved. A box is one index range per dimension of a parameter's layer.

The fields: the number of the group of transfers in which it moves (`bucket`); the rank at the other end (`peer`); the
number of its parameter class (`parameter`); its layer as a position in `Parameter.layers`; the box's `start` and `stop`
in the whole tensor; and its start in this rank's own part of the tensor (`here`), in which all ranges that the rank
holds are laid end to end.
"""

Slices = NDArray[np.void]


@dataclass(frozen=True, slots=True, eq=False)
class Descriptors:
    """The boxes that one rank receives, sends and copies in a reshard. A box is one index range per dimension of a
    parameter. Receives and sends are sorted by bucket, peer, parameter, layer and position, so that sender and receiver
    find the same order.

    Attributes:
        receives, sends: arrays of dtype `SLICE` (bucket, other rank, parameter, layer and index ranges), one entry per
            box.
        copies: the boxes that the rank holds both before and after the reshard and so copies itself, of dtype `SLICE`.
            The field `here` is the index per dimension at which a box starts in the rank's part after the reshard.
        there: the index per dimension at which each box of `copies` starts in the rank's part before the reshard, int64
            of shape (copies, DIMENSIONS).
    """

    receives: Slices
    sends: Slices
    copies: Slices
    there: Ints


def lower(made: RankPlan, buckets: Buckets) -> Descriptors:
    """Return the boxes (one index range per dimension of a parameter) that one rank sends, receives and copies, worked
    out from its plan.

    Args:
        made: the rank's plan, which says for each parameter how much goes to which rank.
        buckets: the schedule, which says in which bucket each layer moves.
    """
    lists: tuple[list[Slices], ...] = ([], [], [])
    theirs: list[Ints] = []
    for number, one in enumerate(made.classes):
        lowering = _Lowering(number, one.source, one.target, made.rank, buckets)
        copies = lowering.slices(np.array([made.rank] if one.local else [], dtype=np.int64), None, receiving=True)
        theirs.append(_here(one.source, made.rank, copies["start"]))
        received = lowering.slices(np.flatnonzero(one.receives), one.received_layers, receiving=True)
        sent = lowering.slices(np.flatnonzero(one.sends), one.sent_layers, receiving=False)
        for found, slices in zip(lists, (received, sent, copies), strict=True):
            found.append(slices)
    received, sent, copied = (np.concatenate(found) for found in lists)
    return Descriptors(_sorted(received), _sorted(sent), copied, np.concatenate(theirs))


@dataclass(frozen=True, slots=True, eq=False)
class _Lowering:
    """A computation of the boxes of one parameter class that one rank sends, receives and copies. A box is one index
    range per dimension; a parameter class is one parameter in all its layers.

    Attributes:
        number: the number of the parameter class in the model.
        source, target: the sharding of the parameter class before and after the reshard.
        rank: the rank whose boxes are computed.
        buckets: the schedule of the reshard.
    """

    number: int
    source: Sharding
    target: Sharding
    rank: int
    buckets: Buckets

    def slices(self, peers: Ints, assignment: LayerAssignment | None, *, receiving: bool) -> Slices:
        """Return the boxes (one index range per dimension of a parameter's layer) that this rank exchanges with some
        ranks, as an array of dtype `SLICE`.

        Args:
            peers: the other ranks, int64 of shape (peers,); or the rank itself, for its local copies.
            assignment: which layers each pair of ranks transfers, if several ranks hold the same data and each sends
                some of the layers; None for all layers that both ends hold.
            receiving: whether this rank receives the boxes; otherwise it sends them.
        """
        here, there = (self.target, self.source) if receiving else (self.source, self.target)
        own, others = here.piece(self.rank), there.pieces_of(peers)
        layers = crossings(own[0][None], others[0])[:, 0]
        stage = own[0][0, 0] if receiving else others[0][:, 0, 0]
        found = [np.zeros(0, dtype=SLICE)]
        for share in range(self.buckets.rounds[self.number]):
            sides = [list(own), list(others)]
            cut = int(receiving is self.buckets.by_source[self.number])
            sides[cut][1] = self._share(sides[cut][1], share)
            who, boxes = _boxes([crossings(a, b) for a, b in zip(sides[0][1:], sides[1][1:], strict=True)], len(peers))
            who, boxes, layer = _in_layers(who, boxes, layers, assignment, peers)
            slices = np.zeros(len(who), dtype=SLICE)
            slices["peer"], slices["parameter"], slices["layer"] = peers[who], self.number, layer
            within = layer - (stage if receiving else np.asarray(stage)[who])
            slices["bucket"] = self.buckets.numbers[self.number][within, share]
            slices["stop"] = 1
            slices["start"][:, : boxes.shape[1]], slices["stop"][:, : boxes.shape[1]] = boxes[..., 0], boxes[..., 1]
            slices["here"] = _here(here, self.rank, slices["start"])
            found.append(slices)
        return np.concatenate(found)

    def _share(self, rows: Ints, share: int) -> Ints:
        """Return the index ranges of rows that move in one round. A large parameter moves in several rounds, each with
        another share of its rows.

        Args:
            rows: the index ranges of the rows of some ranks, int64 of shape (..., intervals, 2).
            share: the number of the round.

        Returns:
            The ranges of that share, in an array of the same shape; ranges outside the share are empty.
        """
        rounds = self.buckets.rounds[self.number]
        parts = rows.reshape(-1, *rows.shape[-2:])
        return rechunked(parts, rounds).reshape(len(parts), rounds, *rows.shape[-2:])[:, share].reshape(rows.shape)


def _boxes(crossed: list[Ints], count: int) -> tuple[Ints, Ints]:
    """Combine the index ranges of all dimensions into boxes (one range per dimension), and leave out the empty ones.

    Args:
        crossed: for each dimension, the ranges common to this rank and each peer, int64 of shape (peers or 1, ranges,
            2).
        count: the number of peers.

    Returns:
        For each box the index of its peer, shape (boxes,), and its ranges, shape (boxes, dimensions, 2).
    """
    who = np.arange(count)
    boxes = np.zeros((count, 0, 2), dtype=np.int64)
    for ranges in crossed:
        ranges = np.broadcast_to(ranges, (count, *ranges.shape[-2:]))[who]
        some, which = np.nonzero(ranges[..., 1] > ranges[..., 0])
        who, boxes = who[some], np.concatenate([boxes[some], ranges[some, which][:, None]], axis=1)
    return who, boxes


def _in_layers(
    who: Ints, boxes: Ints, layers: Ints, assignment: LayerAssignment | None, peers: Ints
) -> tuple[Ints, Ints, Ints]:
    """Repeat each box (one index range per dimension of one layer) for every layer that both ends hold and that this
    pair of ranks transfers.

    Args:
        who: the index of each box's peer, (boxes,).
        boxes: the boxes of one layer, (boxes, dimensions, 2).
        layers: the range of layers that this rank and each peer have in common, (peers, 2).
        assignment: which layers each pair of ranks transfers, if several ranks hold the same data and each sends some
            of the layers; None for all layers.
        peers: the ranks of the peers, (peers,).

    Returns:
        The index of the peer and the ranges, as in `who` and `boxes` but with one entry per box and layer, and the
            layer of each entry.
    """
    depth = np.maximum(layers[:, 1] - layers[:, 0], 0)[who]
    again = np.repeat(np.arange(len(who)), depth)
    layer = layers[who, 0][again] + np.arange(len(again)) - (np.cumsum(depth) - depth)[again]
    if assignment is not None:
        peer = peers[who[again]]
        now = (layer + assignment.key[peer]) % assignment.holders[peer] == assignment.order[peer]
        again, layer = again[now], layer[now]
    return who[again], boxes[again], layer


def _here(sharding: Sharding, rank: int, start: Ints) -> Ints:
    """Return where boxes (one index range per dimension) begin in the rank's own part of the parameter, in which all
    ranges that the rank holds are laid end to end.

    Args:
        sharding: the sharding that says which part the rank holds.
        rank: the rank.
        start: the boxes' starts in the whole tensor, int64 of shape (boxes, DIMENSIONS).

    Returns:
        Their starts in the rank's part, in the same shape.
    """
    placed = start.copy()
    for d, part in enumerate(sharding.piece(rank)[1:]):
        placed[:, d] = position_in(part, start[:, d])
    return placed


def _sorted(slices: Slices) -> Slices:
    """Sort boxes, given as an array of dtype `SLICE`, by bucket, peer, parameter, layer and start."""
    starts = [slices["start"][:, d] for d in reversed(range(DIMENSIONS))]
    keys = [slices[name] for name in ("layer", "parameter", "peer", "bucket")]
    ordered: Slices = slices[np.lexsort((*starts, *keys))]
    return ordered
