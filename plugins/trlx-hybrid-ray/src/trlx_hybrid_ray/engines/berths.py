"""Where engines live: reserved first, each one's processes on one node, and beside the GPUs that trainers use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .. import debugging
from ..placement import Placement, Request, reserve, to_stderr

if TYPE_CHECKING:
    from trlx_hybrid.serving import ServerPlan

    from .options import RemoteOptions

ENGINE, TRAINER = "engine", "trainer"


class Berths:
    """Places for the engines of one run, by replica: one actor each, which has all GPUs of the replica.

    Args:
        trainers: by node, how many trainers outside of Ray use that node's first GPUs. They are reserved before the
            engines', or Ray, which does not know of them, would give them away.

    Raises:
        ConfigError: the resources make no sense.
        PlacementError: they cannot be had.
    """

    def __init__(self, plan: ServerPlan, options: RemoteOptions, trainers: Mapping[str, int]) -> None:
        self._reserved: list[Placement] = []
        gpus = plan.gpus if options.gpus is None else options.gpus
        requests = [
            Request(name=TRAINER, replicas=count, gpus=1, cpus=0, nodes=(node,)) for node, count in trainers.items()
        ]
        engine = Request(
            name=ENGINE,
            replicas=options.replicas,
            gpus=plan.ranks * gpus,
            cpus=plan.ranks * options.cpus,
            strategy=options.strategy,
        )
        try:
            for request in [*requests, engine]:
                self._reserved.append(reserve(request, show=to_stderr))
        except BaseException:
            self.close()
            raise

    def options(self, replica: int) -> Mapping[str, Any]:
        """What Ray's `.options()` takes for the actor of a replica."""
        return self._reserved[-1].options(replica) | {"runtime_env": {"env_vars": dict(debugging.variables())}}

    def gpus(self, replica: int) -> tuple[str, ...]:
        """Ids of all GPUs of a replica, as its node numbers them."""
        return self._reserved[-1].gpus(replica)

    def close(self) -> None:
        """Give the places back; ends the actors in them."""
        import ray

        if ray.is_initialized():
            for placement in self._reserved:
                placement.remove()
