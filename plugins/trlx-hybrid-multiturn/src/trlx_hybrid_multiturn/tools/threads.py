"""The base class of pools that run tools, and the pool of threads. The pool of threads runs any function, but cannot
kill a function that hangs."""

from __future__ import annotations

import contextvars
import functools
import math
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from trlx_hybrid.errors import HybridError

from ..loop import Outcome, Tool

CLOSE_SECONDS = 5.0  # that `close` waits for threads that have nothing left to do


class ToolsUnavailableError(HybridError):
    """Raised where tools cannot run: too many hang, the pool is closed, or a function cannot be sent to a process."""


@dataclass(slots=True, eq=False)
class ToolCall:
    """A call of a function, with the callback for its outcome. Made by `ToolWorkers.submit`.

    Attributes:
        function: a synchronous callable.
        arguments: its keyword arguments.
        done: called with the outcome, once, in whatever thread knows it first.
        deadline: seconds the call may take from its start; `math.inf` for no limit.
        name: name of the tool in messages.
        context: copy of the submitter's context variables, as `asyncio.to_thread` makes it.
        taken: `time.monotonic()` when the call's time began; None while the call waits for a thread.
        expires: `time.monotonic()` at the call's deadline; `math.inf` while it has none.
        late: the message if the call passes its deadline, in words that follow "tool 'name'".
        by_tool: whether the tool itself would be to blame if the call passes its deadline.
        settled: whether the outcome is known and was reported.
    """

    function: Tool
    arguments: Mapping[str, object]
    done: Callable[[Outcome], None]
    deadline: float
    name: str
    context: contextvars.Context = field(default_factory=contextvars.copy_context)
    taken: float | None = None
    expires: float = math.inf
    late: str = ""
    by_tool: bool = False
    settled: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def seconds(self) -> float:
        """Return the wall time since the call began, in seconds; 0 while the call waits for a thread."""
        return 0.0 if self.taken is None else time.monotonic() - self.taken

    def settle(self, outcome: Outcome) -> None:
        """Report the call's outcome. Only the first outcome counts; later ones are dropped."""
        with self._lock:
            if self.settled:
                return
            self.settled = True
        self.done(outcome)

    def lose(self, reason: str, *, by_tool: bool = False) -> None:
        """Report the call as lost, which means that its result will never come.

        Args:
            reason: words that follow "tool 'name'" in the message.
            by_tool: whether the tool itself caused the loss.
        """
        self.settle(Outcome(lost=f"tool {self.name!r} {reason}", by_tool=by_tool, seconds=self.seconds()))


