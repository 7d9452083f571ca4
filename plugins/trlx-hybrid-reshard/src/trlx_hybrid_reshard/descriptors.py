"""Descriptors of a plan's slices: for each bucket and peer, the boxes to send, to receive, to copy and to zero."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .buckets import Buckets
from .plan import LayerAssignment, RankPlan
from .sharding import Ints, Sharding, crossings, position_in, rechunked

DIMENSIONS = 5
"""The most dimensions that a tensor may have, layers not counted: those of a convolution over frames. Tensors with
fewer dimensions have ranges [0, 1) in the others."""

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
"""The dtype of one box: its class, its layer's position in `Parameter.layers`, its range in the whole tensor, and its
start in this rank's own piece, whose ranges are laid end to end."""

Slices = NDArray[Any]


@dataclass(frozen=True, slots=True, eq=False)
class Descriptors:
    """The slices that one rank receives, sends and copies, in an order both ends agree on: by bucket, peer, parameter,
    layer, then box.

    Attributes:
        receives, sends: (slices,) of `SLICE`.
        copies: the slices from the rank's own source to its own target; `here` is in the target.
        there: (slices, DIMENSIONS), the start of each copy in the source.
    """

    receives: Slices
    sends: Slices
    copies: Slices
    there: Ints


def lower(made: RankPlan, buckets: Buckets) -> Descriptors:
    """Return the slices of one rank's plan."""
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
    """The lowering of one parameter class on one rank."""

    number: int
    source: Sharding
    target: Sharding
    rank: int
    buckets: Buckets

    def slices(self, peers: Ints, assignment: LayerAssignment | None, *, receiving: bool) -> Slices:
        """Return the boxes shared with each peer, in the rounds and layers in which they move."""
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
        """Return the rows that move in one round, in the same shape."""
        rounds = self.buckets.rounds[self.number]
        parts = rows.reshape(-1, *rows.shape[-2:])
        return rechunked(parts, rounds).reshape(len(parts), rounds, *rows.shape[-2:])[:, share].reshape(rows.shape)


def _boxes(crossed: list[Ints], count: int) -> tuple[Ints, Ints]:
    """Return every non-empty product of one range per dimension: the index of its peer, and the boxes (boxes,
    dimensions, 2)."""
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
    """Repeat each box for every layer that both ends hold and in which it is this pair's turn."""
    depth = np.maximum(layers[:, 1] - layers[:, 0], 0)[who]
    again = np.repeat(np.arange(len(who)), depth)
    layer = layers[who, 0][again] + np.arange(len(again)) - (np.cumsum(depth) - depth)[again]
    if assignment is not None:
        peer = peers[who[again]]
        now = (layer + assignment.key[peer]) % assignment.holders[peer] == assignment.order[peer]
        again, layer = again[now], layer[now]
    return who[again], boxes[again], layer


def _here(sharding: Sharding, rank: int, start: Ints) -> Ints:
    """Return the starts of boxes in the rank's own piece."""
    placed = start.copy()
    for d, part in enumerate(sharding.piece(rank)[1:]):
        placed[:, d] = position_in(part, start[:, d])
    return placed


def _sorted(slices: Slices) -> Slices:
    starts = [slices["start"][:, d] for d in reversed(range(DIMENSIONS))]
    keys = [slices[name] for name in ("layer", "parameter", "peer", "bucket")]
    ordered: Slices = slices[np.lexsort((*starts, *keys))]
    return ordered
