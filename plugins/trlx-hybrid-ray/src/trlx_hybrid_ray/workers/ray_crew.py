"""A group's actors: started, called, given up."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakSet

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from trlx_hybrid.errors import listed

from .dispatch import Deal
from .failure import Call, DeadlineError, Home, WorkerDiedError, WorkerError, refuse
from .fan_out import Branch, branches
from .future import Answers, left
from .ray_answers import RayAnswers
from .register import Rule, timeout
from .relay import Relay
from .relayed_answers import RelayedAnswers
from .sending import sent

CLOSE_SECONDS = 5.0


class RayCrew:
    """Actors, called directly, or through a relay on each node where they are many.

    Args:
        worker: name of their class.
        handles: by rank; the crew keeps them, and with them the actors.
    """

    def __init__(self, worker: str, handles: Sequence[Any]) -> None:
        self._worker, self.handles = worker, list(handles)
        self._methods: dict[str, list[Any]] = {}
        self._relays: dict[Branch, Any] = {}
        self._open: WeakSet[Any] = WeakSet()
        self.over = False
        self._tickets = 0
        self.homes: Sequence[Home] = ()
        self.lost: WorkerDiedError | None = None

    def start(self, seconds: float) -> None:
        """See `Crew`. Finds out where they run, too."""
        until, ranks = time.monotonic() + seconds, range(len(self.handles))
        homes = [handle.__trlx_home__.remote() for handle in self.handles]
        built = [handle.__trlx_built__.remote() for handle in self.handles]
        try:
            self.homes = RayAnswers(self, Call(self._worker, "__init__", ranks, ()), homes, None).all(seconds)
        except DeadlineError as error:
            resources = ray.available_resources()  # type: ignore[no-untyped-call]
            free = {name: resources.get(name, 0.0) for name in ("CPU", "GPU")}
            error.add_note(f"Free in the cluster: {free}. Workers wait where their pool asks for more than there is.")
            raise
        RayAnswers(self, Call(self._worker, "__init__", ranks, self.homes), built, None).all(left(until))
        found = branches([home.node for home in self.homes])
        if found:
            self.relay(found, left(until))

    def relay(self, found: Sequence[Branch], seconds: float, *, pinned: bool = True) -> None:
        """From now on, call workers through a relay for each branch; `pinned` to its node."""
        actors = ray.remote(Relay)
        for branch in found:
            where = NodeAffinitySchedulingStrategy(branch.node, soft=False) if pinned else "DEFAULT"
            workers = {rank: self.handles[rank] for rank in branch.ranks}
            self._relays[branch] = actors.options(num_cpus=0, scheduling_strategy=where).remote(workers)
        ready = [relay.__ray_ready__.remote() for relay in self._relays.values()]
        try:
            ray.get(ready, timeout=timeout(seconds))
        except GetTimeoutError:
            nodes = listed([branch.node[:12] for branch in found])
            message = f"The relays of {self._worker} on nodes {nodes} did not start in time. Raise `start_deadline`."
            raise DeadlineError(message, rank=found[0].ranks[0], method="__init__", node=found[0].node) from None

    def check(self) -> None:
        """See `Crew`."""
        refuse(self._worker, self)

    def takes(self, answers: Answers) -> bool:
        """See `Crew`. Not through relays: which call a failed reference is of would be lost on the way."""
        return isinstance(answers, RayAnswers) and not self._relays

    def submit(
        self,
        rule: Rule,
        deal: Deal,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        call: Call,
        upstream: Answers | None,
    ) -> Answers:
        """See `Crew`."""
        answers: Answers
        if self._relays:
            self._tickets += 1
            answers = RelayedAnswers(self, call, self._relays, self._tickets, rule, deal, args, kwargs)
        else:
            methods = self._methods.get(rule.name)
            if methods is None:
                methods = self._methods[rule.name] = [getattr(handle, rule.entry).remote for handle in self.handles]
            called = methods if len(deal.ranks) == len(methods) else [methods[rank] for rank in deal.ranks]
            answers = RayAnswers(self, call, sent(called, deal, args, kwargs), upstream)
        self._open.add(answers)
        return answers

    def lose(self, error: WorkerError) -> WorkerError:
        """Note what went wrong. Where a worker died, what waits in the queues of the others is taken out of them."""
        if isinstance(error, WorkerDiedError) and self.lost is None:
            self.lost = error
            for answers in list(self._open):
                answers.cancel()
        return error

    def close(self, at_once: bool) -> None:
        """See `Crew`."""
        if self.over or not ray.is_initialized():
            self.over = True
            return
        self.over = True
        actors = [*self.handles, *self._relays.values()]
        if not at_once and self.lost is None:
            ends = [handle.__ray_terminate__.remote() for handle in self.handles]
            ray.wait(ends, num_returns=len(ends), timeout=CLOSE_SECONDS)
        for actor in actors:
            with contextlib.suppress(RayError, ValueError):
                ray.kill(actor)
        self.handles, self._methods, self._relays = [], {}, {}