class ToolWorkers:
    """A pool of daemon threads that runs calls in the order of their submission, and gives up calls that pass their
    deadlines.

    `concurrent.futures` cannot be used, because it joins its threads when the interpreter exits: a single tool that
    hangs would keep the process alive. Subclasses decide how a call is made, and what happens to a call that has passed
    its deadline.

    Args:
        limit: the number of threads. They are started when there is work, and reused.
    """

    interrupts = False
    """True for a pool that can end a running call, as one of processes can."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._queue: deque[ToolCall] = deque()
        self._running: dict[ToolCall, threading.Thread] = {}
        self._hung: set[ToolCall] = set()  # lost calls whose threads still run them
        self._threads: set[threading.Thread] = set()  # threads that count towards `limit`
        self._idle = 0
        self._closed = False
        self._watcher: threading.Thread | None = None
        self._watch_again = threading.Condition(self._lock)
        self._watched_until = -math.inf  # when the watcher wakes by itself

    @property
    def busy(self) -> int:
        """The number of calls that run now."""
        return len(self._running)

    def running(self) -> list[tuple[str, float]]:
        """Return (name, seconds so far) of each call that is running, the longest first."""
        with self._lock:
            return sorted(((call.name, call.seconds()) for call in self._running), key=lambda call: -call[1])

    def submit(
        self,
        function: Tool,
        arguments: Mapping[str, object],
        done: Callable[[Outcome], None],
        deadline: float,
        *,
        name: str | None = None,
    ) -> ToolCall:
        """Have `function(**arguments)` called by a worker. Returns the call at once, before it has run.

        Args:
            function: a synchronous callable.
            arguments: its keyword arguments.
            done: called with the outcome exactly once: by another thread, or by the thread that abandons the call or
                closes the pool. It must be quick and thread-safe.
            deadline: seconds the call may take, counted from its start, not from its submission.
            name: name of the tool in messages; by default the function's own name.

        Raises:
            ToolsUnavailableError: the pool takes no more calls; the message says why and what to do.
        """
        name = name or str(getattr(function, "__name__", type(function).__name__))
        reason = f"{name!r} was called after its workers were closed." if self._closed else self.refuses(function, name)
        if reason is not None:
            raise ToolsUnavailableError(f"Tool {reason}")
        call = ToolCall(function, arguments, done, deadline, name)
        with self._lock:
            self._queue.append(call)
            self._staff()
        return call

    def abandon(self, call: ToolCall, reason: str) -> None:
        """Stop waiting for a call, and report it as lost. A call that is over is not affected.

        A call that has not begun never begins. A running call keeps its thread until it ends or passes its deadline,
        unless the pool can end running calls (`interrupts`).

        Args:
            call: the call.
            reason: words that follow "tool 'name'" in the message.
        """
        with self._lock, suppress(ValueError):
            self._queue.remove(call)
        call.lose(reason)  # before the interruption is taken for its cause
        with self._lock:
            self._interrupt(call)

    def close(self) -> None:
        """End all idle threads, and report waiting and running calls as lost. Safe to call twice.

        Waits for the threads for at most `CLOSE_SECONDS`.
        """
        with self._lock:
            self._closed = True
            waiting, running = list(self._queue), list(self._running)
            self._queue.clear()
            busy = set() if self.interrupts else set(self._running.values())
            threads = [*(self._threads - busy), *filter(None, [self._watcher])]
            self._work.notify_all()
            self._watch_again.notify()
        for call in waiting:
            call.lose("was not started: the workers were closed.")
        for call in running:
            self.abandon(call, "still ran when the workers were closed.")
        until = time.monotonic() + CLOSE_SECONDS
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, until - time.monotonic()))

    def _perform(self, call: ToolCall) -> Outcome:
        """Make the call in the current thread, one of the pool's, and return its outcome. Called without the lock."""
        raise NotImplementedError

    def refuses(self, function: Tool, name: str) -> str | None:
        """Return a text that says why the pool cannot call a function, and what to do; None if it can. May be slow.

        Args:
            function: the function.
            name: name of the tool, with which the text begins.
        """
        raise NotImplementedError

    def _interrupt(self, call: ToolCall) -> None:
        """Make a running call end soon, where that is possible. The caller holds the lock."""

    def _give_up(self, late: list[ToolCall]) -> list[tuple[ToolCall, str]]:
        """Give up running calls that passed their deadlines. The caller holds the lock.

        Returns:
            The calls to report as lost, each with a reason, words that follow "tool 'name'". Calls that have not begun
            may be among them.
        """
        raise NotImplementedError

    def _expect(self, call: ToolCall, seconds: float, late: str, *, by_tool: bool = False) -> None:
        """Set the deadline of a running call to `seconds` from now. The caller holds the lock.

        Args:
            call: the call.
            seconds: time until the deadline.
            late: the message if the call passes its deadline, in words that follow "tool 'name'".
            by_tool: whether the tool itself would be to blame if the call passes its deadline.
        """
        call.taken = time.monotonic()
        call.expires, call.late, call.by_tool = call.taken + seconds, late, by_tool
        if self._watcher is None:
            self._watcher = threading.Thread(target=self._watch, name="tool-deadlines", daemon=True)
            self._watcher.start()
        elif call.expires < self._watched_until:
            self._watch_again.notify()

    def _staff(self) -> None:
        """Start as many threads as the waiting calls need and `limit` allows. The caller holds the lock."""
        self._work.notify()
        for _ in range(min(len(self._queue) - self._idle, self._limit - len(self._threads))):
            thread = threading.Thread(target=self._serve, name=f"tool-{len(self._threads)}", daemon=True)
            thread.start()
            self._threads.add(thread)

    def _serve(self) -> None:
        while self._serve_one():
            pass
        with self._lock:
            self._threads.discard(threading.current_thread())

    def _serve_one(self) -> bool:
        # A frame of its own: an idle thread must not keep the last call's arguments and result alive.
        call = self._next()
        if call is None:
            return False
        try:
            outcome = self._perform(call)
        except Exception as error:
            reason = f"tool {call.name!r} could not be run: {type(error).__name__}: {error}"
            outcome = Outcome(lost=reason, seconds=call.seconds())
        with self._lock:
            stays = self._running.pop(call, None) is not None
            self._hung.discard(call)
        call.settle(outcome)
        return stays

    def _next(self) -> ToolCall | None:
        """Wait for a call and return it; None when the pool is closed."""
        with self._lock:
            while not self._queue and not self._closed:
                self._idle += 1
                self._work.wait()
                self._idle -= 1
            if self._closed:
                return None
            call = self._queue.popleft()
            self._running[call] = threading.current_thread()
            return call

    def _watch(self) -> None:
        while self._watch_once():
            pass

    def _watch_once(self) -> bool:
        """Report the calls that have passed their deadlines as lost; if there are none, wait for the next deadline.
        Return False if the pool is closed."""
        with self._lock:
            if self._closed:
                return False
            now = time.monotonic()
            late = [call for call in self._running if call.expires <= now]
            if not late:
                self._watched_until = min((call.expires for call in self._running), default=math.inf)
                self._watch_again.wait(min(self._watched_until - now, threading.TIMEOUT_MAX))
                return True
            lost = self._give_up(late)
        for call, reason in lost:
            call.lose(reason, by_tool=call.by_tool)
        return True


