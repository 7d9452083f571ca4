"""Tools in processes: they may use the CPU, crash and hang, and can be killed. What goes in and out is copied."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import pickle
import threading
import time
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import cloudpickle  # type: ignore[import-untyped]

from .by_value import by_value_if_needed, innermost
from .child import Child, ChildLost
from .job import Job, WorkerError
from .outcome import Outcome
from .worker_process import FUNCTIONS
from .workers import Workers

CLOSE_SECONDS = 2.0  # for idle processes to end by themselves


class ToolError(Exception):
    """Stands for what a tool raised in its process and could not be pickled; its text is the original's.

    Attributes:
        kind: class name of the original.
    """

    def __init__(self, text: str, kind: str) -> None:
        super().__init__(text)
        self.kind = kind


class ProcessWorkers(Workers):
    """Runs tools in processes that start when first needed and are reused, each served by a thread of the pool.

    A call whose deadline passes is lost and its process killed, with all that it started. A crash loses one call.
    A process knows nothing of the trainer's: it imports what the tool needs, by the trainer's `sys.path`, and never
    the script itself, whose functions come by value as they were, with the globals they use, when first called.
    Context variables stay behind.

    Args:
        limit: processes.

    Raises:
        ConfigError: `limit` is below 1.
    """

    def __init__(self, limit: int) -> None:
        super().__init__(limit)
        self._free: list[Child] = []
        self._serving: dict[Job, Child] = {}
        # By identity, beside the function itself so that no other takes its id.
        self._pickled: dict[int, tuple[Callable[..., Any], int, bytes]] = {}
        self._numbers = itertools.count()
        self._pickling = threading.Lock()

    def refuses(self, function: Callable[..., Any]) -> str | None:
        """Why this function cannot be called in a process, and what to do; None where it can."""
        inner = innermost(function)
        name = getattr(inner, "__name__", type(inner).__name__)
        owner = getattr(inner, "__self__", None)
        if owner is not None and not isinstance(owner, type | ModuleType):
            return (
                f"{name!r} is a method of a {type(owner).__qualname__}: a process would change a copy of that "
                "object, not the object. Run it in threads, or make it a function."
            )
        if inspect.iscoroutinefunction(inner):
            return f"{name!r} is asynchronous: it belongs on the event loop, not in a process."
        try:
            self._number(function)
        except Exception as error:  # pickling runs anybody's code
            return (
                f"{name!r} cannot be sent to a process ({type(error).__name__}: {error}). "
                "Run it in threads, or let it make what it needs inside."
            )
        return None

    def submit(
        self,
        function: Callable[..., Any],
        arguments: Mapping[str, Any],
        done: Callable[[Outcome], None],
        deadline: float,
        *,
        name: str | None = None,
    ) -> Job:
        """As in `Workers`. The deadline leaves out the start of a process and the imports of the tool's module.

        Raises:
            WorkerError: the function cannot be called in a process, or the pool is closed.
        """
        reason = self.refuses(function)
        if reason is not None:
            raise WorkerError(f"Tool {reason}")
        return super().submit(function, arguments, done, deadline, name=name)

    def close(self) -> None:
        """End all processes: those amid a call at once, idle ones within seconds. Safe to call twice."""
        super().close()
        with self._lock:
            children, self._free = self._free, []
        for child in children:
            child.hang_up()
        until = time.monotonic() + CLOSE_SECONDS
        for child in children:
            child.close(until)

    def _perform(self, job: Job) -> Outcome:
        child = self._take(job)
        try:
            return self._call(job, child)
        except ChildLost as lost:
            child.kill()
            return _lost(job, str(lost))
        except BaseException:
            child.kill()
            raise
        finally:
            with self._lock:
                del self._serving[job]
                if keep := child.usable and not self._closed:
                    self._free.append(child)
            if not keep:
                child.kill()

    def _take(self, job: Job) -> Child:
        """An idle process that still lives, the one used last first, or one that is yet to start."""
        while True:
            with self._lock:
                child = self._free.pop() if self._free else Child()
                if child.usable:
                    self._serving[job] = child
                    if job.settled or self._closed:  # given up before there was anything to interrupt
                        child.interrupt()
                    return child
            child.kill()  # died idle: no tool's fault

    def _call(self, job: Job, child: Child) -> Outcome:
        if not child.started:
            child.start()
        number, pickled = self._number(job.function)
        refused = child.load(number, pickled)
        if refused is not None:
            return _lost(job, refused)
        try:
            call = cloudpickle.dumps(("call", number, job.arguments))
        except Exception as error:
            return _lost(job, f"cannot be sent its arguments: {type(error).__name__}: {error}.")
        job.taken, started = time.monotonic(), time.perf_counter()
        try:
            answer = child.call(call, job.deadline)
        except ChildLost as lost:
            child.kill()
            return _lost(job, str(lost), by_tool=True)
        seconds = time.perf_counter() - started
        try:
            kind, *content = pickle.loads(answer)
        except Exception as error:
            return _lost(
                job, f"returned a value that cannot be brought back from its process: {type(error).__name__}: {error}."
            )
        if kind == "value":
            return Outcome(value=content[0], seconds=seconds, cpu_seconds=content[1])
        if kind == "error":
            return Outcome(error=_original(*content[:-1]), seconds=seconds, cpu_seconds=content[-1])
        return _lost(job, content[0])

    def _interrupt(self, job: Job) -> None:
        if job in self._serving:
            self._serving[job].interrupt()

    def _close(self) -> list[threading.Thread]:
        return list(self._threads)

    def _number(self, function: Callable[..., Any]) -> tuple[int, bytes]:
        """The function's number in every process, and its pickle."""
        with self._pickling:
            known = self._pickled.get(id(function))
            if known is None:
                with by_value_if_needed(function):
                    known = function, next(self._numbers), bytes(cloudpickle.dumps(function))
                if len(self._pickled) >= FUNCTIONS:  # functions made anew for each call must not pile up
                    del self._pickled[next(iter(self._pickled))]
                self._pickled[id(function)] = known
            return known[1:]


def _lost(job: Job, text: str, *, by_tool: bool = False) -> Outcome:
    return Outcome(lost=f"tool {job.name!r} {text}", by_tool=by_tool, seconds=job.seconds())


def _original(pickled: bytes | None, kind: str, text: str, trace: str) -> BaseException:
    error: BaseException = ToolError(text, kind)
    if pickled is not None:
        with contextlib.suppress(Exception):  # loads in its process and not here: a module with side effects
            error = pickle.loads(pickled)
    error.add_note(f"In the tool's process:\n{trace}")
    return error
