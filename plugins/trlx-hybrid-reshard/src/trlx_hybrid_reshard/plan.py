"""The reshard plan: for one rank, what it receives, what it sends, what it has already and what is zero.

A pure function of two layouts. A parameter class is the same tensor in many layers, and a rank's piece of it a product
of index ranges, so what two ranks share is a product of overlaps per dimension: a plan takes time by parameter class
and rank, not by tensor. Every byte of a rank's target has one origin, and no rank receives what it holds: the floor
|T| − |S ∩ T|, with T the rank's target and S its source, is met exactly.

A byte that several ranks hold comes from the receiver's own node if it lies there. The holders that are equally near
take turns over the ranks that ask and over the layers, so that their loads differ by less than a layer's piece. Sender
and receiver find the same answer, each from its own side, without looking at the plans of others.

HybridFlow (arXiv:2409.19256, section 5) reshards by all-gathers inside micro data-parallel groups, which asks that the
training layout is made for it. This one takes the two layouts as they are; `planner.advice` says what better ones save.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from trlx_hybrid.errors import ConfigError

from .layouts import Model, Parameter
from .sharding import Ints, Sharding, overlap


class ModelSharding(Protocol):
    """Where parameters lie: a `MeshLayout`, or what was read from a live model."""

    @property
    def world(self) -> int:
        """Number of ranks."""
        ...

    def sharding(self, parameter: Parameter) -> Sharding:
        """Where one parameter lies."""
        ...

    def alike(self, parameter: Parameter) -> Hashable:
        """Equal for parameters that are sharded alike, so that they are planned once."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class ClassPlan:
    """What one rank does for one parameter class, in bytes over all its layers.

    Attributes:
        source, target: where it lies before and after, padding left out.
        receives, sends: (world,), by the rank at the other end; 0 for the rank itself.
        receive_turns, send_turns: of which layers; None where no two ranks hold the same, so of all.
        floor: |T| − |S ∩ T|, the least it must receive.
        send_floor: each byte that others lack, divided by the number of its holders: what it must send where it is the
            only holder, its fair share where it is not.
        local: copied from its own piece.
        zero: padding of the vocabulary.
    """

    parameter: Parameter
    source: Sharding
    target: Sharding
    receives: Ints
    sends: Ints
    receive_turns: Turns | None
    send_turns: Turns | None
    floor: int
    send_floor: int
    local: int
    zero: int


@dataclass(frozen=True, slots=True, eq=False)
class RankPlan:
    """The plan of one rank.

    Attributes:
        node: (world,), the node of each rank.
        classes: one per parameter class of the model.
    """

    rank: int
    node: Ints
    classes: tuple[ClassPlan, ...]

    @property
    def receives(self) -> Ints:
        """(world,), bytes from each rank."""
        total: Ints = np.sum([c.receives for c in self.classes], axis=0)
        return total

    @property
    def sends(self) -> Ints:
        """(world,), bytes to each rank."""
        total: Ints = np.sum([c.sends for c in self.classes], axis=0)
        return total

    @property
    def floor_bytes(self) -> int:
        """The least it must receive."""
        return sum(c.floor for c in self.classes)

    @property
    def send_floor_bytes(self) -> int:
        """Its share of what must be sent."""
        return sum(c.send_floor for c in self.classes)

    def totals(self, kind: str | None = None) -> dict[str, int]:
        """Bytes of all parameter classes, or of those of one kind (see `Parameter.kind`), by what is done with them."""
        of = [c for c in self.classes if kind in (None, c.parameter.kind)]
        return {
            "receives_bytes": sum(int(c.receives.sum()) for c in of),
            "sends_bytes": sum(int(c.sends.sum()) for c in of),
            "floor_bytes": sum(c.floor for c in of),
            "send_floor_bytes": sum(c.send_floor for c in of),
            "local_copy_bytes": sum(c.local for c in of),
            "zero_bytes": sum(c.zero for c in of),
        }


def plan(model: Model, source: ModelSharding, target: ModelSharding, rank: int, *, ranks_per_node: int = 0) -> RankPlan:
    """What one rank moves when the model goes from one layout to the other.

    Args:
        ranks_per_node: consecutive ranks that share a node; 0 is one node for all.

    Raises:
        ConfigError: the layouts differ in their number of ranks, a size does not divide, or bytes have no holder.
    """
    if source.world != target.world:
        raise ConfigError(
            f"The layouts differ in their ranks: {source} takes {source.world}, {target} takes {target.world}. "
            "Give the smaller one more replicas with dp."
        )
    node = nodes_of(source.world, ranks_per_node)
    known: dict[tuple[Hashable, Hashable], ClassPlan] = {}
    found = []
    for parameter in model.parameters:
        key = source.alike(parameter), target.alike(parameter)
        if key not in known:
            shardings = source.sharding(parameter), target.sharding(parameter)
            known[key] = _class_plan(parameter, *shardings, rank, node, model.itemsize)
        found.append(replace(known[key], parameter=parameter))
    return RankPlan(rank, node, tuple(found))


def nodes_of(world: int, ranks_per_node: int) -> Ints:
    """(world,), the node of each rank."""
    return np.arange(world, dtype=np.int64) // (ranks_per_node or world)


