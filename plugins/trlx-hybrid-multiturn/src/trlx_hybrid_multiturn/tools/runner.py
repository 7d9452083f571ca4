"""The runner of tools: in threads, in processes, in the trainer's thread, or on its event loop."""

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
from threading import Event
from types import MappingProxyType
from typing import Any, TypeVar

from trlx_hybrid.episodes.answers import as_content, excerpt
from trlx_hybrid.errors import ConfigError, did_you_mean

from ..loop import CallTool, Outcome, Tool, ToolCoroutine
from ..options import Mode, MultiTurnOptions
from .event_loop import DaemonLoop, gathered
from .processes import ProcessWorkers
from .threads import CLOSE_SECONDS, ThreadWorkers, ToolCall, performed

logger = logging.getLogger(__name__)

Content = TypeVar("Content")

GRACE = 10.0  # seconds after a deadline in which an event loop should have reported it
BOUND_TO_A_THREAD = (  # errors that libraries raise in the wrong thread: module, text
    ("signal", "only works in main thread"),  # signal.signal, and so every timeout by signal.alarm
    ("asyncio", "only works in main thread"),  # loop.add_signal_handler
    ("asyncio", "no current event loop in thread"),  # asyncio.get_event_loop
    ("sqlite3", "can only be used in that same thread"),
    ("greenlet", "cannot switch to a different thread"),  # under Playwright's synchronous interface
    ("tkinter", "main thread is not in main loop"),
)


@dataclass(slots=True)
class ToolUsage:
    """Counters of one tool's calls.

    Attributes:
        calls: the number of calls.
        seconds: wall time of all calls, in seconds.
        slowest: wall time of the longest call, in seconds.
        cpu_seconds: processor time of all calls that ran in threads, in seconds.
        cut_off: the number of calls that have no result by the tool's own fault: it took too long, or ended its
            process.
    """

    calls: int = 0
    seconds: float = 0.0
    slowest: float = 0.0
    cpu_seconds: float = 0.0
    cut_off: int = 0

    def add(self, outcome: Outcome) -> None:
        """Count one call.

        Args:
            outcome: the call's outcome.
        """
        self.calls += 1
        self.seconds += outcome.seconds
        self.slowest = max(self.slowest, outcome.seconds)
        self.cpu_seconds += outcome.cpu_seconds
        self.cut_off += outcome.by_tool


