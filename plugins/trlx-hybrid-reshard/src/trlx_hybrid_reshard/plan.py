"""The reshard plan: how many bytes one rank receives from each other rank, sends to it, and copies from itself, when a
model goes from one layout (source) to another (target). A layout says which part of each parameter each rank holds.

A plan is a pure function of the two layouts. A parameter class is one parameter in all its layers, and a rank holds one
set of index ranges per dimension of it, so what two ranks have in common is a product of overlaps per dimension.
Planning therefore takes time by parameter class and rank, not by tensor. A rank receives every byte from one other rank
only, and receives no byte that it holds already. So it receives exactly the least possible: |T| − |S ∩ T|, where T is
what the rank holds afterwards and S is what it holds before.

A byte that several ranks hold comes from the receiver's own node if a rank there holds it. Holders that are equally
near take turns over the ranks that ask and over the layers, so that their loads differ by less than one layer. Sender
and receiver each compute the same result, without looking at other ranks' plans.

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
    """The interface of a layout (which rank holds which part of each parameter of a model) that planning reads. A plan
    lists the transfers between ranks that lead from one layout to another. `MeshLayout` has this interface, and so has
    `LiveSharding`, a layout that was read from a running model."""

    @property
    def world(self) -> int:
        """The number of ranks."""
        ...

    def sharding(self, parameter: Parameter) -> Sharding:
        """Return the sharding of one parameter: which rank holds which part of it."""
        ...

    def alike(self, parameter: Parameter) -> Hashable:
        """Return a key that is equal for parameters that are sharded alike, so that they are planned once."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class ClassPlan:
    """The transfers of one parameter class (one parameter in all its layers) to and from one rank, in bytes over all
    layers.

    Attributes:
        parameter: the parameter class.
        source, target: its sharding before and after the reshard, without a vocabulary's padding.
        receives, sends: the bytes from, or to, each other rank, int64 of shape (ranks,); 0 for the rank itself.
        received_layers, sent_layers: the layers that this rank receives from, or sends to, each other rank, if several
            ranks hold the same data and each sends some of the layers; None for all layers.
        floor: the bytes that the rank holds after the reshard and not before it: the least that it must receive.
        send_floor: the bytes that this rank holds and other ranks lack, added up over these ranks and divided by the
            number of ranks that hold the same bytes. The rank must send this many bytes if it is the only holder;
            otherwise they are its fair share.
        local: the bytes that the rank copies from what it holds itself.
        zero: the bytes of the vocabulary's padding, which are set to zero.
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
    """The plan of one rank: how many bytes it receives, sends and copies when a model goes from one layout to another.

    Attributes:
        rank: the number of the rank.
        node: the number of each rank's node, int64 of shape (ranks,).
        classes: one plan per parameter class of the model, that is, per parameter with all its layers.
    """

    rank: int
    node: Ints
    classes: tuple[ClassPlan, ...]

    @property
    def receives(self) -> Ints:
        """The bytes that this rank receives from each rank, int64 of shape (ranks,)."""
        total: Ints = np.sum([c.receives for c in self.classes], axis=0)
        return total

    @property
    def sends(self) -> Ints:
        """The bytes that this rank sends to each rank, int64 of shape (ranks,)."""
        total: Ints = np.sum([c.sends for c in self.classes], axis=0)
        return total

    @property
    def floor_bytes(self) -> int:
        """The least number of bytes that this rank can receive: those that it holds after the reshard and not before
        it."""
        return sum(c.floor for c in self.classes)

    @property
    def send_floor_bytes(self) -> int:
        """The rank's fair share of the bytes that some rank must send: each byte counts for all ranks that hold it in
        equal parts."""
        return sum(c.send_floor for c in self.classes)

    def totals(self, kind: str | None = None) -> dict[str, int]:
        """Return the bytes of the plan by what is done with them. The keys are `receives_bytes`, `sends_bytes`,
        `local_copy_bytes`, `zero_bytes` (padding that is set to zero), and for the least that must be received and sent
        `floor_bytes` and `send_floor_bytes`.

        Args:
            kind: the kind of parameters to add up (see `Parameter.kind`); None for all.
        """
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
    """Plan what one rank receives, sends and copies when a model goes from one layout to another.

    Args:
        model: the parameters to move.
        source: the layout before: which rank holds which part of each parameter.
        target: the layout after, over the same ranks.
        rank: the rank to plan for.
        ranks_per_node: the number of consecutive ranks that share a node; 0 for a single node.

    Raises:
        ConfigError: the layouts differ in their number of ranks, a size does not divide a parameter, or no rank holds
            some of the elements that this rank needs.
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
    """Return the number of each rank's node, int64 of shape (world,).

    Args:
        world: the number of ranks.
        ranks_per_node: the number of consecutive ranks that share a node; 0 for a single node.
    """
    return np.arange(world, dtype=np.int64) // (ranks_per_node or world)