def _class_plan(
    parameter: Parameter, source: Sharding, padded: Sharding, rank: int, node: Ints, itemsize: int
) -> ClassPlan:
    target = padded.within(parameter.extent)
    received, local, receive_turns = _received(parameter, source, target, rank, node)
    sent, share, send_turns = _sent(source, target, rank, node)
    wanted = target.elements(rank)
    return ClassPlan(
        parameter,
        source,
        target,
        receives=received * itemsize,
        sends=sent * itemsize,
        receive_turns=receive_turns,
        send_turns=send_turns,
        floor=(wanted - local) * itemsize,
        send_floor=share * itemsize,
        local=local * itemsize,
        zero=(padded.elements(rank) - wanted) * itemsize,
    )


def _received(
    parameter: Parameter, source: Sharding, target: Sharding, rank: int, node: Ints
) -> tuple[Ints, int, Turns | None]:
    """Elements from each rank, and from this one's own piece."""
    if not target.holds(rank):
        return np.zeros(source.world, dtype=np.int64), 0, None
    piece, turns = target.piece(rank), None
    common = [overlap(own, parts) for own, parts in zip(piece, source.parts, strict=True)]
    received = source.per_rank(tuple(common))
    local, wanted = int(received[rank]), target.elements(rank)
    if local == wanted:
        return np.zeros_like(received), local, None
    if source.replicated:
        turns = to_receive(source, target, rank, node)
        received = _by_layer(source, common, piece[0], turns)
    received[rank] = 0
    if int(received.sum()) != wanted - local:
        raise ConfigError(
            f"Rank {rank} lacks {wanted - local} elements of {parameter.name}, and {int(received.sum())} can be had "
            "from others: the layout it comes from does not hold every element."
        )
    return received, local, turns


def _sent(source: Sharding, target: Sharding, rank: int, node: Ints) -> tuple[Ints, int, Turns | None]:
    """Elements to each rank, and this rank's share of what must be sent."""
    if not source.holds(rank):
        return np.zeros(source.world, dtype=np.int64), 0, None
    piece = source.piece(rank)
    common = [overlap(own, parts) for own, parts in zip(piece, target.parts, strict=True)]
    asked = target.per_rank(tuple(common))
    if not source.replicated:
        asked[rank] = 0
        return asked, int(asked.sum()), None
    pieces = source.pieces()
    same = pieces == pieces[rank]
    turns = to_send(pieces, asked > 0, rank, node)
    return _by_layer(target, common, piece[0], turns), int(asked[~same].sum()) // int(same.sum()), turns


def _by_layer(others: Sharding, common: list[Ints], layers: Ints, turns: Turns) -> Ints:
    """(world,), what is shared with each rank, of the layers in which it is this pair's turn."""
    ranges = others.parts[0][:, 0]
    start, stop = np.maximum(ranges[:, 0], layers[0, 0]), np.minimum(ranges[:, 1], layers[0, 1])
    at = others.coordinates[0]
    each = others.per_rank((np.ones(len(ranges), dtype=np.int64), *common[1:]))
    return each * turns.layers(start[at], stop[at])


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


def to_receive(source: Sharding, target: Sharding, rank: int, node: Ints) -> Turns:
    """Turns between this rank, which asks, and every rank that holds something of its target."""
    pieces = source.pieces()
    held, near, count = pieces >= 0, node == node[rank], int(pieces.max()) + 1
    of = np.where(held, pieces, 0)
    everywhere, beside = (np.bincount(of[ranks], minlength=count) for ranks in (held, held & near))
    local = beside[of] > 0
    taking = held & (near | ~local)
    eligible = taking & (pieces != pieces[rank])
    order = _order_within(of, taking, count)
    holders = np.maximum(np.where(local, beside[of], everywhere[of]), 1)
    if holders[eligible].max(initial=1) == 1:  # nobody takes turns: there is no queue to keep
        return Turns(eligible, np.zeros_like(order), order, holders)
    wanted, asks = _wanted(source, target), target.pieces()

    def queue(region: NDArray[np.bool_]) -> Ints:
        """(world,), how many earlier ranks of a region ask for the piece that each rank holds, and lack it."""
        earlier = np.flatnonzero(region[:rank] & (asks[:rank] >= 0))
        own = earlier[held[earlier]]
        own = own[wanted[asks[own], of[own]]]
        asking = np.bincount(asks[earlier], minlength=len(wanted)) @ wanted
        before: Ints = (asking - np.bincount(of[own], minlength=wanted.shape[1]))[of]
        return before

    return Turns(eligible, np.where(local, queue(near), queue(np.ones_like(near))), order, holders)


def to_send(pieces: Ints, asked: NDArray[np.bool_], rank: int, node: Ints) -> Turns:
    """Turns between this rank, which holds a piece, and every rank that may ask for it.

    Args:
        pieces: of the source, see `Sharding.pieces`.
        asked: (world,), whose target touches this rank's piece.
    """
    same = pieces == pieces[rank]
    beside = np.bincount(node[same], minlength=int(node.max()) + 1)
    local = beside[node] > 0
    eligible = ~same & np.where(local, node == node[rank], True)
    on_node = int((same & (node == node[rank]))[:rank].sum())
    order = np.where(local, on_node, int(same[:rank].sum()))
    holders = np.where(local, beside[node], int(same.sum()))
    if holders[eligible].max(initial=1) == 1:
        return Turns(eligible, np.zeros_like(order), order, holders)
    asks = asked & ~same
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
