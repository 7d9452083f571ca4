"""Tools in processes: they may use the CPU, crash and hang, and can be killed. What goes in and out is copied."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
from trlx_hybrid import plain_data, remote_errors

from ..loop import Outcome
from . import worker_process
from .threads import ToolCall, ToolsUnavailableError, ToolWorkers
from .worker_process import FUNCTIONS, PLAIN, UnshowableError, receive, send

START_SECONDS = 60.0  # for the interpreter, and for the imports of a tool's module; no tool's deadline counts them
LONGEST_SECONDS = 1e6  # 11 days: beyond twice that no socket can wait
CRASH_SECONDS = 2.0  # between the end of a process's socket and its own end
CLOSE_SECONDS = 2.0  # for idle processes to end by themselves
TERMINATE_SECONDS = 0.5


class ProcessWorkers(ToolWorkers):
    """Runs tools in processes that start when first needed and are reused, each served by a thread of the pool.

    The outcome's value is what the model is shown. A call whose deadline passes is lost and its process killed, with
    all that it started; the deadline leaves out the start of a process and the imports of the tool's module. A crash
    loses one call. A process knows nothing of the trainer's: it imports what the tool needs, by the trainer's
    `sys.path`, and never the script itself, whose functions come by value as they were, with the globals they use, when
    first called. Context variables stay behind. What comes back is plain data, see `trlx_hybrid.plain_data`.

    Args:
        limit: processes.

    Raises:
        ConfigError: `limit` is below 1.
    """

    def __init__(self, limit: int) -> None:
        super().__init__(limit)
        self._free: list[WorkerProcess] = []
        self._serving: dict[ToolCall, WorkerProcess] = {}
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

    def close(self) -> None:
        """End all processes: those amid a call at once, idle ones within seconds. Safe to call twice."""
        super().close()
        with self._lock:
            idle, self._free = self._free, []
        for process in idle:
            process.hang_up()
        until = time.monotonic() + CLOSE_SECONDS
        for process in idle:
            process.close(until)

    def _refuse(self, function: Callable[..., Any]) -> None:
        reason = self.refuses(function)
        if reason is not None:
            raise ToolsUnavailableError(f"Tool {reason}")

    def _perform(self, call: ToolCall) -> Outcome:
        process = self._take(call)
        try:
            return self._call(call, process)
        except CallLost as lost:
            return Outcome(lost=f"tool {call.name!r} {lost}", by_tool=lost.by_tool, seconds=call.seconds())
        except BaseException:
            process.kill()
            raise
        finally:
            with self._lock:
                del self._serving[call]
                if keep := process.usable and not self._closed:
                    self._free.append(process)
            if not keep:
                process.kill()

    def _take(self, call: ToolCall) -> WorkerProcess:
        """An idle process that still lives, the one used last first, or one that is yet to start."""
        while True:
            with self._lock:
                process = self._free.pop() if self._free else WorkerProcess()
                if process.usable:
                    self._serving[call] = process
                    if call.settled or self._closed:  # given up before there was anything to interrupt
                        process.interrupt()
                    return process
            process.kill()  # died idle: no tool's fault

    def _call(self, call: ToolCall, process: WorkerProcess) -> Outcome:
        number, pickled = self._number(call.function)
        process.load(number, pickled)
        try:
            message = cloudpickle.dumps(("call", number, call.arguments))
        except Exception as error:
            raise CallLost(f"cannot be sent its arguments: {type(error).__name__}: {error}.") from error
        call.taken, started = time.monotonic(), time.perf_counter()
        reply = process.call(message, call.deadline)
        seconds, content = time.perf_counter() - started, reply["content"]
        if reply["kind"] == "value":
            return Outcome(value=content, seconds=seconds, cpu_seconds=reply["cpu_seconds"])
        shown = reply["kind"] == "error"
        raised = remote_errors.restore(content, "the tool's process") if shown else UnshowableError(content)
        return Outcome(error=raised, seconds=seconds, cpu_seconds=reply["cpu_seconds"])

    def _interrupt(self, call: ToolCall) -> None:
        if call in self._serving:
            self._serving[call].interrupt()

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


class CallLost(Exception):  # noqa: N818 - not a user's error: always turned into an outcome
    """A call has no result. The text continues "tool 'name' ..."; `by_tool` as in `Outcome`."""

    by_tool = False


class WorkerProcess:
    """A process that calls tools, seen from the trainer. For one thread at a time, except `interrupt`.

    It gets a process group of its own, so that killing it kills what its tool started, and the terminal's Ctrl-C goes
    to the trainer alone. Its prints go to the trainer's stderr. Where it crashes or does not answer in time, it is
    killed, and the method that waited for it raises CallLost.
    """

    def __init__(self) -> None:
        self._channel, self._other_end = socket.socketpair()
        self._process: subprocess.Popen[bytes] | None = None
        self._loaded: dict[int, None] = {}  # numbers of the functions it holds, in the order they came
        self._interrupted = False
        self._ended = False

    @property
    def usable(self) -> bool:
        """Whether it can take calls: not started yet, or running and connected."""
        return not (self._ended or self._interrupted) and (self._process is None or self._process.poll() is None)

    def load(self, number: int, function: bytes) -> None:
        """Start it and give it a pickled function, unless that was done. The calling thread must outlive it: Linux
        kills a process with the thread that started it.

        Raises:
            CallLost: it did not come up, or it cannot load the function, or not within `START_SECONDS`.
            OSError: the system gives no more processes.
        """
        if self._process is None:
            self._start()
        if number in self._loaded:
            return
        if len(self._loaded) >= FUNCTIONS:  # as the process does
            del self._loaded[next(iter(self._loaded))]
        late = f"was not loaded in its process within {START_SECONDS:g} s"
        self._exchange(pickle.dumps(("load", number, function)), START_SECONDS, late)
        self._loaded[number] = None

    def _start(self) -> None:
        with self._other_end as other_end:
            # -P keeps this package's folder from shadowing modules that a tool imports.
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(Path(worker_process.__file__)), str(other_end.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=2,
                pass_fds=(other_end.fileno(),),
                start_new_session=True,
            )
        self._exchange(pickle.dumps(sys.path), START_SECONDS, f"did not get a process within {START_SECONDS:g} s")

    def call(self, message: bytes, deadline: float) -> dict[str, Any]:
        """Have a loaded function called.

        Args:
            message: pickled ("call", number, arguments).
            deadline: seconds, from here to the last byte of the answer.

        Returns:
            The answer, see `worker_process`.

        Raises:
            CallLost: it crashed, or the deadline passed, or its answer is none.
        """
        late = f"did not return within {deadline:g} s; its process was killed"
        return self._exchange(message, min(deadline, LONGEST_SECONDS), late, by_tool=True)

    def interrupt(self) -> None:
        """Make the thread that waits for it get `CallLost` at once. From any thread."""
        self._interrupted = True
        with contextlib.suppress(OSError):  # no longer open, or not connected
            self._channel.shutdown(socket.SHUT_RDWR)

    def kill(self) -> None:
        """End it and what it started, now. Safe to call twice."""
        self._channel.close()
        self._other_end.close()
        ended, self._ended = self._ended, True
        if ended or self._process is None:
            return
        # What a crashed tool had started lives on in its group.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # in the kernel's hands: dies when a device answers
            self._process.wait(CRASH_SECONDS)

    def hang_up(self) -> None:
        """Tell an idle process to end, and return."""
        self._channel.close()

    def close(self, until: float) -> None:
        """Wait until `time.monotonic()` is `until` for a process that was told to end, then terminate, then kill it."""
        if self._process is not None and not self._ended:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(max(0.0, until - time.monotonic()))
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(TERMINATE_SECONDS)
        self.kill()

    def _exchange(self, message: bytes, seconds: float, late: str, by_tool: bool = False) -> dict[str, Any]:
        """Send a message and wait for its answer. `late` is what to say where there is none in time."""
        until = time.monotonic() + seconds
        try:
            self._channel.settimeout(max(1e-3, seconds))
            send(self._channel, message)
            body = receive(self._channel, until)
        except (EOFError, OSError) as error:
            # Without an end of the socket where something that the tool forked still holds it.
            alive = self._process is not None and self._process.poll() is None
            lost = CallLost(f"{late}." if isinstance(error, TimeoutError) and alive else self._how_it_ended())
            lost.by_tool = by_tool
            self.kill()
            raise lost from None
        try:
            answer: dict[str, Any] = plain_data.loads(bytes(body))
            kind, content = answer["kind"], answer["content"]
        except plain_data.NotPlainError as error:
            raise CallLost(f"returned {error}. {PLAIN}") from error
        except Exception as error:  # the tool wrote to the socket itself: nothing that follows can be trusted
            self.kill()
            raise CallLost(f"gave an answer that cannot be read: {type(error).__name__}: {error}.") from error
        if kind == "refused":
            raise CallLost(str(content))
        return answer

    def _how_it_ended(self) -> str:
        if self._interrupted:
            return "was interrupted."
        assert self._process is not None
        try:
            code = self._process.wait(CRASH_SECONDS)
        except subprocess.TimeoutExpired:
            return "closed its process's connection to the trainer."
        if code >= 0:
            return f"ended its process: exit code {code}."
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        hint = " (as Linux does when memory runs out)" if -code == signal.SIGKILL else ""
        return f"crashed its process: {name}{hint}."


@contextlib.contextmanager
def by_value_if_needed(function: Callable[..., Any]) -> Iterator[None]:
    """Pickle the contents of the function's module where a process could not import it, such as a test's.

    cloudpickle does so by itself for `__main__` only.
    """
    module = sys.modules.get(getattr(innermost(function), "__module__", None) or "")
    if (
        module is None
        or module.__name__ == "__main__"
        or module.__name__ in cloudpickle.list_registry_pickle_by_value()
        or _importable(module.__name__)
    ):
        yield
        return
    cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def _importable(name: str) -> bool:
    """Whether a fresh interpreter finds this module. `importlib.util.find_spec` only says what is loaded here.

    A folder without `__init__.py` counts as a package to Python. One in the current directory is found or not by how
    the trainer was started, and one by the module's own name is some other thing: both are no.
    """
    path: Sequence[str] | None = None
    parts = name.split(".")
    for i in range(1, len(parts) + 1):
        package = ".".join(parts[:i])
        specs = (finder.find_spec(package, path) for finder in sys.meta_path)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is None:
            return False
        folders = spec.submodule_search_locations
        if folders is not None and spec.origin is None and (i == len(parts) or _here(folders)):
            return False
        path = getattr(sys.modules.get(package), "__path__", folders)
    return True


def _here(folders: Iterable[str]) -> bool:
    """Whether any of these lies in the current directory."""
    here = os.path.realpath(os.curdir)
    return any(os.path.dirname(os.path.realpath(folder)) == here for folder in folders)


def innermost(function: Callable[..., Any]) -> Callable[..., Any]:
    """What partial applications were made of."""
    while isinstance(function, functools.partial):
        function = function.func
    return function
