"""Where tools run: in threads, in processes, in the trainer's thread, or on its event loop."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import logging
import math
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from trlx_hybrid.answers import as_content
from trlx_hybrid.errors import ConfigError, did_you_mean
from trlx_hybrid.excerpt import excerpt

from ..loop import CallTool, Outcome
from ..options import Mode, MultiTurnOptions
from .event_loop import DaemonLoop, gathered
from .processes import ProcessWorkers
from .threads import ThreadWorkers, ToolCall, performed

logger = logging.getLogger(__name__)

GRACE = 10.0  # seconds after its deadline in which an event loop should have said so
BOUND_TO_A_THREAD = (  # what libraries raise in a thread that is not theirs
    ("signal", "only works in main thread"),  # signal.signal, and so every timeout by signal.alarm
    ("asyncio", "only works in main thread"),  # loop.add_signal_handler
    ("asyncio", "no current event loop in thread"),  # asyncio.get_event_loop
    ("sqlite3", "can only be used in that same thread"),
    ("greenlet", "cannot switch to a different thread"),  # under Playwright's synchronous interface
    ("tkinter", "main thread is not in main loop"),
)


@dataclass(slots=True)
class ToolUsage:
    """What the calls of one tool took, in seconds of wall time and of processor time; and how many never returned."""

    calls: int = 0
    seconds: float = 0.0
    slowest: float = 0.0
    cpu_seconds: float = 0.0
    cut_off: int = 0

    def add(self, outcome: Outcome) -> None:
        """Count one call."""
        self.calls += 1
        self.seconds += outcome.seconds
        self.slowest = max(self.slowest, outcome.seconds)
        self.cpu_seconds += outcome.cpu_seconds
        self.cut_off += outcome.by_tool


class ToolRunner:
    """Runs the tools of one trainer; threads and processes stay for the next batch.

    Attributes:
        usage: per tool, since it was last cleared.
        environment_methods: names in it that cannot be moved to a process; each with the name that modes know it by.
    """

    def __init__(self, options: MultiTurnOptions) -> None:
        self._options = options
        self._threads = ThreadWorkers(options.max_tools, options.max_hung)
        self._processes = ProcessWorkers(options.max_processes, options.max_answer)
        self._own_loop: DaemonLoop | None = None
        self.usage: dict[str, ToolUsage] = defaultdict(ToolUsage)
        self.environment_methods: dict[str, str] = {}
        self._awaited: dict[object, tuple[str, float]] = {}  # on an event loop now: names, and since when
        self._under_way = 0  # coroutines among them
        self._slots: dict[asyncio.AbstractEventLoop, asyncio.Semaphore] = {}
        self._stuck: list[tuple[ToolCall, object]] = []  # calls that hang in a thread, and whose method it is
        self._told: set[str] = set()  # names of which a call was cut off
        self._moved: set[str] = set()  # to the trainer's thread, for they cannot work in another

    def mode(self, name: str) -> Mode:
        """Where the synchronous tool of this name runs."""
        return "main" if name in self._moved else self._options.tool_modes.get(name, self._options.tools)

    def beside_the_engine(self, name: str) -> bool:
        """Whether calls that `usage` has under this name run in threads of this process."""
        mode = self.mode(self.environment_methods.get(name, name))
        return mode == "thread" or (mode == "process" and name in self.environment_methods)

    def check(
        self,
        tools: Mapping[str, Callable[..., Any]],
        others: Mapping[str, Callable[..., Any]] = MappingProxyType({}),
        asynchronous: Collection[str] = (),
    ) -> None:
        """Refuse, before anything is sampled, what cannot run where it is to run.

        Args:
            tools: the synchronous ones of this batch, by name.
            others: synchronous ones, some of which only rows of other batches have.
            asynchronous: names of the asynchronous ones.

        Raises:
            ConfigError: a tool that cannot be sent to a process, or a mode for what is no synchronous tool.
        """
        names, modes = {**others, **tools}, self._options.tool_modes
        for name, tool in names.items():
            wanted = self.mode(name) == "process" and (name in tools or name in modes)
            if wanted and (reason := self._processes.refuses(tool)) is not None:
                raise ConfigError(f"rollout_options: {reason}")
        awaited = sorted({*asynchronous} - names.keys())
        for name in modes:
            if name in names:
                continue
            elsewhere = f" Asynchronous ones, which run on the event loop: {', '.join(awaited)}." if awaited else ""
            raise ConfigError(
                f"rollout_options.tool_modes names {name!r}, which is no synchronous tool of this run."
                f"{did_you_mean(name, names)} Tools: {', '.join(sorted(names)) or 'none'}.{elsewhere}"
            )

    def shown(self, result: Any) -> Any:
        """What the model is shown of a tool's result."""
        return self.cut(as_content(result))

    def cut(self, answer: Any) -> Any:
        """A text or a list as it is, or the beginning of one that is too long, with a note."""
        return excerpt(answer, self._options.max_answer)

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
        early: Callable[[Any], None] | None = None,
        owner: object = None,
    ) -> Outcome:
        """One synchronous call; the outcome's value is what the model is to be shown.

        Args:
            early: given the value in the tool's own thread, while the engine steps; not from a process.
            owner: the environment whose method it is: no other of its methods is called while a call of one hangs.
        """
        if owner is not None:
            self.environment_methods[name] = name
        self._stuck = [(call, stuck) for call, stuck in self._stuck if self._threads.hangs(call)]
        if owner is not None and any(stuck is owner for _, stuck in self._stuck):
            return Outcome(error=RuntimeError(f"{name} was not called: an earlier call is still running."))

        def shown() -> Any:
            value = self.shown(tool(**arguments))
            if early is not None:
                early(value)
            return value

        def start(done: Callable[[Outcome], None]) -> Callable[[str], None]:
            call = self._processes.submit(tool, arguments, done, self._options.tool_timeout, name=name)
            return functools.partial(self._processes.abandon, call)

        if self.mode(name) == "process":
            outcome = await CallTool(name, start)
        else:
            outcome = await self._in_a_thread(name, shown, name, owner)
        self._count(name, outcome)
        return outcome

    async def _in_a_thread(self, name: str, function: Callable[[], Any], kind: str, owner: object = None) -> Outcome:
        """One call in a thread of the pool, or in the trainer's own where `kind` runs there.

        What raises that it belongs to another thread is called again in the trainer's thread, where TRL runs every
        tool, and all of its kind stay there.

        Args:
            kind: what modes call it: its name, or that of environments like its own.
            owner: the environment whose method it is, to be left alone while this call hangs.

        Raises:
            ConfigError: it cannot work there either.
        """
        calls: list[ToolCall] = []

        def start(done: Callable[[Outcome], None]) -> Callable[[str], None]:
            calls.append(self._threads.submit(function, {}, done, self._options.tool_timeout, name=name))
            return functools.partial(self._threads.abandon, calls[0])

        here = CallTool(name, functools.partial(call_here, function))
        if self.mode(kind) == "main":  # where TRL runs it: what it raises there is its own
            return await here
        outcome = await CallTool(name, start)
        if outcome.by_tool and owner is not None:
            self._stuck.append((calls[0], owner))
        if (reason := bound_to_a_thread(outcome.error)) is None:
            return outcome
        if kind not in self._moved:
            self._moved.add(kind)
            logger.warning(
                "%r cannot run in a thread beside the engine: %s This call is made again, and from now on it runs in "
                "the trainer's thread, where the engine waits for it, as if rollout_options={'tool_modes': {%r: "
                "'main'}} were given.",
                kind,
                reason,
                kind,
            )
        outcome = await here
        if (reason := bound_to_a_thread(outcome.error)) is not None:
            raise ConfigError(
                f"{name!r} works neither in a thread of its own nor in the trainer's: {reason} Something that it uses "
                "was made in one thread and is used in another. Make it where it is used; or let everything run in "
                "the trainer's thread from the first call on, rollout_options={'tools': 'main'}."
            ) from outcome.error
        return outcome

    async def together(
        self,
        coroutines: Sequence[tuple[str, Coroutine[Any, Any, Any]]],
        loop: asyncio.AbstractEventLoop | None,
        shown: Callable[[Any], Any] | None = None,
    ) -> list[Outcome]:
        """Asynchronous calls at once; on `loop`, where the trainer has one. `shown` makes values of results."""
        shown = shown or self.shown
        if loop is None:
            self._own_loop = self._own_loop or DaemonLoop()
            loop = self._own_loop.loop
        limit, timeout = self._options.max_tools, self._options.tool_timeout
        slots = self._slots.setdefault(loop, asyncio.Semaphore(limit))
        names, ticket = ", ".join(name for name, _ in coroutines), object()
        call = CallTool(names, lambda done: gathered(coroutines, timeout, shown, done, loop, slots))
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
        self.environment_methods[name] = kind
        if inspect.iscoroutinefunction(method):
            try:
                coroutine = method(*arguments)
            except Exception as error:  # it does not take these arguments
                return Outcome(error=error)
            return (await self.together([(name, coroutine)], loop, lambda value: value))[0]
        outcome = await self._in_a_thread(name, functools.partial(method, *arguments), kind)
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


