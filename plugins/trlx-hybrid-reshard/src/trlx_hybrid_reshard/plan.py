"""The reshard plan: what one rank receives, what it sends, what it has already and what is zero.

A plan is a pure function of two layouts. A parameter class is the same tensor in many layers, and a rank's piece of it
is a product of index ranges, so the common part of two ranks is a product of overlaps per dimension. Planning therefore
takes time by parameter class and rank, not by tensor. Every byte of a rank's target has one origin, and no rank
receives what it holds. The lower bound |T| − |S ∩ T|, with T the rank's target and S its source, is met exactly.

A byte that several ranks hold comes from the receiver's own node if a rank there holds it. Holders that are equally
near take turns over the ranks that ask and over the layers, so that their loads differ by less than a layer's piece.
Sender and receiver each compute the same answer, without looking at other ranks' plans.

HybridFlow (arXiv:2409.19256, section 5) reshards by all-gathers inside micro data-parallel groups, which requires a
training layout made for it. This plan takes the two layouts as they are; `planner.advice` says what better ones save.
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
    """A model's sharding: a `MeshLayout`, or a layout that was read from a live model."""

    @property
    def world(self) -> int:
        """The number of ranks."""
        ...

    def sharding(self, parameter: Parameter) -> Sharding:
        """Return the sharding of one parameter."""
        ...

    def alike(self, parameter: Parameter) -> Hashable:
        """Return a key that is equal for parameters that are sharded alike, so that they are planned once."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class ClassPlan:
    """One rank's plan for one parameter class, in bytes over all its layers.

    Attributes:
        source, target: the class's sharding before and after, without padding.
        receives, sends: (world,), the bytes by the rank at the other end; 0 for the rank itself.
        received_layers, sent_layers: the layers that are received and sent; None stands for all layers, where no two
            ranks hold the same piece.
        floor: |T| − |S ∩ T|, the least that the rank must receive.
        send_floor: the sum over bytes that others lack, each divided by the number of its holders: what the rank must
            send where it is the only holder, and its fair share elsewhere.
        local: the bytes copied from the rank's own piece.
        zero: the bytes of the vocabulary's padding.
    """

    parameter: Parameter
    source: Sharding
    target: Sharding
    receives: Ints
    sends: Ints
    received_layers: LayerAssignment | None
    sent_layers: LayerAssignment | None
    floor: int
    send_floor: int
    local: int
    zero: int


@dataclass(frozen=True, slots=True, eq=False)
class RankPlan:
    """The plan of one rank.

    Attributes:
        node: (world,), the node of each rank.
        classes: one plan per parameter class of the model.
    """

    rank: int
    node: Ints
    classes: tuple[ClassPlan, ...]

    @property
    def receives(self) -> Ints:
        """The bytes from each rank, (world,)."""
        total: Ints = np.sum([c.receives for c in self.classes], axis=0)
        return total

    @property
    def sends(self) -> Ints:
        """The bytes to each rank, (world,)."""
        total: Ints = np.sum([c.sends for c in self.classes], axis=0)
        return total

    @property
    def floor_bytes(self) -> int:
        """The least that the rank must receive, in bytes."""
        return sum(c.floor for c in self.classes)

    @property
    def send_floor_bytes(self) -> int:
        """The rank's share of the bytes that must be sent."""
        return sum(c.send_floor for c in self.classes)

    def totals(self, kind: str | None = None) -> dict[str, int]:
        """Return the bytes of all parameter classes, or of the classes of one kind (see `Parameter.kind`), by what is
        done with them."""
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
    """Plan what one rank moves when the model goes from one layout to another.

    Args:
        ranks_per_node: the number of consecutive ranks that share a node; 0 for a single node.

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
    """Return the node of each rank, (world,)."""
    return np.arange(world, dtype=np.int64) // (ranks_per_node or world)


def _class_plan(
    parameter: Parameter, source: Sharding, padded: Sharding, rank: int, node: Ints, itemsize: int
) -> ClassPlan:
    target = padded.within(parameter.extent)
    received, local, received_layers = _received(parameter, source, target, rank, node)
    sent, share, sent_layers = _sent(source, target, rank, node)
    wanted = target.elements(rank)
    return ClassPlan(
        parameter,
        source,
        target,
        receives=received * itemsize,
        sends=sent * itemsize,
        received_layers=received_layers,
        sent_layers=sent_layers,
        floor=(wanted - local) * itemsize,
        send_floor=share * itemsize,
        local=local * itemsize,
        zero=(padded.elements(rank) - wanted) * itemsize,
    )


def _received(
    parameter: Parameter, source: Sharding, target: Sharding, rank: int, node: Ints
) -> tuple[Ints, int, LayerAssignment | None]:
    """Return the elements from each rank, the elements from this rank's own piece, and the layers of each rank."""
    if not target.holds(rank):
        return np.zeros(source.world, dtype=np.int64), 0, None
    piece, assignment = target.piece(rank), None
    common = [overlap(own, parts) for own, parts in zip(piece, source.parts, strict=True)]
    received = source.per_rank(tuple(common))
    local, wanted = int(received[rank]), target.elements(rank)
    if local == wanted:
        return np.zeros_like(received), local, None
    if source.replicated:
        assignment = to_receive(source, target, rank, node)
        received = _by_layer(source, common, piece[0], assignment)
    received[rank] = 0
    if int(received.sum()) != wanted - local:
        raise ConfigError(
            f"Rank {rank} lacks {wanted - local} elements of {parameter.name}, and {int(received.sum())} can be had "
            "from others: the layout it comes from does not hold every element."
        )
    return received, local, assignment


