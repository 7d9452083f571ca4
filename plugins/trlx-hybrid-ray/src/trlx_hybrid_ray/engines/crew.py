"""The engines of one run: rank 0 of the training starts them, replaces those that die, and ends them.

The other ranks hold handles of the same actors, sent to them as they are: nothing is looked up by name.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trlx_hybrid.errors import EngineError, HybridError, listed

from .. import debugging
from ..errors import brief
from ..remote.shipment import packed
from ..worker_group.group import timeout
from .actor import EngineActor
from .berths import Berths

if TYPE_CHECKING:
    from trlx_hybrid.ranks import Ranks
    from trlx_hybrid.serving import ServerPlan

    from .options import RemoteOptions

CHECK_SECONDS = 20.0
"""What a living engine may take to say so. Its event loop does nothing that takes long."""
CLOSE_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Member:
    """One engine.

    Attributes:
        number: no two of a run have the same.
        replica: whose place it has.
        handle: of its actor.
        where: node and process.
    """

    number: int
    replica: int
    handle: Any
    where: str = ""

    def __str__(self) -> str:
        return f"engine {self.replica}" + (f" ({self.where})" if self.where else "")


class Crew:
    """Engines that live.

    Args:
        trainers: see `Berths`.

    Attributes:
        members: by number. On ranks other than 0 those of the last `restore` that this rank has not seen die.
        causes: of all deaths that this rank knows of, in order.
    """

    def __init__(self, plan: ServerPlan, options: RemoteOptions, ranks: Ranks, trainers: Mapping[str, int]) -> None:
        self.members: dict[int, Member] = {}
        self.causes: list[str] = []
        self._plan, self._options, self._ranks, self._trainers = plan, options, ranks, trainers
        self._patience = debugging.patience(options.start_deadline)
        self._seen_dying: dict[int, str] = {}  # since the last restore
        self._berths: Berths | None = None
        self._starting: dict[Any, Member] = {}  # by what their start will return
        self._given_up: set[int] = set()  # replicas
        self._numbers = itertools.count()
        self._replaced = 0

    @property
    def owner(self) -> bool:
        """Whether this process starts and ends engines."""
        return self._ranks.rank == 0

    def lose(self, number: int, cause: str) -> None:
        """An engine turned out to be dead, or has to be. Rank 0 starts to replace it at once, in the background."""
        member = self.members.pop(number, None)
        if member is None:
            return
        self.causes.append(f"{member} died: {cause}")
        _say(f"{self.causes[-1]}")
        if self.owner:
            self._end(member)
            if self._replaced < self._options.restarts:
                self._replaced += 1
                self._launch(member.replica)
        else:
            self._seen_dying[number] = cause

    def restore(self) -> None:
        """Replace all that died, so that every rank holds the same living engines. Collective.

        Raises:
            PlacementError, ConfigError: there is no place for them.
            EngineError: none lives and none can be started, or more died than may be replaced.
        """
        seen = self._ranks.gather(dict(self._seen_dying))
        found: dict[int, Member] | Exception | None = None
        if self.owner:
            try:
                for theirs in seen:
                    for number, cause in theirs.items():
                        self.lose(number, cause)
                found = self._complete()
            except Exception as error:  # whatever it is, the other ranks wait for it
                found = error if isinstance(error, HybridError) else EngineError(brief(error))
        told: Any = self._ranks.gather(found)[0]
        if isinstance(told, Exception):
            raise told
        self.members = dict(told)
        self._seen_dying.clear()

    def close(self) -> None:
        """End all engines and give their places back."""
        import ray

        members, self.members = list(self.members.values()), {}
        if self.owner and ray.is_initialized():
            closing = [member.handle.close.remote() for member in members]
            if closing:
                ray.wait(closing, num_returns=len(closing), timeout=CLOSE_SECONDS)
            for member in [*members, *self._starting.values()]:
                self._end(member)
            if self._berths is not None:
                self._berths.close()
        self._berths, self._starting = None, {}

    # --- rank 0 -----------------------------------------------------------------------------------------------------

    def _complete(self) -> dict[int, Member]:
        first = self._berths is None
        if self._berths is None:
            self._berths = Berths(self._plan, self._options, self._trainers)
            for replica in range(self._options.replicas):
                self._launch(replica)
        self._examine()
        try:
            self._await()
        except HybridError as error:
            if first or not self.members:
                raise
            _say(f"{error} The run goes on with {len(self.members)} of {self._options.replicas} engines.")
        if not self.members:
            raise EngineError(f"No remote engine is left: {listed(self.causes, 3)}")
        return dict(sorted(self.members.items()))

    def _examine(self) -> None:
        """Find those that died while nobody sampled from them."""
        import ray

        asked = {member.handle.check.remote(): member for member in self.members.values()}
        if not asked:
            return
        _, late = ray.wait(list(asked), num_returns=len(asked), timeout=timeout(debugging.patience(CHECK_SECONDS)))
        for reference, member in asked.items():
            if reference in late:
                self.lose(member.number, f"it did not answer for {CHECK_SECONDS:g} s")
                continue
            try:
                ray.get(reference)
            except (ray.exceptions.RayError, HybridError) as error:
                self.lose(member.number, brief(error))

    def _launch(self, replica: int) -> None:
        import ray

        if self._berths is None or replica in self._given_up:
            return
        number = next(self._numbers)
        shipment = packed(
            self._plan, "What the engines are built from", "Leave out of engine_args what cannot be sent."
        )
        actors: Any = ray.remote(EngineActor)
        handle = actors.options(**self._berths.options(replica)).remote(shipment, self._berths.gpus(replica))
        self._starting[handle.start.remote()] = Member(number, replica, handle)

    def _await(self) -> None:
        """Wait until all that were launched run.

        Raises:
            EngineError: names one that did not start; it will not be tried again.
        """
        import ray

        starting, self._starting = self._starting, {}
        _, late = (
            ray.wait(list(starting), num_returns=len(starting), timeout=timeout(self._patience))
            if starting
            else ([], [])
        )
        failure: tuple[str, BaseException | None] | None = None
        for reference, member in starting.items():
            try:
                if reference in late:
                    raise TimeoutError(f"it did not start within {self._patience:g} s. Raise start_deadline=.")
                where = ray.get(reference)
                self.members[member.number] = Member(member.number, member.replica, member.handle, where)
            except (ray.exceptions.RayError, HybridError, TimeoutError) as error:
                reason = str(error) if isinstance(error, TimeoutError) else brief(error)
                failure = failure or (f"Remote engine {member.replica} did not start: {reason}", error)
                self._given_up.add(member.replica)
                self._end(member)
        if failure is not None:
            raise EngineError(failure[0]) from failure[1]

    @staticmethod
    def _end(member: Member) -> None:
        import ray

        ray.kill(member.handle)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