def _class_plan(
    parameter: Parameter, source: Sharding, padded: Sharding, rank: int, node: Ints, itemsize: int
) -> ClassPlan:
    """Plan the transfers of one parameter class (one parameter in all its layers) for one rank.

    Args:
        source: the parameter's sharding before.
        padded: its sharding after, with the padding of a vocabulary.
        rank: the rank to plan for.
        node: the node of each rank, (ranks,).
        itemsize: bytes per element as it is sent.
    """
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
    """Work out what one rank receives of one parameter class (one parameter in all its layers).

    Args:
        parameter: the parameter class.
        source, target: its sharding before and after the reshard.
        rank: the receiving rank.
        node: the node of each rank, (ranks,).

    Returns:
        The numbers of elements from each rank, int64 of shape (ranks,); the number copied from what this rank holds
            itself; and the layers that it receives from each rank. The last value is None if no choice between holders
            was needed. This rank then receives from each other rank all layers that the other rank holds and this rank
            lacks.

    Raises:
        ConfigError: no rank holds some of the elements.
    """
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
            f"Rank {rank} lacks {wanted - local} elements of {parameter.name}, and the other ranks hold only "
            f"{int(received.sum())} of them: the layout before the reshard does not contain every element."
        )
    return received, local, assignment


def _sent(source: Sharding, target: Sharding, rank: int, node: Ints) -> tuple[Ints, int, LayerAssignment | None]:
    """Work out what one rank sends of one parameter class (one parameter in all its layers).

    Args:
        source, target: the parameter's sharding before and after the reshard.
        rank: the sending rank.
        node: the node of each rank, (ranks,).

    Returns:
        The numbers of elements to each rank, int64 of shape (ranks,); this rank's fair share of the elements that must
            be sent; and the layers that it sends to each rank. The last value is None if no choice between holders was
            needed. This rank then sends to each other rank all layers that this rank holds and the other rank lacks.
    """
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
    """Return the number of elements that this rank exchanges with each rank, shape (ranks,), where several ranks hold
    the same data and each of them sends some of the layers.

    Args:
        others: the parameter's sharding at the other end: before the reshard if this rank receives, else after it.
        common: for each dimension, the number of indices that this rank shares with each part of `others`.
        layers: the first layer that this rank holds and the end of its range, int64 of shape (1, 2).
        assignment: the layers that go between this rank and each other rank.
    """
    ranges = others.parts[0][:, 0]
    start, stop = np.maximum(ranges[:, 0], layers[0, 0]), np.minimum(ranges[:, 1], layers[0, 1])
    at = others.coordinates[0]
    each = others.per_rank((np.ones(len(ranges), dtype=np.int64), *common[1:]))
    return each * assignment.layers(start[at], stop[at])


