"""Who sends what several ranks hold: the nearest holder, and among equally near ones each in its turn.

A byte whose piece lies on the receiver's node comes from that node. The eligible holders take turns over the ranks that
ask and over the layers, so that their loads differ by less than a layer's piece. Sender and receiver find the same
answer, each from its own side, without looking at the plans of others.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from .intervals import Ints, overlap
from .sharding import Sharding


@dataclass(frozen=True, slots=True, eq=False)
class Turns:
    """For each rank as the other end of a transfer: which layers are this pair's.

    Layer l of the pair is sent if `(l + key) % holders == order`.

    Attributes:
        eligible: (world,), whether this pair exchanges anything at all.
        key: (world,), the asking rank's place in the queue.
        order: (world,), the holder's place among those that take turns.
        holders: (world,), how many take turns, at least 1.
    """

    eligible: NDArray[np.bool_]
    key: Ints
    order: Ints
    holders: Ints

    def layers(self, start: Ints, stop: Ints) -> Ints:
        """(world,): how many of the layers [start, stop) of each pair are sent."""
        phase = (self.order - self.key) % self.holders

        def before(x: Ints) -> Ints:
            return (np.maximum(x, 0) + self.holders - 1 - phase) // self.holders

        return np.where(self.eligible & (stop > start), before(stop) - before(start), 0)


@dataclass(frozen=True, slots=True, eq=False)
class Holders:
    """The ranks that hold each piece, as one rank sees them.

    Attributes:
        near: (world,), on this rank's node.
        of: (world,), the number of the piece held, 0 for none.
        held: (world,), whether there is one.
        local: (world,), whether the piece of each rank has a holder near.
        turns: with no queue yet: every key is 0.
    """

    near: NDArray[np.bool_]
    of: Ints
    held: NDArray[np.bool_]
    local: NDArray[np.bool_]
    turns: Turns


def holders_seen(pieces: Ints, rank: int, node: Ints) -> Holders:
    """Who may send to a rank, whatever it asks for.

    Args:
        pieces: of the source, see `Sharding.pieces`.
    """
    held, near = pieces >= 0, node == node[rank]
    count = int(pieces.max()) + 1
    of = np.where(held, pieces, 0)
    beside = np.bincount(of[held & near], minlength=count)
    local = beside[of] > 0
    taking = held & (near | ~local)
    eligible = taking & (of != (pieces[rank] if held[rank] else -1))
    order = _order_within(of, taking, count)
    everywhere = np.bincount(of[held], minlength=count)
    several = np.maximum(np.where(local, beside[of], everywhere[of]), 1)
    return Holders(near, of, held, local, Turns(eligible, np.zeros_like(order), order, several))


def to_receive(source: Sharding, target: Sharding, rank: int, seen: Holders) -> Turns:
    """Turns between this rank, which asks, and every rank that holds something of its target.

    Args:
        seen: see `holders_seen`; the same for all parameters whose pieces have the same holders.
    """
    turns, of = seen.turns, seen.of
    if turns.holders[turns.eligible].max(initial=1) == 1:  # nobody takes turns: there is no queue to keep
        return turns
    wanted, asks = _wanted(source, target), target.pieces()
    key = np.zeros_like(of)
    for region, mine in ((seen.near, seen.local), (np.ones_like(seen.near), ~seen.local)):
        if not (mine & seen.held).any():
            continue
        earlier = np.flatnonzero(region[:rank] & (asks[:rank] >= 0))
        asking = np.bincount(asks[earlier], minlength=len(wanted)) @ wanted
        own = earlier[seen.held[earlier]]
        own = own[wanted[asks[own], of[own]]]
        key = np.where(mine, (asking - np.bincount(of[own], minlength=wanted.shape[1]))[of], key)
    return replace(turns, key=key)


def to_send(pieces: Ints, asked: NDArray[np.bool_], rank: int, node: Ints) -> Turns:
    """Turns between this rank, which holds a piece, and every rank that may ask for it.

    Args:
        pieces: of the source, see `Sharding.pieces`.
        asked: (world,), whose target touches this rank's piece.
    """
    mates = pieces == pieces[rank]
    beside = np.bincount(node[mates], minlength=int(node.max()) + 1)
    local = beside[node] > 0
    eligible = ~mates & np.where(local, node == node[rank], True)
    on_node = int((mates & (node == node[rank]))[:rank].sum())
    order = np.where(local, on_node, int(mates[:rank].sum()))
    holders = np.where(local, beside[node], int(mates.sum()))
    if holders[eligible].max(initial=1) == 1:
        return Turns(eligible, np.zeros_like(order), order, holders)
    asks = asked & ~mates
    before = np.cumsum(asks) - asks
    starts = np.searchsorted(node, node)  # nodes are runs of ranks: the first rank of each rank's node
    key = np.where(local, before - before[starts], before)
    return Turns(eligible, key, order, holders)


def _wanted(source: Sharding, target: Sharding) -> NDArray[np.bool_]:
    """(pieces of target, pieces of source): whether they touch; both numbered as `Sharding.pieces` does."""
    touching = np.ones((1, 1), dtype=np.bool_)
    for asked, held in zip(target.parts, source.parts, strict=True):
        both = overlap(asked[:, None], held[None]) > 0
        touching = (touching[:, None, :, None] & both[None, :, None, :]).reshape(
            touching.shape[0] * both.shape[0], touching.shape[1] * both.shape[1]
        )
    return touching


def _order_within(group: Ints, member: NDArray[np.bool_], count: int) -> Ints:
    """(world,), for each member its place, by rank, among the members of its group; anything for others."""
    ranks = np.flatnonzero(member)
    by_group = ranks[np.argsort(group[ranks], kind="stable")]
    sizes = np.bincount(group[by_group], minlength=count)
    first = np.cumsum(sizes) - sizes
    order = np.zeros(len(group), dtype=np.int64)
    order[by_group] = np.arange(len(by_group)) - first[group[by_group]]
    return order
