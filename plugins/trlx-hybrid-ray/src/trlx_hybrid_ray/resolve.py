"""From roles and nodes to a placement, or the reasons why there is none. Pure: nothing is reserved here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from .arranging import Seated, arranged
from .node import WHOLE, Node
from .placement import Bundle, Placement, Slot
from .refusal import Refusal, explain
from .role import Role, check
from .seats import Block, Seat, blocks

ATTEMPTS = 20_000
"""Nodes looked at before giving up. A request that fits takes about one look per role and node."""


def resolve(nodes: Sequence[Node], roles: Sequence[Role]) -> Placement | Refusal:
    """Find a place for every worker.

    No replica is cut between nodes unless its role may span them and no node has room. Every way of dealing replicas
    out to nodes is tried before a refusal, in the order that the strategies prefer; fractions of a GPU are packed best
    fit. The order in which nodes are given changes nothing.

    Raises:
        ConfigError: roles that contradict each other.
    """
    check(roles)
    nodes = sorted(nodes, key=lambda node: node.order)
    for span in (False, True) if any(role.may_span_nodes for role in roles) else (False,):
        hosts = [role for role in roles if role.colocate_with is None]
        made = [block for role in hosts for block in blocks(role, roles, span=span)]
        found = arranged(nodes, made, ATTEMPTS)
        if found is not None:
            return _placement(nodes, roles, made, found)
    return explain(nodes, roles, hopeless=not _possible([_emptied(node) for node in nodes], roles))


def _possible(nodes: Sequence[Node], roles: Sequence[Role]) -> bool:
    span = any(role.may_span_nodes for role in roles)
    hosts = [role for role in roles if role.colocate_with is None]
    return arranged(nodes, [b for role in hosts for b in blocks(role, roles, span=span)], ATTEMPTS) is not None


def _emptied(node: Node) -> Node:
    return replace(node, free_cpus=node.cpus, free_gpus=node.gpus)


@dataclass(slots=True)
class _Bundle:
    """A bundle that is being filled."""

    node: Node
    seats: list[Seat]

    def built(self) -> Bundle:
        cpus, gpus = (sum(getattr(seat, what) for seat in self.seats) / WHOLE for what in ("cpus", "gpus"))
        return Bundle(node=self.node.id, cpus=cpus, gpus=gpus)


def _placement(
    nodes: Sequence[Node], roles: Sequence[Role], made: Sequence[Block], chosen: Sequence[Seated]
) -> Placement:
    """Lay the blocks out: one group per node, one more for each replica that spans nodes."""
    spanning = _spanning(made, chosen)
    groups: list[list[_Bundle]] = [[] for _ in range(len(nodes) + len({*spanning.values()}))]
    shared: dict[tuple[int, int], _Bundle] = {}
    for number, (block, seated) in enumerate(zip(made, chosen)):
        at = seated.node
        for seat, part in zip(block.seats, seated.parts):
            if part is not None and (at, part) in shared:
                shared[at, part].seats.append(seat)
                continue
            bundle = _Bundle(nodes[at], [seat])
            if part is not None:
                shared[at, part] = bundle
            groups[len(nodes) + spanning[number] if number in spanning else at].append(bundle)
    kept = [group for group in groups if group]
    return Placement(
        nodes=tuple(nodes),
        roles=tuple(roles),
        groups=tuple(tuple(bundle.built() for bundle in group) for group in kept),
        slots=tuple(_slots(roles, kept)),
    )


def _spanning(made: Sequence[Block], chosen: Sequence[Seated]) -> Mapping[int, int]:
    """By index, the blocks of replicas that were cut, and the number of the group that each such replica gets."""
    found: dict[int, int] = {}
    numbered = list(enumerate(zip(made, chosen)))
    replicas = groupby(numbered, lambda n: (n[1][0].role.name, n[1][0].seats[0].tenants[0].rank // n[1][0].role.size))
    count = 0
    for _, members in replicas:
        parts = list(members)
        if len({seated.node for _, (_, seated) in parts}) > 1:
            found |= {number: count for number, _ in parts}
            count += 1
    return found


def _slots(roles: Sequence[Role], groups: Sequence[Sequence[_Bundle]]) -> Iterator[Slot]:
    by_name = {role.name: position for position, role in enumerate(roles)}
    found = []
    for group, bundles in enumerate(groups):
        for index, bundle in enumerate(bundles):
            reserved = sum(seat.gpus for seat in bundle.seats)
            tenants = [tenant for seat in bundle.seats for tenant in seat.tenants]
            asked = sum(tenant.gpus for tenant in tenants)
            for tenant in tenants:
                # Rounded down: shares that add up to more than the bundle would leave the last actor waiting for ever.
                share = tenant.gpus if asked <= reserved else tenant.gpus * reserved // asked
                size = roles[by_name[tenant.role]].size
                slot = Slot(
                    role=tenant.role,
                    rank=tenant.rank,
                    replica=tenant.rank // size,
                    local=tenant.rank % size,
                    node=bundle.node.id,
                    address=bundle.node.address,
                    group=group,
                    bundle=index,
                    cpus=tenant.cpus / WHOLE,
                    gpus=share / WHOLE,
                )
                found.append(slot)
    yield from sorted(found, key=lambda slot: (by_name[slot.role], slot.rank))
