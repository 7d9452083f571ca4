"""Who holds what of the cluster.

Our record is the placement groups themselves: each carries the run, its roles and its driver in its name. The cluster's
own directory keeps the names, so every driver can read them, without an actor that must be found, kept alive and
believed; and a claim disappears with what it claims, however its run ended. What other people reserved is named as far
as they named it. Actors outside of placement groups are known to the State API only, which takes a dashboard.
"""

from __future__ import annotations

import getpass
import os
import secrets
import socket
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

PREFIX = "trlx_hybrid"
STATE_SECONDS = 5
"""What the State API may take: it is asked for an error message only."""


@dataclass(frozen=True, slots=True)
class Claim:
    """What somebody holds of one node.

    Attributes:
        holder: for messages.
        node: its id.
    """

    holder: str
    node: str
    gpus: float
    cpus: float


def named(run: str, roles: Sequence[str]) -> str:
    """The name of a placement group of ours, from which `read` tells its holder.

    No two are the same: Ray refuses a name that a group in the same namespace has.
    """
    who = f"pid {os.getpid()} of {_user()}@{socket.gethostname()}"
    return "|".join((PREFIX, run, "+".join(roles), who, secrets.token_hex(4)))


def read(*, dashboard: bool = False) -> list[Claim]:
    """Every claim that is known of.

    Args:
        dashboard: whether one runs, so that the State API can name single actors.
    """
    import ray

    groups = ray.util.placement_group_table()
    claims = from_groups(groups)
    return claims + _actors(set(groups)) if dashboard else claims


def from_groups(table: Mapping[str, Mapping[str, Any]]) -> list[Claim]:
    """What placement groups hold, from Ray's table of them. Those that are still waiting hold nothing."""
    found = []
    for group_id, group in sorted(table.items()):
        if group["state"] not in ("CREATED", "RESCHEDULING"):
            continue
        by_node: defaultdict[str, list[Mapping[str, float]]] = defaultdict(list)
        for index, node in group["bundles_to_node_id"].items():
            if node:
                by_node[node].append(group["bundles"][index])
        for node, bundles in sorted(by_node.items()):
            gpus, cpus = (sum(bundle.get(what, 0.0) for bundle in bundles) for what in ("GPU", "CPU"))
            found.append(Claim(_holder(group_id, group["name"]), node, gpus, cpus))
    return found


def _holder(group_id: str, name: str) -> str:
    parts = name.split("|")
    if len(parts) == 5 and parts[0] == PREFIX:
        return f"run {parts[1]} ({parts[3]}), {parts[2]}"
    return f"placement group {name!r}" if name else f"placement group {group_id[:8]} without a name"


def _actors(groups: set[str]) -> list[Claim]:
    from ray.util.state import list_actors

    try:
        actors = list_actors(filters=[("state", "=", "ALIVE")], detail=True, timeout=STATE_SECONDS)
    except Exception:  # it is asked to make a message better, and must not replace it
        return []
    found = []
    for actor in actors:
        if actor.placement_group_id in groups or not actor.node_id:
            continue
        needs = actor.required_resources or {}
        name = f"actor {actor.name or actor.class_name} (pid {actor.pid}, namespace {actor.ray_namespace})"
        found.append(Claim(name, actor.node_id, needs.get("GPU", 0.0), needs.get("CPU", 0.0)))
    return [claim for claim in found if claim.gpus or claim.cpus]


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user may have no name
        return str(os.getuid())