def performed(function: Callable[[], object], catching: type[BaseException]) -> Outcome:
    """Call a function in this thread, and return its result or exception, with the time that it took.

    Args:
        function: the function.
        catching: class of the exceptions that become part of the outcome; others are raised.
    """
    started, cpu_started = time.perf_counter(), time.thread_time()
    value, raised = None, None
    try:
        value = function()
    except catching as error:
        raised = error
    seconds, cpu_seconds = time.perf_counter() - started, time.thread_time() - cpu_started
    return Outcome(value=value, error=raised, seconds=seconds, cpu_seconds=cpu_seconds)


def taking_this_device() -> Callable[[], None]:
    """Return a function that sets the calling thread's CUDA device to the device that is current now, in this thread.
    A new thread must call it first, because otherwise it would use device 0. If this process does not use CUDA, the
    function does nothing."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return lambda: None
    return functools.partial(torch.cuda.set_device, torch.cuda.current_device())


class ThreadWorkers(ToolWorkers):
    """A pool that runs tools in daemon threads.

    A call whose deadline passes is reported as lost at once. Its thread hangs until the tool returns: the thread is
    counted, a new one takes its place in the pool, and the late result is dropped. All threads compute on the GPU that
    was the current one where the pool was made.

    Args:
        limit: the largest number of calls that run at once.
        lost_limit: how many threads may hang at once. If more hang, waiting calls are reported as lost, and `submit`
            raises.
    """

    def __init__(self, limit: int, lost_limit: int) -> None:
        super().__init__(limit)
        self._lost_limit = lost_limit
        self._take_device = taking_this_device()

    def _serve(self) -> None:
        self._take_device()
        super()._serve()

    def hangs(self, call: ToolCall) -> bool:
        """Return whether a call has passed its deadline, and its thread is still running it."""
        return call in self._hung

    def refuses(self, function: Tool, name: str) -> str | None:
        """Return a text that says that no tool is called while more than `lost_limit` threads hang; None if no more
        hang. All functions are treated alike.

        Args:
            function: not used.
            name: name of the tool, with which the text begins.
        """
        return f"{name!r} is not called: {self._too_many()}" if len(self._hung) > self._lost_limit else None

    def _perform(self, call: ToolCall) -> Outcome:
        with self._lock:
            late = f"did not return within {call.deadline:g} s; its thread hangs."
            self._expect(call, call.deadline, late, by_tool=True)
        # SystemExit and KeyboardInterrupt are the tool's own here: no signal is delivered to a thread.
        return performed(lambda: call.context.run(call.function, **call.arguments), BaseException)

    def _too_many(self) -> str:
        names = Counter(call.name for call in list(self._hung))  # threads return meanwhile
        hanging = ", ".join(f"{name!r}" + (f" ×{count}" if count > 1 else "") for name, count in names.most_common())
        return (
            f"{names.total()} tool threads hang at once, {self._lost_limit} may: {hanging}. A thread cannot be "
            "killed. Give these tools a timeout of their own, run them in processes, which can be, or allow more."
        )

    def _give_up(self, late: list[ToolCall]) -> list[tuple[ToolCall, str]]:
        for call in late:
            self._threads.discard(self._running.pop(call))
            self._hung.add(call)
        lost = [(call, call.late) for call in late]
        if len(self._hung) > self._lost_limit:  # new threads for the waiting calls would most likely hang, too
            lost += [(call, f"was not started: {self._too_many()}") for call in self._queue]
            self._queue.clear()
        self._staff()
        return lost