def _sent(source: Sharding, target: Sharding, rank: int, node: Ints) -> tuple[Ints, int, LayerAssignment | None]:
    """Return the elements to each rank, this rank's share of what must be sent, and the layers for each rank."""
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
    assignment = to_send(pieces, asked > 0, rank, node)
    return _by_layer(target, common, piece[0], assignment), int(asked[~same].sum()) // int(same.sum()), assignment


def _by_layer(others: Sharding, common: list[Ints], layers: Ints, assignment: LayerAssignment) -> Ints:
    """Return the elements shared with each rank, (world,), of the layers in which it is this pair's turn."""
    ranges = others.parts[0][:, 0]
    start, stop = np.maximum(ranges[:, 0], layers[0, 0]), np.minimum(ranges[:, 1], layers[0, 1])
    at = others.coordinates[0]
    each = others.per_rank((np.ones(len(ranges), dtype=np.int64), *common[1:]))
    return each * assignment.layers(start[at], stop[at])


@dataclass(frozen=True, slots=True, eq=False)
class LayerAssignment:
    """The layers that each pair of this rank and another transfers.

    The pair transfers layer l if `(l + key) % holders == order`.

    Attributes:
        eligible: (world,), whether the pair exchanges anything at all.
        key: (world,), the asking rank's place in the queue.
        order: (world,), the holder's place among the holders that take turns.
        holders: (world,), the number of holders that take turns, at least 1.
    """

    eligible: NDArray[np.bool_]
    key: Ints
    order: Ints
    holders: Ints

    def layers(self, start: Ints, stop: Ints) -> Ints:
        """Return how many of the layers [start, stop) of each pair are sent, (world,)."""
        phase = (self.order - self.key) % self.holders

        def before(x: Ints) -> Ints:
            return (np.maximum(x, 0) + self.holders - 1 - phase) // self.holders

        return np.where(self.eligible & (stop > start), before(stop) - before(start), 0)


def to_receive(source: Sharding, target: Sharding, rank: int, node: Ints) -> LayerAssignment:
    """Return the layers that this rank asks of every rank that holds something of its target."""
    pieces = source.pieces()
    held, near, count = pieces >= 0, node == node[rank], int(pieces.max()) + 1
    of = np.where(held, pieces, 0)
    everywhere, beside = (np.bincount(of[ranks], minlength=count) for ranks in (held, held & near))
    local = beside[of] > 0
    taking = held & (near | ~local)
    eligible = taking & (pieces != pieces[rank])
    order = _order_within(of, taking, count)
    holders = np.maximum(np.where(local, beside[of], everywhere[of]), 1)
    if holders[eligible].max(initial=1) == 1:  # no holders take turns, so there is no queue
        return LayerAssignment(eligible, np.zeros_like(order), order, holders)
    wanted, asks = _wanted(source, target), target.pieces()

    def queue(region: NDArray[np.bool_]) -> Ints:
        """Return, for the piece that each rank holds, how many earlier ranks of a region ask for it and lack it,
        (world,)."""
        earlier = np.flatnonzero(region[:rank] & (asks[:rank] >= 0))
        own = earlier[held[earlier]]
        own = own[wanted[asks[own], of[own]]]
        asking = np.bincount(asks[earlier], minlength=len(wanted)) @ wanted
        before: Ints = (asking - np.bincount(of[own], minlength=wanted.shape[1]))[of]
        return before

    return LayerAssignment(eligible, np.where(local, queue(near), queue(np.ones_like(near))), order, holders)


def to_send(pieces: Ints, asked: NDArray[np.bool_], rank: int, node: Ints) -> LayerAssignment:
    """Return the layers that this rank, which holds a piece, sends to every rank that may ask for it.

    Args:
        pieces: the source's pieces, see `Sharding.pieces`.
        asked: (world,), whether each rank's target overlaps this rank's piece.
    """
    same = pieces == pieces[rank]
    beside = np.bincount(node[same], minlength=int(node.max()) + 1)
    local = beside[node] > 0
    eligible = ~same & np.where(local, node == node[rank], True)
    on_node = int((same & (node == node[rank]))[:rank].sum())
    order = np.where(local, on_node, int(same[:rank].sum()))
    holders = np.where(local, beside[node], int(same.sum()))
    if holders[eligible].max(initial=1) == 1:
        return LayerAssignment(eligible, np.zeros_like(order), order, holders)
    asks = asked & ~same
    before = np.cumsum(asks) - asks
    starts = np.searchsorted(node, node)  # a node's ranks are consecutive: the first rank of each rank's node
    key = np.where(local, before - before[starts], before)
    return LayerAssignment(eligible, key, order, holders)


def _wanted(source: Sharding, target: Sharding) -> NDArray[np.bool_]:
    """Return whether pieces overlap, (pieces of target, pieces of source), both numbered as `Sharding.pieces` does."""
    touching = np.ones((1, 1), dtype=np.bool_)
    for asked, held in zip(target.parts, source.parts, strict=True):
        both = overlap(asked[:, None], held[None]) > 0
        touching = (touching[:, None, :, None] & both[None, :, None, :]).reshape(
            touching.shape[0] * both.shape[0], touching.shape[1] * both.shape[1]
        )
    return touching


def _order_within(group: Ints, member: NDArray[np.bool_], count: int) -> Ints:
    """Return each member's place, by rank, among the members of its group, (world,); any number for the other ranks."""
    ranks = np.flatnonzero(member)
    by_group = ranks[np.argsort(group[ranks], kind="stable")]
    sizes = np.bincount(group[by_group], minlength=count)
    first = np.cumsum(sizes) - sizes
    order = np.zeros(len(group), dtype=np.int64)
    order[by_group] = np.arange(len(by_group)) - first[group[by_group]]
    return order
