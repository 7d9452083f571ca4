"""What must be placed together: workers with those that share their bundles, and which of them share a node."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from .node import units
from .role import Role


@dataclass(frozen=True, slots=True)
class Tenant:
    """A worker in a bundle: of which role, its rank, and what it asks for in units."""

    role: str
    rank: int
    cpus: int
    gpus: int


@dataclass(frozen=True, slots=True)
class Seat:
    """A worker and those colocated with it, who take turns: their CPUs add up, their GPUs do not."""

    tenants: tuple[Tenant, ...]

    @property
    def cpus(self) -> int:
        """Units to reserve."""
        return sum(tenant.cpus for tenant in self.tenants)

    @property
    def gpus(self) -> int:
        """Units to reserve: what the first tenant, whose bundle it is, asks for."""
        return self.tenants[0].gpus


@dataclass(frozen=True, slots=True)
class Block:
    """Seats that share a node.

    Attributes:
        role: whose bundles they are.
        seats: consecutive ones of the role.
    """

    role: Role
    seats: tuple[Seat, ...]

    @property
    def shape(self) -> tuple[tuple[int, int], ...]:
        """Blocks of the same shape can be swapped."""
        return tuple((seat.cpus, seat.gpus) for seat in self.seats)


def blocks(role: Role, roles: Sequence[Role], *, span: bool) -> list[Block]:
    """A role's seats, cut wherever two neighbours may be on different nodes.

    A replica is not cut, of the role or of one colocated with it; where `span` is set, those that may span nodes are.
    """
    sharing = [role, *(other for other in roles if other.colocate_with == role.name)]
    seats = []
    for rank in range(role.workers):
        tenants = (Tenant(r.name, rank, units(r.cpus), units(r.gpus)) for r in sharing if rank < r.workers)
        seats.append(Seat(tuple(tenants)))
    whole = [r for r in sharing if not (span and r.may_span_nodes)]
    joined = {rank for r in whole for rank in range(1, r.workers) if rank % r.size}  # to the replica of the one before
    cuts = [rank for rank in range(role.workers) if rank not in joined] + [role.workers]
    return [Block(role, tuple(seats[start:end])) for start, end in itertools.pairwise(cuts)]
