"""From a plan to placement groups that exist: created before a deadline, verified where they landed, or given back."""

from __future__ import annotations

import functools
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import claims, landing, peers
from .asking import ask
from .errors import PlacementError
from .node import Node, alive
from .placement import Placement, Slot
from .placement_map import drawn
from .refusal import Refusal
from .resolve import resolve
from .role import Role

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

NODE_LABEL = "ray.io/node-id"
REFUSE_SECONDS = 10.0
ATTEMPT_SECONDS = 2.0
"""How long Ray may take over a plan that fits. Then it is planned again: what is free may be elsewhere by now."""


def to_stderr(text: str) -> None:
    """Where the map goes unless the caller says otherwise."""
    print(text, file=sys.stderr, flush=True)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Placed:
    """A placement whose bundles are reserved.

    Attributes:
        run: as claims call it.
        groups: Ray's handles, in the order of `placement.groups`.
    """

    run: str
    placement: Placement
    groups: tuple[PlacementGroup, ...]

    def options(self, slot: Slot, *, reachable: bool = True) -> dict[str, Any]:
        """What `.options(**…)` of an actor or task takes to live in a slot.

        Args:
            reachable: put address and namespace into the actor's environment, so that processes it starts find their
                peers. It costs the start of a process each; an actor may call `peers.announce()` instead.
        """
        found: dict[str, Any] = {
            "num_cpus": slot.cpus,
            "num_gpus": slot.gpus,
            "scheduling_strategy": self.strategy(slot.group, slot.bundle),
        }
        if reachable:
            wanted = (peers.ADDRESS, peers.NAMESPACE)
            found["runtime_env"] = {"env_vars": {k: v for k, v in peers.environment().items() if k in wanted}}
        return found

    def engine(self, role: str, replica: int) -> dict[str, Any]:
        """What `.options(**…)` of the actor takes that builds a replica with vLLM's Ray executor.

        The actor itself takes no GPU; its child actors take those of the replica's bundles.

        Raises:
            ConfigError, PlacementError: see `Placement.engine`.
        """
        place = self.placement.engine(role, replica)
        environment = peers.environment()
        wanted = {name: environment[name] for name in (peers.ADDRESS, peers.NAMESPACE)}
        return {
            "num_cpus": 0,
            "num_gpus": 0,
            "scheduling_strategy": self.strategy(place.group, place.bundles[0]),
            "runtime_env": {"env_vars": wanted | dict(place.environment)},
        }

    def strategy(self, group: int, bundle: int) -> Any:
        """Ray's scheduling strategy for one bundle; children of an actor stay in its group."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        return PlacementGroupSchedulingStrategy(
            self.groups[group], placement_group_bundle_index=bundle, placement_group_capture_child_tasks=True
        )

    def remove(self) -> None:
        """Give everything back. Ends the actors that live in it."""
        _remove(self.groups)


def place(
    roles: Sequence[Role],
    *,
    run: str | None = None,
    deadline: float | None = REFUSE_SECONDS,
    dashboard: bool = False,
    show: Callable[[str], None] | None = to_stderr,
) -> Placed:
    """Reserve a place for every worker on the cluster that this process is connected to, and show the map of it.

    What cannot fit on these nodes is refused at once; what others hold is waited for until the deadline.

    Args:
        run: how claims are to call this run; by default a random name.
        deadline: seconds until a refusal; None waits for ever.
        dashboard: whether the cluster's dashboard runs, so that a refusal can name holders that reserved nothing.
        show: is given the map once everything is reserved, before any worker starts; None to leave it out.

    Raises:
        ConfigError: roles that contradict each other.
        PlacementError: what was asked for cannot be had; with a table of what was asked, what is free and who holds it.
            Nothing stays reserved.
    """
    until = None if deadline is None else time.monotonic() + deadline
    run = run or secrets.token_hex(4)
    while True:
        nodes = alive()
        found = resolve(nodes, roles)
        if isinstance(found, Placement):
            soon = time.monotonic() + ATTEMPT_SECONDS
            groups = _created(found, run, soon if until is None else min(soon, until))
            if groups is not None:
                break
            reason = "Ray reports enough as free, and does not give it: others are ahead, or a node is not responding."
            found = Refusal(reason=reason, hopeless=False, roles=tuple(roles), nodes=tuple(nodes))
        if found.hopeless or (until is not None and time.monotonic() >= until):
            raise PlacementError(_refused(found, nodes, deadline, dashboard))
        time.sleep(peers.POLL)
    try:
        settled = found.settled(landing.gpu_ids(found, groups))
    except BaseException:
        _remove(groups)
        raise
    if show is not None:
        show(drawn(settled))
    return Placed(run=run, placement=settled, groups=groups)


@contextmanager
def reserved(roles: Sequence[Role], **options: Any) -> Iterator[Placed]:
    """`place` for as long as a context lasts."""
    placed = place(roles, **options)
    try:
        yield placed
    finally:
        placed.remove()


def _refused(found: Refusal, nodes: Sequence[Node], deadline: float | None, dashboard: bool) -> str:
    waited = "" if found.hopeless or deadline is None else f"\nNothing changed within {deadline:g} s."
    return found.report(claims.read(dashboard=dashboard)) + waited


def _created(placement: Placement, run: str, until: float) -> tuple[PlacementGroup, ...] | None:
    """The placement's groups, each bundle pinned to its node; None, and nothing reserved, if Ray has no room after all.

    Ray keeps a group that does not fit waiting for ever and says nothing, so every wait ends here.
    """
    from ray.util.placement_group import placement_group

    roles: dict[int, dict[str, None]] = {}
    for slot in placement.slots:
        roles.setdefault(slot.group, {})[slot.role] = None
    groups: list[PlacementGroup] = []
    kept = False
    try:
        for number, bundles in enumerate(placement.groups):
            group = placement_group(
                [bundle.resources for bundle in bundles],
                strategy="PACK",
                name=claims.named(run, list(roles[number])),
                bundle_label_selector=[{NODE_LABEL: bundle.node} for bundle in bundles],
            )
            groups.append(group)
        # At least a moment for each: a deadline that has passed must not keep what is free from being had.
        if all(group.wait(max(until - time.monotonic(), 0.1)) for group in groups):
            landing.check_nodes(placement, groups)
            kept = True
    finally:
        if not kept:
            _remove(groups)
    return tuple(groups) if kept else None


def _remove(groups: Sequence[PlacementGroup]) -> None:
    from ray.util import remove_placement_group

    for group in groups:
        ask(functools.partial(remove_placement_group, group))
