"""Where engines live: reserved first, each one's processes on one node, and beside the GPUs that trainers use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .. import debugging
from ..placing import place
from ..role import Role

if TYPE_CHECKING:
    from trlx_hybrid.serving import ServerPlan

    from .options import RemoteOptions

ENGINE, TRAINER = "engine", "trainer"


class Berths:
    """Places for the engines of one run, by replica.

    Args:
        trainers: by node, how many trainers outside of Ray use that node's first GPUs. They are reserved along with the
            engines', or Ray, which does not know of them, would give them away.

    Raises:
        ConfigError: the resources make no sense.
        PlacementError: they cannot be had.
    """

    def __init__(self, plan: ServerPlan, options: RemoteOptions, trainers: Mapping[str, int]) -> None:
        roles = [
            Role(name=f"{TRAINER} {number}" if number else TRAINER, replicas=count, gpus=1, cpus=0, node=node)
            for number, (node, count) in enumerate(sorted(trainers.items()))
        ]
        engine = Role(
            name=ENGINE,
            replicas=options.replicas,
            size=plan.ranks,
            gpus=plan.gpus if options.gpus is None else options.gpus,
            cpus=options.cpus,
            strategy=options.strategy,
        )
        self._size = plan.ranks
        self._placed = place([*roles, engine])
        self._slots = self._placed.placement.of(ENGINE)

    def options(self, replica: int) -> Mapping[str, Any]:
        """What Ray's `.options()` takes for the actor of a replica. It lives in the first of its bundles; the others
        are reserved for the processes that it starts."""
        found = self._placed.options(self._slots[replica * self._size])
        variables = found["runtime_env"]["env_vars"] | dict(debugging.variables())
        return found | {"runtime_env": {"env_vars": variables}}

    def gpus(self, replica: int) -> tuple[str, ...]:
        """Ids of all GPUs of a replica, as its node numbers them."""
        mine = self._slots[replica * self._size : (replica + 1) * self._size]
        return tuple(gpu for slot in mine for gpu in slot.gpu_ids)

    def close(self) -> None:
        """Give the places back; ends the actors in them."""
        import ray

        if ray.is_initialized():
            self._placed.remove()
