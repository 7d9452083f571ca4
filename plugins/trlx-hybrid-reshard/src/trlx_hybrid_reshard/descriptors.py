"""A plan lowered to explicit slices: for each bucket and peer, the boxes to send, to receive, to copy and to zero."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .buckets import Buckets
from .layouts import Model
from .plan import ModelSharding, Turns, check_layouts, holders_seen, nodes_of, to_receive, to_send
from .sharding import Ints, Sharding, crossings, overlap, position_in, rechunked

DIMENSIONS = 3
"""Of the largest tensor, layers not counted. Smaller ones have ranges [0, 1) in the rest."""

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
"""One box: its class and its place in `Parameter.layers`, its range in the whole tensor, and where it starts in this
rank's own piece, whose ranges are laid end to end."""

Slices = NDArray[Any]


@dataclass(frozen=True, slots=True, eq=False)
class Descriptors:
    """What one rank does, in the order both ends agree on: by bucket, peer, parameter, layer, then box.

    Attributes:
        receives, sends: (slices,) of `SLICE`.
        copies: from the rank's own source to its own target; `here` is in the target.
        there: (slices, 3), where each copy starts in the source.
        zeros: padding of the vocabulary; `peer` is -1.
    """

    receives: Slices
    sends: Slices
    copies: Slices
    there: Ints
    zeros: Slices


def lower(
    model: Model, source: ModelSharding, target: ModelSharding, rank: int, buckets: Buckets, *, ranks_per_node: int = 0
) -> Descriptors:
    """The slices of one rank; agrees with `plan.plan` byte for byte.

    Raises:
        ConfigError: see `plan.plan`.
    """
    check_layouts(source, target, rank)
    node = nodes_of(source.world, ranks_per_node)
    lists: tuple[list[Slices], ...] = ([], [], [], [])
    theirs: list[Ints] = []
    for c, parameter in enumerate(model.parameters):
        held, padded = source.sharding(parameter), target.sharding(parameter)
        lowering = _Lowering(c, held, padded.within(parameter.extent), padded, rank, node, buckets)
        copies, there = lowering.copies()
        for found, slices in zip(lists, (lowering.receives(), lowering.sends(), copies, lowering.zeros())):
            found.append(slices)
        theirs.append(there)
    received, sent, copied, zeroed = (np.concatenate(found) for found in lists)
    return Descriptors(_sorted(received), _sorted(sent), copied, np.concatenate(theirs), zeroed)


