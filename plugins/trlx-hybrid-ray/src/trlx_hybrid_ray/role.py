"""What a run asks a place for: trainers, engines, reward models, environments."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from trlx_hybrid.errors import ConfigError

Strategy = Literal["pack", "strict_pack", "spread", "strict_spread"]
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """Workers of one kind.

    Attributes:
        name: how messages and `Placement.of` call it.
        replicas: how many independent ones: engines, or trainers.
        size: workers of one replica, as an engine's TP × PP. They share a node.
        gpus: of each worker. A fraction shares a GPU with other fractions.
        cpus: of each worker.
        strategy: "pack" takes as few nodes as it can and "spread" as many; "strict_pack" insists on one, and
            "strict_spread" on a node of its own for each replica.
        node: the address or id of the only node to use.
        colocate_with: a role whose bundles these workers share, worker r with worker r. They take turns on its GPUs, so
            that `gpus` only weighs who is told to have how much.
        may_span_nodes: whether a replica that fits no node may be spread over several.
    """

    name: str
    replicas: int = 1
    size: int = 1
    gpus: float = 0
    cpus: float = 1
    strategy: Strategy = "pack"
    node: str | None = None
    colocate_with: str | None = None
    may_span_nodes: bool = False

    def __post_init__(self) -> None:
        if self.replicas < 1 or self.size < 1:
            raise ConfigError(f"Role {self.name!r}: replicas={self.replicas} of size={self.size} are no workers.")
        if self.gpus < 0 or self.cpus < 0:
            raise ConfigError(f"Role {self.name!r}: gpus={self.gpus:g} and cpus={self.cpus:g} must not be negative.")
        if self.gpus > 1 and self.gpus != int(self.gpus):
            raise ConfigError(f"Role {self.name!r}: gpus={self.gpus:g}: above 1, Ray gives whole GPUs only.")
        if not self.gpus and not self.cpus and self.colocate_with is None:
            raise ConfigError(f"Role {self.name!r} asks for no CPU and no GPU. Give it cpus=1.")
        if self.may_span_nodes and self.gpus % 1:
            raise ConfigError(f"Role {self.name!r}: may_span_nodes is for whole GPUs, not for gpus={self.gpus:g}.")
        if self.strategy not in STRATEGIES:
            raise ConfigError(f"Role {self.name!r}: strategy={self.strategy!r}; choose one of {', '.join(STRATEGIES)}.")
        if self.colocate_with is not None and (self.node is not None or self.strategy != "pack"):
            raise ConfigError(
                f"Role {self.name!r} is colocated with {self.colocate_with!r}, which decides where it goes: give node= "
                "and strategy= to that one."
            )

    @property
    def workers(self) -> int:
        """Of all replicas."""
        return self.replicas * self.size

    def __str__(self) -> str:
        return f"{self.name} {self.replicas} × {self.size}" if self.size > 1 else f"{self.name} {self.replicas}"


def check(roles: Sequence[Role]) -> None:
    """Refuse roles that no cluster could satisfy.

    Raises:
        ConfigError: names the role and the setting.
    """
    by_name = {role.name: role for role in roles}
    if not roles:
        raise ConfigError("No role asks for a place.")
    if len(by_name) < len(roles):
        twice = next(r.name for i, r in enumerate(roles) if r.name in [other.name for other in roles[:i]])
        raise ConfigError(f"Two roles are called {twice!r}.")
    for role in roles:
        if role.colocate_with is None:
            continue
        host = by_name.get(role.colocate_with)
        if host is None:
            close = difflib.get_close_matches(role.colocate_with, by_name, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise ConfigError(f"Role {role.name!r}: colocate_with={role.colocate_with!r} is no role.{hint}")
        if host.colocate_with is not None:
            raise ConfigError(
                f"Role {role.name!r} is colocated with {host.name!r}, which is colocated itself: name "
                f"{host.colocate_with!r} in both."
            )
        if role.workers > host.workers:
            raise ConfigError(
                f"Role {role.name!r} has {role.workers} workers, {host.name!r} that it is colocated with "
                f"{host.workers}. Give it fewer replicas, or a smaller size."
            )
        if (role.gpus and not host.gpus) or max(role.gpus, host.gpus) > 1:
            raise ConfigError(
                f"Role {role.name!r} with gpus={role.gpus:g} cannot share bundles of {host.gpus:g} GPUs "
                f"({host.name!r}): both take up to one GPU per worker."
            )