class ToolRunner:
    """Runs the tools and the environments' methods of one trainer. Its threads and processes are kept from batch to
    batch.

    Args:
        options: the options of the rollout.

    Attributes:
        usage: counters of the calls by the tool's name, since the dict was last cleared.
        environment_methods: a dict of the environments' methods that were called. A key is the name under which `usage`
            counts a method. The value is the name by which the method is looked up in the option `tool_modes`. These
            methods run in a thread of this process, never in another process.
    """

    def __init__(self, options: MultiTurnOptions) -> None:
        self._options = options
        self._threads = ThreadWorkers(options.max_tools, options.max_hung)
        self._processes = ProcessWorkers(options.max_processes, options.max_answer)
        self._own_loop: DaemonLoop | None = None
        self.usage: dict[str, ToolUsage] = defaultdict(ToolUsage)
        self.environment_methods: dict[str, str] = {}
        self._awaited: dict[object, tuple[str, float]] = {}  # calls on an event loop now: names, and since when
        self._under_way = 0  # coroutines in `_awaited`
        self._slots: dict[asyncio.AbstractEventLoop, asyncio.Semaphore] = {}
        self._stuck: list[tuple[ToolCall, object]] = []  # calls that hang in a thread, and their environments
        self._told: set[str] = set()  # names that were warned of, since a call was cut off
        self._moved: set[str] = set()  # names moved to the trainer's thread, as they cannot work in another
        self._left: list[tuple[str, Event]] = []  # calls of `leave`, and what is set when they are over

    def mode(self, name: str) -> Mode:
        """Return where a synchronous tool runs: "thread" (of this process), "process" or "main" (the trainer's thread).

        Args:
            name: the tool's name.
        """
        return "main" if name in self._moved else self._options.tool_modes.get(name, self._options.tools)

    def beside_the_engine(self, name: str) -> bool:
        """Return whether a tool's calls run in threads of this process, where they can slow down the engine.

        Args:
            name: the tool's name in `usage`.
        """
        mode = self.mode(self.environment_methods.get(name, name))
        return mode == "thread" or (mode == "process" and name in self.environment_methods)

    def check(
        self,
        tools: Mapping[str, Tool],
        others: Mapping[str, Tool] = MappingProxyType({}),
        asynchronous: Collection[str] = (),
    ) -> None:
        """Raise ConfigError for tools that cannot run where they are configured to run, before anything is sampled.

        Args:
            tools: the synchronous tools of this batch, by name.
            others: the synchronous tools of the whole run, by name, so that `tool_modes` may name them, too.
            asynchronous: names of the asynchronous tools.

        Raises:
            ConfigError: a tool cannot be sent to a process, or `tool_modes` names something that is not a synchronous
                tool.
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

    def shown(self, result: object) -> object:
        """Return a tool's result as the content of a chat message: a text or a list of content blocks, shortened if it
        is too long."""
        return self.cut(as_content(result))

    def cut(self, answer: Content) -> Content:
        """Shorten a text or a list of content blocks that is longer than the option `max_answer`, with a note that says
        so; return other contents unchanged."""
        kept: Content = excerpt(answer, self._options.max_answer)
        return kept

    @property
    def busy(self) -> int:
        """The number of calls that run in threads of this process now."""
        return self._threads.busy

    def running(self) -> list[tuple[str, float]]:
        """Return (name, seconds so far) of each call that is running or waits on an event loop, the longest first."""
        now = time.monotonic()
        awaited = [(name, now - since) for name, since in list(self._awaited.values())]
        return sorted([*self._threads.running(), *self._processes.running(), *awaited], key=lambda call: -call[1])

    async def call(
        self,
        name: str,
        tool: Tool,
        arguments: Mapping[str, object],
        early: Callable[[object], None] | None = None,
        owner: object = None,
    ) -> Outcome:
        """Make one call of a synchronous tool, and return its outcome, whose value is what the model is to be shown.

        Args:
            name: name of the tool.
            tool: the synchronous function.
            arguments: its keyword arguments.
            early: called with the outcome's value in the tool's own thread, before the call is over; not called for a
                tool that runs in a process.
            owner: the environment whose method the tool is, or None. While a call of a method of this environment
                hangs, the tool is not called, and the outcome is an error.
        """
        if owner is not None:
            self.environment_methods[name] = name
        self._stuck = [(call, stuck) for call, stuck in self._stuck if self._threads.hangs(call)]
        if owner is not None and any(stuck is owner for _, stuck in self._stuck):
            return Outcome(error=RuntimeError(f"{name} was not called: an earlier call is still running."))

        def shown() -> object:
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

    async def _in_a_thread(self, name: str, function: Callable[[], object], kind: str, owner: object = None) -> Outcome:
        """Make one call in a thread of the pool, or in the trainer's own thread if the options say "main" for `kind`.

        If the function raises an error which says that it cannot work in this thread (such as sqlite3's), it is called
        again in the trainer's thread, where TRL runs every tool. From then on all calls with this `kind` run there.

        Args:
            name: name of the tool or method, for messages.
            function: makes the call; takes no arguments.
            kind: the name to look up in `tool_modes`: the tool's name, or that of the environment's class or factory.
            owner: the environment whose method is called, or None. While this call hangs, `call` calls no method of
                it.

        Raises:
            ConfigError: the function cannot work in the trainer's thread either.
        """
        calls: list[ToolCall] = []

        def start(done: Callable[[Outcome], None]) -> Callable[[str], None]:
            calls.append(self._threads.submit(function, {}, done, self._options.tool_timeout, name=name))
            return functools.partial(self._threads.abandon, calls[0])

        here = CallTool(name, functools.partial(call_here, function))
        if self.mode(kind) == "main":  # where TRL runs it: errors there are the tool's own
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
        coroutines: Sequence[tuple[str, ToolCoroutine]],
        loop: asyncio.AbstractEventLoop | None,
        shown: Callable[[object], object] | None = None,
    ) -> list[Outcome]:
        """Make several calls of asynchronous tools at once, and return their outcomes in order when all are over.

        Args:
            coroutines: (name of the tool, coroutine of the call) for each call.
            loop: the event loop to run them on; None for a loop of this runner.
            shown: converts each result into the outcome's value; by default into what the model is shown.
        """
        shown = shown or self.shown
        if loop is None:
            self._own_loop = self._own_loop or DaemonLoop()
            loop = self._own_loop.loop
        limit, timeout = self._options.max_tools, self._options.tool_timeout
        slots = self._slots.setdefault(loop, asyncio.Semaphore(limit))
        names, ticket = ", ".join(name for name, _ in coroutines), object()
        call = CallTool(names, lambda done: gathered(coroutines, timeout, shown, done, loop, slots))
        self._under_way += len(coroutines)
        # Coroutines start in order, so those in progress, these included, take at most so many timeouts.
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
        method: Tool,
        arguments: tuple[object, ...],
        loop: asyncio.AbstractEventLoop | None,
    ) -> Outcome:
        """Make one call of an environment's method, and return its outcome, whose value is the method's result,
        unchanged.

        A coroutine function runs on the event loop. Any other function runs in a thread, or in the trainer's thread if
        the options say "main" for `kind`. "process" counts as "thread", because an environment keeps its
        state in this process.

        Args:
            kind: name of the environment's class or factory, for messages and `tool_modes`.
            name: name of the method.
            method: the method.
            arguments: its positional arguments.
            loop: the trainer's event loop, None where it has none.
        """
        self.environment_methods[name] = kind
        if inspect.iscoroutinefunction(method):
            try:
                coroutine = method(*arguments)
            except Exception as error:  # the method does not take these arguments
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

    def leave(self, name: str, call: Coroutine[CallTool, Any, None]) -> None:
        """Begin a call for whose outcome no trajectory waits. `close` waits for it. A warning is logged if it fails.

        Args:
            name: what is called, for messages.
            call: a coroutine that has not been started, and makes one call at most.
        """
        try:
            begun, over = call.send(None), Event()
        except StopIteration:  # it has nothing to call
            return

        def end(outcome: Outcome) -> None:
            try:
                call.send(outcome)
            except StopIteration:
                pass
            except Exception as error:
                logger.warning("An environment was not closed: %s", error)
            finally:
                over.set()

        self._left.append((name, over))
        begun.start(end)

    def close(self) -> None:
        """End threads and processes. A thread that hangs in a tool stays, and ends with the interpreter. Waits for the
        calls of `leave` for at most `CLOSE_SECONDS`, and logs a warning that names what was not over by then."""
        until, left = time.monotonic() + CLOSE_SECONDS, self._left
        self._left = []
        late = [name for name, over in left if not over.wait(max(0.0, until - time.monotonic()))]
        if late:
            logger.warning("%d environments were not closed: %s.", len(late), ", ".join(sorted(set(late))))
        self._threads.close()
        self._processes.close()
        if self._own_loop is not None:
            self._own_loop.close()


def call_here(function: Callable[[], object], done: Callable[[Outcome], None]) -> Callable[[str], None]:
    """Call a function in the trainer's thread, and pass on the outcome. SystemExit and KeyboardInterrupt are raised: in
    this thread they may come from the user.

    Args:
        function: makes the call; takes no arguments.
        done: called with the outcome, before this returns.

    Returns:
        A function that does nothing. `CallTool` needs a function that abandons the call, and this call is over.
    """
    done(performed(function, Exception))
    return lambda reason: None


def bound_to_a_thread(error: BaseException | None) -> str | None:
    """Return the message of an error that a library raised because it was called in the wrong thread; None for other
    errors.

    The error's causes are examined, too. None is returned for an error that passed through code without a file: the
    tool has executed this code, and the model may have written it. The tool's own code may have no file, as in an
    interactive session.

    Args:
        error: the exception that a tool raised, or None.
    """
    seen: set[int] = set()
    own = next((file for module, file in _frames(error) if module != __package__.partition(".")[0]), "")
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        frames = _frames(error)
        library = type(error).__module__  # for an error raised in C, without a frame
        if library == "builtins" and frames:
            library = frames[-1][0]
        executed = any(file.startswith("<") and not file.startswith("<frozen ") for _, file in frames if file != own)
        with contextlib.suppress(Exception):  # the error's __str__ may be any code
            text = str(error)
            if not executed and any(library == by and words in text for by, words in BOUND_TO_A_THREAD):
                return f"{type(error).__name__}: {text.rstrip('.')}."
        error = error.__cause__ or error.__context__
    return None


def _frames(error: BaseException | None) -> list[tuple[str, str]]:
    """Return (package, file) of each frame of an error's traceback; the frame that raised it comes last."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__ if error is not None else None)]
    return [(str(frame.f_globals.get("__name__")).partition(".")[0], frame.f_code.co_filename) for frame in frames]
