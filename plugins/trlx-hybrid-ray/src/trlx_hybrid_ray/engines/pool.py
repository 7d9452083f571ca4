"""The engines of one run: rank 0 of the training reserves GPUs, starts them, replaces those that die, and ends them.

The other ranks hold handles of the same actors, sent to them as they are: nothing is looked up by name.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from trlx_hybrid.errors import EngineError, HybridError, listed

from .. import debugging
from ..errors import PlacementError, brief
from ..placement import Placement, PlacementRequest, reserve
from ..printer import say
from ..remote.actors import Pickled, wait
from .actor import EngineActor

if TYPE_CHECKING:
    import torch
    from trlx_hybrid.ranks import Ranks
    from trlx_hybrid.serving import ServerPlan

    from .options import RemoteOptions

CHECK_SECONDS = 20.0
"""What a living engine may take to say so. Its event loop does nothing that takes long."""
CLOSE_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Replica:
    """One engine.

    Attributes:
        number: no two of a run have the same.
        index: below `replicas`; an engine that replaces another takes its index, and the GPUs reserved for it.
        handle: of its actor.
        where: node and process.
    """

    number: int
    index: int
    handle: Any
    where: str = ""

    def __str__(self) -> str:
        return f"engine {self.index}" + (f" ({self.where})" if self.where else "")


class EnginePool:
    """Engines that live.

    Args:
        trainers: by node, the GPUs that ranks train on without Ray knowing.

    Attributes:
        replicas: by number. On ranks other than 0 those of the last `restore` that this rank has not seen die.
        causes: of all deaths that this rank knows of, in order.
    """

    def __init__(
        self, plan: ServerPlan, options: RemoteOptions, ranks: Ranks, trainers: Mapping[str, Sequence[str]]
    ) -> None:
        self.replicas: dict[int, Replica] = {}
        self.causes: list[str] = []
        self._plan, self._options, self._ranks, self._trainers = plan, options, ranks, trainers
        self._start_seconds = debugging.patience(options.start_deadline)
        self._seen_dying: dict[int, str] = {}  # since the last restore
        self._reserved: Sequence[Placement] = ()  # the engines' comes last
        self._starting: dict[Any, Replica] = {}  # by what their start will return
        self._given_up: set[int] = set()  # indices
        self._numbers = itertools.count()
        self._replaced = 0

    def lose(self, number: int, cause: str) -> None:
        """An engine turned out to be dead, or has to be. Rank 0 starts to replace it at once, in the background."""
        replica = self.replicas.pop(number, None)
        if replica is None:
            return
        self.causes.append(f"{replica} died: {cause}")
        say(self.causes[-1])
        if self._ranks.rank != 0:
            self._seen_dying[number] = cause
            return
        _kill(replica)
        if self._replaced < self._options.restarts:
            self._replaced += 1
            self._launch(replica.index)

    def restore(self) -> None:
        """Replace all that died, so that every rank holds the same living engines. Collective.

        Raises:
            PlacementError, ConfigError: there is no place for them.
            EngineError: none lives and none can be started, or more died than may be replaced.
        """
        seen = self._ranks.gather(dict(self._seen_dying))
        found: dict[int, Replica] | Exception | None = None
        if self._ranks.rank == 0:
            try:
                for theirs in seen:
                    for number, cause in theirs.items():
                        self.lose(number, cause)
                found = self._completed()
            except Exception as error:  # whatever it is, the other ranks wait for it
                found = error if isinstance(error, HybridError) else EngineError(brief(error))
        told: Any = self._ranks.gather(found)[0]
        if isinstance(told, Exception):
            raise told
        self.replicas = dict(told)
        self._seen_dying.clear()

    def close(self) -> None:
        """End all engines and give their GPUs back."""
        import ray

        replicas, self.replicas = list(self.replicas.values()), {}
        if self._ranks.rank == 0 and ray.is_initialized():
            wait([replica.handle.close.remote() for replica in replicas], CLOSE_SECONDS)
            for replica in [*replicas, *self._starting.values()]:
                _kill(replica)
            for placement in self._reserved:
                placement.remove()
        self._reserved, self._starting = (), {}

    # --- rank 0 -----------------------------------------------------------------------------------------------------

    def _completed(self) -> dict[int, Replica]:
        first = not self._reserved
        if first:
            self._reserved = reserved(self._plan, self._options, self._trainers)
            for index in range(self._options.replicas):
                self._launch(index)
        self._check()
        try:
            self._await_start()
        except HybridError as error:
            if first or not self.replicas:
                raise
            say(f"{error} The run goes on with {len(self.replicas)} of {self._options.replicas} engines.")
        if not self.replicas:
            raise EngineError(f"No remote engine is left: {listed(self.causes, 3)}")
        return dict(sorted(self.replicas.items()))

    def _check(self) -> None:
        """Find those that died while nobody sampled from them."""
        import ray

        asked = {replica.handle.check.remote(): replica for replica in self.replicas.values()}
        _, late = wait(list(asked), debugging.patience(CHECK_SECONDS))
        for reference, replica in asked.items():
            if reference in late:
                self.lose(replica.number, f"it did not answer for {CHECK_SECONDS:g} s")
                continue
            try:
                ray.get(reference)
            except (ray.exceptions.RayError, HybridError) as error:
                self.lose(replica.number, brief(error))

    def _launch(self, index: int) -> None:
        import ray

        if not self._reserved or index in self._given_up:
            return
        plan = Pickled.of(
            self._plan, "What the engines are built from", "Leave out of engine_args what cannot be sent."
        )
        actors: Any = ray.remote(EngineActor)
        variables = {"env_vars": dict(debugging.variables())}
        handle = actors.options(**self._reserved[-1].options(index), runtime_env=variables).remote(plan)
        self._starting[handle.start.remote()] = Replica(next(self._numbers), index, handle)

    def _await_start(self) -> None:
        """Wait until all that were launched run.

        Raises:
            EngineError: names one that did not start; it will not be tried again.
        """
        import ray

        starting, self._starting = self._starting, {}
        _, late = wait(list(starting), self._start_seconds)
        failure: tuple[str, BaseException | None] | None = None
        for reference, replica in starting.items():
            try:
                if reference in late:
                    raise TimeoutError(f"it did not start within {self._start_seconds:g} s. Raise start_deadline=.")
                self.replicas[replica.number] = replace(replica, where=ray.get(reference))
            except (ray.exceptions.RayError, HybridError, TimeoutError) as error:
                reason = str(error) if isinstance(error, TimeoutError) else brief(error)
                failure = failure or (f"Remote engine {replica.index} did not start: {reason}", error)
                self._given_up.add(replica.index)
                _kill(replica)
        if failure is not None:
            raise EngineError(failure[0]) from failure[1]


def reserved(plan: ServerPlan, options: RemoteOptions, trainers: Mapping[str, Sequence[str]]) -> list[Placement]:
    """A bundle for each engine; before them, the GPUs that trainers use without Ray knowing, which it would give away.

    Raises:
        ConfigError: the resources make no sense.
        PlacementError: they cannot be had, or Ray gives an engine a GPU that a trainer uses.
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
    """A CUDA device of this process as its node numbers it, and as Ray does."""
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    index = device.index or 0
    return visible[index] if index < len(visible) else str(index)


def _kill(replica: Replica) -> None:
    import ray

    ray.kill(replica.handle)
