"""Where tools run: in threads, in processes, in the trainer's thread, or on its event loop."""

from __future__ import annotations

import asyncio
import difflib
import functools
import inspect
import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from trlx_hybrid.errors import ConfigError

from .event_loop import DaemonLoop, gathered
from .job import Job
from .main_thread import bound_to_a_thread, call_here
from .options import Mode, MultiTurnOptions
from .outcome import Outcome
from .processes import ProcessWorkers
from .showing import as_shown, shown_call, shown_outcome
from .threads import ThreadWorkers
from .usage import Usage
from .waits import Call

logger = logging.getLogger(__name__)

GRACE = 10.0  # seconds after its deadline in which an event loop should have said so


class Runners:
    """Runs the tools of one trainer; threads and processes stay for the next batch.

    Attributes:
        usage: per tool, since it was last cleared.
        rooted: names in it that cannot be moved to a process, methods of environments; each with its name in options.
    """

    def __init__(self, options: MultiTurnOptions) -> None:
        self._options = options
        self._threads = ThreadWorkers(options.max_tools, options.max_hung)
        self._processes = ProcessWorkers(options.max_processes)
        self._own_loop: DaemonLoop | None = None
        self.usage: dict[str, Usage] = defaultdict(Usage)
        self.rooted: dict[str, str] = {}
        self._awaited: dict[object, tuple[str, float]] = {}  # on an event loop now: names, and since when
        self._under_way = 0  # coroutines among them
        self._slots: dict[asyncio.AbstractEventLoop, asyncio.Semaphore] = {}
        self._stuck: list[tuple[Job, object]] = []  # calls that hang in a thread, and the object whose method it is
        self._told: set[str] = set()  # names of which a call was cut off
        self._moved: set[str] = set()  # to the trainer's thread, for they cannot work in another

    def mode(self, name: str) -> Mode:
        """Where the synchronous tool of this name runs."""
        return "main" if name in self._moved else self._options.tool_modes.get(name, self._options.tools)

    def beside_the_engine(self, name: str) -> bool:
        """Whether calls that `usage` has under this name run in threads of this process."""
        mode = self.mode(self.rooted.get(name, name))
        return mode == "thread" or (mode == "process" and name in self.rooted)

    def check(
        self,
        tools: Iterable[tuple[str, Callable[..., Any]]],
        asynchronous: Iterable[str] = (),
        others: Mapping[str, Callable[..., Any]] = MappingProxyType({}),
    ) -> None:
        """Refuse, before anything is sampled, what cannot run where it is to run.

        Args:
            tools: the synchronous ones, by name.
            asynchronous: names of the asynchronous ones.
            others: synchronous ones, some of which only rows of other batches have.

        Raises:
            ConfigError: a tool that cannot be sent to a process, or a mode for what is no synchronous tool.
        """
        names: set[str] = set()
        named = ((name, tool) for name, tool in others.items() if name in self._options.tool_modes)
        for name, tool in (*tools, *named):
            names.add(name)
            reason = self._processes.refuses(tool) if self.mode(name) == "process" else None
            if reason is not None:
                raise ConfigError(f"rollout_options: {reason}")
        names.update(others)
        awaited = sorted(set(asynchronous) - names)
        for name in self._options.tool_modes:
            if name in names:
                continue
            close = difflib.get_close_matches(name, names, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            elsewhere = f" Asynchronous ones, which run on the event loop: {', '.join(awaited)}." if awaited else ""
            raise ConfigError(
                f"rollout_options.tool_modes names {name!r}, which is no synchronous tool of this run.{hint} "
                f"Tools: {', '.join(sorted(names)) or 'none'}.{elsewhere}"
            )

    @property
    def busy(self) -> int:
        """Calls that run in threads of this process now."""
        return self._threads.busy

    def running(self) -> list[tuple[str, float]]:
        """Name and seconds of each call that runs now, or waits for its turn on an event loop; the longest first."""
        now = time.monotonic()
        awaited = [(name, now - since) for name, since in list(self._awaited.values())]
        return sorted([*self._threads.running(), *self._processes.running(), *awaited], key=lambda call: -call[1])

    async def call(
        self,
        name: str,
        tool: Callable[..., Any],
        arguments: Mapping[str, Any],
        ahead: Callable[[str, Any], None] = lambda name, value: None,
        owner: object = None,
    ) -> Outcome:
        """One synchronous call; the outcome's value is what the model is to be shown.

        Args:
            ahead: given name and value in the tool's own thread, if it has one, while the engine steps.
            owner: the environment whose method it is: no other of its methods is called while a call of one hangs.
        """
        if owner is not None:
            self.rooted[name] = name
        shown = functools.partial(shown_call, tool, arguments)
        self._stuck = [(job, stuck) for job, stuck in self._stuck if self._threads.hangs(job)]
        if owner is not None and any(stuck is owner for _, stuck in self._stuck):
            return Outcome(error=RuntimeError(f"{name} was not called: an earlier call is still running."))
        if self.mode(name) == "process":
            timeout = self._options.tool_timeout

            def start(done: Callable[[Outcome], None]) -> Callable[[str], None]:
                job = self._processes.submit(tool, arguments, lambda o: done(shown_outcome(o)), timeout, name=name)
                return lambda reason: self._processes.abandon(job, reason)

            outcome = await Call(name, start)
        else:
            first = functools.partial(shown, functools.partial(ahead, name))
            outcome = await self._in_a_thread(name, first, shown, owner=owner)
        self._count(name, outcome)
        return outcome

    async def _in_a_thread(
        self,
        name: str,
        function: Callable[[], Any],
        again: Callable[[], Any],
        moved: str | None = None,
        owner: object = None,
    ) -> Outcome:
        """One call in a thread of the pool, or in the trainer's own where `name` runs there.

        What raises that it belongs to another thread is called again, by `again`, in the trainer's thread, where TRL
        runs every tool, and stays there.

        Args:
            moved: what moves with it; `name` alone by default.
            owner: the environment whose method it is, to be left alone while this call hangs.

        Raises:
            ConfigError: it cannot work there either.
        """

        def start(done: Callable[[Outcome], None]) -> Callable[[str], None]:
            job = self._threads.submit(function, {}, done, self._options.tool_timeout, name=name)
            jobs.append(job)
            return lambda reason: self._threads.abandon(job, reason)

        def start_here(done: Callable[[Outcome], None]) -> Callable[[str], None]:
            return call_here(again, done)

        jobs: list[Job] = []
        if self.mode(moved or name) == "main":  # where TRL runs it: what it raises there is its own
            return await Call(name, start_here)
        outcome = await Call(name, start)
        if outcome.by_tool and owner is not None:
            self._stuck.append((jobs[0], owner))
        if (reason := bound_to_a_thread(outcome.error)) is None:
            return outcome
        self._move(moved or name, reason)
        outcome = await Call(name, start_here)
        if (reason := bound_to_a_thread(outcome.error)) is not None:
            raise ConfigError(
                f"{name!r} works neither in a thread of its own nor in the trainer's: {reason} Something that it uses "
                "was made in one thread and is used in another. Make it where it is used; or let everything run in "
                "the trainer's thread from the first call on, rollout_options={'tools': 'main'}."
            ) from outcome.error
        return outcome

    def _move(self, name: str, reason: str) -> None:
        """To the trainer's thread, for good."""
        if name not in self._moved:
            self._moved.add(name)
            logger.warning(
                "%r cannot run in a thread beside the engine: %s This call is made again, and from now on it runs in "
                "the trainer's thread, where the engine waits for it, as if rollout_options={'tool_modes': {%r: "
                "'main'}} were given.",
                name,
                reason,
                name,
            )

    async def together(
        self,
        coroutines: Sequence[tuple[str, Coroutine[Any, Any, Any]]],
        loop: asyncio.AbstractEventLoop | None,
        shown: Callable[[Any], Any] | None = None,
    ) -> list[Outcome]:
        """Asynchronous calls at once; on `loop`, where the trainer has one. `shown` makes values of results."""
        shown = shown or as_shown
        if loop is None:
            self._own_loop = self._own_loop or DaemonLoop()
            loop = self._own_loop.loop
        limit, timeout = self._options.max_tools, self._options.tool_timeout
        slots = self._slots.setdefault(loop, asyncio.Semaphore(limit))
        names, ticket = ", ".join(name for name, _ in coroutines), object()
        call = Call(names, lambda done: gathered(coroutines, timeout, shown, done, loop, slots))
        self._under_way += len(coroutines)
        # Turns come in order, so those that are under way take at most so many of a call's time, with these the last.
        turns = math.ceil(self._under_way / limit)
        call.expires = time.monotonic() + turns * timeout + GRACE
        self._awaited[ticket] = names, time.monotonic()
        try:
            outcome = await call
        finally:
            del self._awaited[ticket]
            self._under_way -= len(coroutines)
        outcomes: list[Outcome] = [outcome] * len(coroutines) if outcome.lost is not None else outcome.value
        for (name, _), each in zip(coroutines, outcomes, strict=True):
            self._count(name, each)
        return outcomes

    async def ask(
        self,
        kind: str,
        name: str,
        method: Callable[..., Any],
        arguments: tuple[Any, ...],
        loop: asyncio.AbstractEventLoop | None,
    ) -> Outcome:
        """One call of an environment's method; the outcome's value is what it returned, as it is.

        A coroutine function runs on the event loop. Any other runs in a thread, or in the trainer's where `kind` does:
        an environment keeps its state in this process, so "process" is not for it.

        Args:
            kind: what messages and modes call environments like this one.
        """
        self.rooted[name] = kind
        if inspect.iscoroutinefunction(method):
            try:
                coroutine = method(*arguments)
            except Exception as error:  # it does not take these arguments
                return Outcome(error=error)
            return (await self.together([(name, coroutine)], loop, lambda value: value))[0]
        function = functools.partial(method, *arguments)
        outcome = await self._in_a_thread(name, function, function, kind)
        self._count(name, outcome)
        return outcome

    def _count(self, name: str, outcome: Outcome) -> None:
        self.usage[name].add(outcome)
        if outcome.by_tool and name not in self._told:
            self._told.add(name)
            logger.warning("%s Such calls are counted as hybrid/tools/cut_off from here on.", outcome.lost)

    def close(self) -> None:
        """End threads and processes; what hangs in a thread stays, and ends with the interpreter."""
        self._threads.close()
        self._processes.close()
        if self._own_loop is not None:
            self._own_loop.close()