@dataclass(frozen=True, slots=True, eq=False)
class LayerAssignment:
    """The layers that this rank exchanges with each other rank, if several ranks hold the same data and take turns
    sending it.

    This rank and another transfer layer l if `(l + key) % holders == order`. All arrays have one entry per other rank.

    Attributes:
        eligible: whether the two ranks exchange anything at all, bool.
        key: the place of the receiving rank among the ranks that need the data.
        order: the place of the sending rank among the holders that take turns.
        holders: the number of holders that take turns, at least 1.
    """

    eligible: NDArray[np.bool_]
    key: Ints
    order: Ints
    holders: Ints

    def layers(self, start: Ints, stop: Ints) -> Ints:
        """Return how many of the layers [start, stop) this rank transfers to or from each rank, int64 of shape
        (ranks,).

        Args:
            start, stop: for each rank, the range of layers that it and this rank have in common, int64 of shape
                (ranks,).
        """
        phase = (self.order - self.key) % self.holders

        def before(x: Ints) -> Ints:
            return (np.maximum(x, 0) + self.holders - 1 - phase) // self.holders

        return np.where(self.eligible & (stop > start), before(stop) - before(start), 0)


def to_receive(source: Sharding, target: Sharding, rank: int, node: Ints) -> LayerAssignment:
    """Return which layers this rank receives from each rank that holds data that this rank needs.

    Args:
        source, target: the parameter's sharding before and after the reshard.
        rank: the receiving rank.
        node: the node of each rank, (ranks,).
    """
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
        """Return, for the part of the parameter that each rank holds, how many ranks before this one need that part and
        lack it: int64 of shape (world,).

        Args:
            region: the ranks that are counted, bool of shape (world,).
        """
        earlier = np.flatnonzero(region[:rank] & (asks[:rank] >= 0))
        own = earlier[held[earlier]]
        own = own[wanted[asks[own], of[own]]]
        asking = np.bincount(asks[earlier], minlength=len(wanted)) @ wanted
        before: Ints = (asking - np.bincount(of[own], minlength=wanted.shape[1]))[of]
        return before

    return LayerAssignment(eligible, np.where(local, queue(near), queue(np.ones_like(near))), order, holders)


def to_send(pieces: Ints, asked: NDArray[np.bool_], rank: int, node: Ints) -> LayerAssignment:
    """Return which layers of its part of a parameter this rank sends to each other rank. Ranks that hold the same part
    take turns, layer by layer. A receiver whose node has such ranks gets the layers from these only.

    Args:
        pieces: for each rank, the number of the part that it holds before the reshard; -1 if it holds nothing.
        asked: whether each rank needs something that this rank holds, bool of shape (ranks,).
        rank: the sending rank.
        node: the node of each rank, (ranks,).
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
    """Return which parts of one parameter after the reshard overlap which parts before it: a bool matrix. If entry
    (i, j) is True, a rank that is to hold part i needs data from a rank that holds part j.

    A part that several ranks hold counts once; `Sharding.pieces` gives the number of each rank's part.

    Args:
        source: the parameter's sharding before the reshard.
        target: its sharding after the reshard.
    """
    touching = np.ones((1, 1), dtype=np.bool_)
    for asked, held in zip(target.parts, source.parts, strict=True):
        both = overlap(asked[:, None], held[None]) > 0
        touching = (touching[:, None, :, None] & both[None, :, None, :]).reshape(
            touching.shape[0] * both.shape[0], touching.shape[1] * both.shape[1]
        )
    return touching


def _order_within(group: Ints, member: NDArray[np.bool_], count: int) -> Ints:
    """Return for each rank how many ranks before it belong to the same group, int64 of shape (ranks,).

    Args:
        group: the number of each rank's group, (ranks,).
        member: whether each rank counts, bool of shape (ranks,). The result for ranks that do not count is arbitrary.
        count: the number of groups.
    """
    ranks = np.flatnonzero(member)
    by_group = ranks[np.argsort(group[ranks], kind="stable")]
    sizes = np.bincount(group[by_group], minlength=count)
    first = np.cumsum(sizes) - sizes
    order = np.zeros(len(group), dtype=np.int64)
    order[by_group] = np.arange(len(by_group)) - first[group[by_group]]
    return order
