"""The engines of one run, each a Ray actor. Rank 0 of the training reserves GPUs, starts the engines, replaces dead
ones and ends all of them.

The other ranks get handles of the same actors from rank 0. No actor is looked up by name.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from trlx_hybrid.errors import EngineError, HybridError, listed

from .. import debugging
from ..actors import ActorPool, Pickled, Worker
from ..errors import PlacementError, brief
from ..placement import Placement, PlacementRequest, reserve
from ..printer import say
from ..waiting import replies, wait
from .actor import EngineActor

if TYPE_CHECKING:
    import torch
    from trlx_hybrid.contract.serving import ServerPlan
    from trlx_hybrid.interprocess.ranks import Ranks

    from .options import RemoteOptions

CHECK_SECONDS = 20.0
"""Seconds within which a living engine answers a call. Its event loop runs nothing that takes long."""
CLOSE_SECONDS = 10.0

CALLS_OF_A_RANK, CALLS_OF_ALL = 4, 1000
"""The numbers of calls that an engine's actor serves at once: `CALLS_OF_A_RANK` for each training rank, and
`CALLS_OF_ALL` in addition. Each rank keeps one `collect` call open, and makes other calls meanwhile. With Ray's limit
of 1,000, calls of many ranks, and the check for dead engines, would have to wait for other calls to end."""


class EnginePool:
    """The engines of a run that are alive, each a server in a Ray actor. Dead ones are replaced, up to
    `RemoteOptions.restarts` of them.

    Args:
        plan: the settings and the model from which each server is built; pickled and sent to the actors.
        options: the user's options of the remote engine.
        ranks: the training processes; only rank 0 starts actors.
        trainers: the GPUs on which ranks train although Ray takes them to be free, by the node's id.

    Attributes:
        replicas: the living engines, by number. A replacement has the index of the engine that it replaces, and a new
            number. Ranks other than 0 update it only at `restore`, and when they see an engine die.
        causes: for each engine whose death this rank knows of, a sentence that names engine and cause, in order.
    """

    def __init__(
        self, plan: ServerPlan, options: RemoteOptions, ranks: Ranks, trainers: Mapping[str, Sequence[str]]
    ) -> None:
        self.replicas: dict[int, Worker] = {}
        self.causes: list[str] = []
        self._options, self._ranks = options, ranks
        self._seen_dying: dict[int, str] = {}  # since the last restore
        self._replaced = 0
        built = Pickled.of(plan, "What the engines are built from", "Leave out of engine_args what cannot be sent.")
        self._actors = ActorPool(  # only rank 0 starts actors
            EngineActor,
            [built],
            options.replicas,
            lambda: reserved(plan, options, trainers),
            noun="engine",
            start_deadline=options.start_deadline,
            threads=CALLS_OF_ALL + CALLS_OF_A_RANK * ranks.world,
        )

    def lose(self, number: int, cause: str) -> None:
        """Remove an engine that died or must be killed. Rank 0 starts to replace it at once, in the background;
        `restore` waits for the new one.

        Args:
            number: the engine's key in `replicas`.
            cause: why it is removed, for messages.
        """
        replica = self.replicas.pop(number, None)
        if replica is None:
            return
        self.causes.append(f"{replica} died: {cause}")
        say(self.causes[-1])
        if self._ranks.rank != 0:
            self._seen_dying[number] = cause
            return
        self._actors.kill(replica)
        if self._replaced < self._options.restarts:
            self._replaced += 1
            self._actors.launch([replica.index])

    def restore(self) -> None:
        """Replace all dead engines, so that every rank holds the same living ones. Collective.

        Raises:
            PlacementError, ConfigError: there is no place for the new engines.
            EngineError: no engine lives and none can be started, or more engines died than may be replaced.
        """
        seen = self._ranks.gather(dict(self._seen_dying))
        self.replicas = dict(self._ranks.by_first(lambda: self._restored(seen)))
        self._seen_dying.clear()

    def close(self) -> None:
        """End all engines and give their GPUs back."""
        import ray

        if self._ranks.rank == 0 and ray.is_initialized():
            wait([replica.handle.close.remote() for replica in self.replicas.values()], CLOSE_SECONDS)
        self._actors.close()
        self.replicas = {}

    # --- rank 0 -----------------------------------------------------------------------------------------------------

    def _restored(self, seen: Sequence[Mapping[int, str]]) -> dict[int, Worker]:
        """Do rank 0's part of `restore`: replace dead engines, and return the living ones, by number.

        Args:
            seen: for each rank, the causes of the deaths that it saw, by the engine's number.
        """
        try:
            for number, cause in itertools.chain.from_iterable(theirs.items() for theirs in seen):
                self.lose(number, cause)
            return self._completed()
        except HybridError:
            raise
        except Exception as error:
            raise EngineError(brief(error)) from error

    def _completed(self) -> dict[int, Worker]:
        """Start the engines that are missing, wait until they have started, and return all living engines, by number.

        Raises:
            EngineError: no engine lives, or the engines did not start at the beginning of the run.
        """
        from ray.exceptions import GetTimeoutError

        first = not self._actors.workers
        if first:
            self._actors.launch()
        self._check()
        failure: EngineError | None = None
        for replica, error in self._actors.started():
            if error is None:
                self.replicas[replica.number] = replica
            elif failure is None:  # no other start is tried
                why = f"{error}. Raise start_deadline=." if isinstance(error, GetTimeoutError) else brief(error)
                failure = EngineError(f"Remote engine {replica.index} did not start: {why}")
                failure.__cause__ = error
        if failure is not None and (first or not self.replicas):
            raise failure
        if failure is not None:
            say(f"{failure} The run goes on with {len(self.replicas)} of {self._options.replicas} engines.")
        if not self.replicas:
            raise EngineError(f"No remote engine is left: {listed(self.causes, 3)}")
        return dict(sorted(self.replicas.items()))

    def _check(self) -> None:
        """Call every engine, and remove those that do not answer within `CHECK_SECONDS`: they may have died while no
        rank sampled from them."""
        from ray.exceptions import GetTimeoutError, RayError

        asked = {replica: replica.handle.call.remote("check") for replica in self.replicas.values()}
        for replica, found in replies(asked, debugging.patience(CHECK_SECONDS)):
            if isinstance(found, GetTimeoutError):
                self.lose(replica.number, f"it did not answer for {CHECK_SECONDS:g} s")
            elif isinstance(found, RayError):
                self.lose(replica.number, brief(found))


def reserved(plan: ServerPlan, options: RemoteOptions, trainers: Mapping[str, Sequence[str]]) -> list[Placement]:
    """Reserve the resources for all engines, a bundle of Ray's for each. Before that, reserve the GPUs that trainers
    use without Ray knowing, so that Ray does not give them to engines.

    Args:
        plan: the plan from which each server is built; it says whether servers need GPUs.
        options: the user's options of the remote engine.
        trainers: the GPUs on which ranks train although Ray takes them to be free, by the node's id.

    Returns:
        The placement of the engines as the last item, after those of the trainers' GPUs.

    Raises:
        ConfigError: the resources make no sense.
        PlacementError: the resources are not free, or Ray gives an engine a GPU that a trainer uses.
    """
    gpus = plan.gpus if options.gpus is None else options.gpus
    requests = [
        PlacementRequest(name="trainer", replicas=len(used), gpus=1, cpus=0, nodes=[node])
        for node, used in sorted(trainers.items())
    ]
    requests.append(
        PlacementRequest(
            name="engine",
            replicas=options.replicas,
            gpus=plan.ranks * gpus,
            cpus=plan.ranks * options.cpus,
            strategy=options.strategy,
        )
    )
    found: list[Placement] = []
    try:
        for request in requests:
            found.append(reserve(request, show=say))
        for bundle in found[-1].bundles:
            if both := sorted({*bundle.gpus} & {*trainers.get(bundle.node.id, ())}):
                raise PlacementError(
                    f"Ray gives an engine GPU {', '.join(both)} of node {bundle.node.name}, which a trainer outside of "
                    "Ray uses. Start the script with `trlx-hybrid launch`, or let Ray know of the engines' GPUs only: "
                    "CUDA_VISIBLE_DEVICES for `ray start`."
                )
    except BaseException:
        for placement in found:
            placement.remove()
        raise
    return found


def gpu_name(device: torch.device) -> str:
    """Return the number (or UUID) that a CUDA device of this process has for the node, and so for Ray. In this process
    `CUDA_VISIBLE_DEVICES` may have renumbered the devices."""
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    index = device.index or 0
    return visible[index] if index < len(visible) else str(index)
