"""Why a request cannot be had: one sentence, and a table of what was asked, what is free and who holds the rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .claims import Claim
from .node import Node
from .role import Role
from .seats import blocks

TOLERANCE = 1e-4
"""Ray counts in ten-thousandths."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A request that no arrangement satisfies.

    Attributes:
        reason: what is short, and the way out.
        hopeless: whether it would not fit either if everything were free, so that waiting cannot help.
    """

    reason: str
    hopeless: bool
    roles: tuple[Role, ...]
    nodes: tuple[Node, ...]

    def report(self, claims: Sequence[Claim] = ()) -> str:
        """The reason and the tables.

        Args:
            claims: who holds what. What is neither free nor claimed has an unknown holder.
        """
        hosts = [role for role in self.roles if role.colocate_with is None]
        asked = [["asked", "GPUs", "CPUs"]]
        for role in self.roles:
            where = f" with {role.colocate_with}" if role.colocate_with else f" on {role.node}" if role.node else ""
            gpus = 0 if role.colocate_with else role.workers * role.gpus
            asked.append([f"{role}{where}", f"{gpus:g}", f"{role.workers * role.cpus:g}"])
        asked.append(["in all", f"{_gpus(hosts):g}", f"{_cpus(self.roles):g}"])
        free = [["node", "free GPUs", "free CPUs", "held by"]]
        for node in self.nodes:
            free.append(
                [
                    node.name,
                    f"{node.free_gpus:g} of {node.gpus:g}",
                    f"{node.free_cpus:g} of {node.cpus:g}",
                    "; ".join(held(node, claims)) or "nobody",
                ]
            )
        return "\n".join([self.reason, *_table(asked), *_table(free)])


def explain(nodes: Sequence[Node], roles: Sequence[Role], *, hopeless: bool) -> Refusal:
    """The first reason that is true, from the plainest to the subtlest."""
    reason = _absent(nodes, roles) or _short(nodes, roles) or _too_large(nodes, roles) or _scattered(roles)
    return Refusal(reason=reason, hopeless=hopeless, roles=tuple(roles), nodes=tuple(nodes))


def held(node: Node, claims: Sequence[Claim]) -> list[str]:
    """What of a node is not free, by holder."""
    here = [claim for claim in claims if claim.node == node.id]
    lines = [f"{claim.holder}: {_amounts(claim.gpus, claim.cpus)}" for claim in here]
    gpus = node.gpus - node.free_gpus - sum(claim.gpus for claim in here)
    cpus = node.cpus - node.free_cpus - sum(claim.cpus for claim in here)
    if gpus > TOLERANCE or cpus > TOLERANCE:
        lines.append(f"unknown holder: {_amounts(gpus, cpus)}")
    return lines


def _amounts(gpus: float, cpus: float) -> str:
    parts = [f"{amount:g} {what}{'s' * (amount != 1)}" for amount, what in ((gpus, "GPU"), (cpus, "CPU"))]
    return ", ".join(part for part, amount in zip(parts, (gpus, cpus)) if amount > TOLERANCE)


def _absent(nodes: Sequence[Node], roles: Sequence[Role]) -> str | None:
    if not nodes:
        return "The cluster has no nodes that are alive. Start one with `ray start`."
    for role in roles:
        if role.node is not None and not any(node.answers_to(role.node) for node in nodes):
            return (
                f"Role {role.name!r} asks for node {role.node!r}, and the cluster has no such node: "
                f"{', '.join(node.name for node in nodes)}."
            )
    return None


def _short(nodes: Sequence[Node], roles: Sequence[Role]) -> str | None:
    hosts = [role for role in roles if role.colocate_with is None]
    for what, asked in (("gpus", _gpus(hosts)), ("cpus", _cpus(roles))):
        has, free = (sum(getattr(node, name) for node in nodes) for name in (what, f"free_{what}"))
        name = what.upper()[:3] + "s"
        if asked > has + TOLERANCE:
            return f"{asked:g} {name} are asked for, the cluster has {has:g}. Ask for less, or add nodes."
        if asked > free + TOLERANCE:
            return (
                f"{asked:g} {name} are asked for, {free:g} of {has:g} are free. Ask for less, or end what holds the "
                "rest."
            )
    return None


def _too_large(nodes: Sequence[Node], roles: Sequence[Role]) -> str | None:
    """A part that must share a node, and no node is large enough even when it is empty."""
    for role in (role for role in roles if role.colocate_with is None):
        for block in blocks(role, roles, span=True):
            gpus, cpus = (sum(getattr(seat, what) for seat in block.seats) / 10_000 for what in ("gpus", "cpus"))
            if not any(node.gpus + TOLERANCE >= gpus and node.cpus + TOLERANCE >= cpus for node in nodes):
                together = sorted({tenant.role for seat in block.seats for tenant in seat.tenants})
                largest = max(nodes, key=lambda node: (node.gpus, node.cpus))
                return (
                    f"One replica of {' with '.join(together)} takes {gpus:g} GPUs and {cpus:g} CPUs of one node, and "
                    f"the largest, {largest.name}, has {largest.gpus:g} and {largest.cpus:g}. Make replicas smaller, "
                    "or set may_span_nodes where its speed allows."
                )
    return None


def _scattered(roles: Sequence[Role]) -> str:
    strict = [role for role in roles if role.strategy.startswith("strict") or role.node is not None]
    if strict:
        role = strict[0]
        rule = f"strategy={role.strategy!r}" if role.strategy.startswith("strict") else f"node={role.node!r}"
        return f"Enough is free in all, but not as {rule} of role {role.name!r} asks. Relax it, or free a node."
    return (
        "Enough is free in all, but not together: replicas stay on one node, and what is free is scattered. End what "
        "shares their nodes, make replicas smaller, or set may_span_nodes where their speed allows."
    )


def _gpus(hosts: Sequence[Role]) -> float:
    return sum(role.workers * role.gpus for role in hosts)


def _cpus(roles: Sequence[Role]) -> float:
    return sum(role.workers * role.cpus for role in roles)


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