def call_here(function: Callable[[], Any], done: Callable[[Outcome], None]) -> Callable[[str], None]:
    """A call in the trainer's thread. SystemExit and KeyboardInterrupt are the user's: they go through."""
    done(performed(function, Exception))
    return lambda reason: None


def bound_to_a_thread(error: BaseException | None) -> str | None:
    """What a library says that raised this, or what led to it, for being in the wrong thread.

    It must have come through files only, or through where the tool was typed in: other code without a file is what the
    tool executes, as code that the model wrote, and the error is that code's.
    """
    seen: set[int] = set()
    own = next((file for module, file in _frames(error) if module != __package__.partition(".")[0]), "")
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        frames = _frames(error)
        library = type(error).__module__  # of what is raised in C, without a frame
        if library == "builtins" and frames:
            library = frames[-1][0]
        executed = any(file.startswith("<") and not file.startswith("<frozen ") for _, file in frames if file != own)
        with contextlib.suppress(Exception):  # its text is anybody's code
            text = str(error)
            if not executed and any(library == by and words in text for by, words in BOUND_TO_A_THREAD):
                return f"{type(error).__name__}: {text.rstrip('.')}."
        error = error.__cause__ or error.__context__
    return None


def _frames(error: BaseException | None) -> list[tuple[str, str]]:
    """Package and file of each frame that it came through; the one that raised it is the last."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__ if error is not None else None)]
    return [(str(frame.f_globals.get("__name__")).partition(".")[0], frame.f_code.co_filename) for frame in frames]