@dataclass(frozen=True, slots=True, eq=False)
class _Lowering:
    """One parameter class on one rank."""

    number: int
    source: Sharding
    target: Sharding
    padded: Sharding
    rank: int
    node: Ints
    buckets: Buckets

    def receives(self) -> Slices:
        if not self.target.holds(self.rank):
            return _none()
        piece = self.target.piece(self.rank)
        common = [overlap(own, parts) for own, parts in zip(piece, self.source.parts, strict=True)]
        holding = self.source.per_rank(tuple(common)) > 0
        holding[self.rank] = False
        turns = None
        if self.source.replicated:
            seen = holders_seen(self.source.pieces(), self.rank, self.node)
            turns = to_receive(self.source, self.target, self.rank, seen)
            holding &= turns.eligible
        return self._slices(np.flatnonzero(holding), turns, receiving=True)

    def sends(self) -> Slices:
        if not self.source.holds(self.rank):
            return _none()
        piece = self.source.piece(self.rank)
        common = [overlap(own, parts) for own, parts in zip(piece, self.target.parts, strict=True)]
        asked = self.target.per_rank(tuple(common)) > 0
        turns = None
        if self.source.replicated:
            pieces = self.source.pieces()
            turns = to_send(pieces, asked, self.rank, self.node)
            asked = asked & turns.eligible & (pieces != pieces[self.rank])
        asked[self.rank] = False
        return self._slices(np.flatnonzero(asked), turns, receiving=False)

    def copies(self) -> tuple[Slices, Ints]:
        if not (self.source.holds(self.rank) and self.target.holds(self.rank)):
            return _none(), np.zeros((0, DIMENSIONS), dtype=np.int64)
        found = self._slices(np.array([self.rank]), None, receiving=True)
        return found, _here(self.source, self.rank, found["start"])

    def zeros(self) -> Slices:
        if not self.padded.holds(self.rank) or self.padded.elements(self.rank) == self.target.elements(self.rank):
            return _none()
        rows, inside = self.padded.piece(self.rank)[1], self.target.piece(self.rank)[1]
        found = np.zeros(1, dtype=SLICE)
        found["bucket"] = int(self.buckets.numbers[self.number][0, -1])
        found["peer"], found["parameter"] = -1, self.number
        for d, part in enumerate(self.padded.piece(self.rank)[1:]):
            found["start"][:, d], found["stop"][:, d] = part[0]
        found["stop"][:, len(self.padded.parts) - 1 :] = 1
        found["start"][:, 0] = max(int(rows[0, 0]), int(inside[0, 1]))
        found["here"] = _here(self.padded, self.rank, found["start"])
        return found

    def _slices(self, peers: Ints, turns: Turns | None, *, receiving: bool) -> Slices:
        """The boxes shared with each peer, in the rounds and layers in which they move."""
        here, there = (self.target, self.source) if receiving else (self.source, self.target)
        own, others = here.piece(self.rank), there.pieces_of(peers)
        layers = crossings(own[0][None], others[0])[:, 0]
        stage = own[0][0, 0] if receiving else others[0][:, 0, 0]
        found = [_none()]
        for share in range(self.buckets.rounds[self.number]):
            sides = [list(own), list(others)]
            cut = int(receiving is self.buckets.by_source[self.number])
            sides[cut][1] = self._share(sides[cut][1], share)
            who, boxes = _boxes([crossings(a, b) for a, b in zip(sides[0][1:], sides[1][1:], strict=True)], len(peers))
            who, boxes, layer = _in_layers(who, boxes, layers, turns, peers)
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
        """The rows that move in one round; the same shape."""
        rounds = self.buckets.rounds[self.number]
        parts = rows.reshape(-1, *rows.shape[-2:])
        return rechunked(parts, rounds).reshape(len(parts), rounds, *rows.shape[-2:])[:, share].reshape(rows.shape)


def _boxes(crossed: list[Ints], count: int) -> tuple[Ints, Ints]:
    """Every product of one range per dimension that is not empty: whose it is, and (boxes, dimensions, 2)."""
    who = np.arange(count)
    boxes = np.zeros((count, 0, 2), dtype=np.int64)
    for ranges in crossed:
        ranges = np.broadcast_to(ranges, (count, *ranges.shape[-2:]))[who]
        some, which = np.nonzero(ranges[..., 1] > ranges[..., 0])
        who, boxes = who[some], np.concatenate([boxes[some], ranges[some, which][:, None]], axis=1)
    return who, boxes


def _in_layers(who: Ints, boxes: Ints, layers: Ints, turns: Turns | None, peers: Ints) -> tuple[Ints, Ints, Ints]:
    """Each box once for every layer that both ends hold and that is this pair's turn."""
    depth = np.maximum(layers[:, 1] - layers[:, 0], 0)[who]
    again = np.repeat(np.arange(len(who)), depth)
    layer = layers[who, 0][again] + np.arange(len(again)) - (np.cumsum(depth) - depth)[again]
    if turns is not None:
        peer = peers[who[again]]
        now = (layer + turns.key[peer]) % turns.holders[peer] == turns.order[peer]
        again, layer = again[now], layer[now]
    return who[again], boxes[again], layer


def _here(sharding: Sharding, rank: int, start: Ints) -> Ints:
    """Starts of boxes in the rank's own piece."""
    placed = start.copy()
    for d, part in enumerate(sharding.piece(rank)[1:]):
        placed[:, d] = position_in(part, start[:, d])
    return placed


def _sorted(slices: Slices) -> Slices:
    starts = [slices["start"][:, d] for d in reversed(range(DIMENSIONS))]
    keys = [slices[name] for name in ("layer", "parameter", "peer", "bucket")]
    ordered: Slices = slices[np.lexsort((*starts, *keys))]
    return ordered


def _none() -> Slices:
    return np.zeros(0, dtype=SLICE)
