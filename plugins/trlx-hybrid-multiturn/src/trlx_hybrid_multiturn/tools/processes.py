"""The pool that runs tools in processes, where they may use the CPU, crash or hang, and can be killed. Arguments and
results are copied."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import os
import secrets
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
from trlx_hybrid.episodes.answers import CHARACTERS, UnshowableError
from trlx_hybrid.interprocess import plain_data, remote_errors

from ..loop import Outcome, Tool
from . import worker_process
from .supervised_process import SupervisedProcess
from .threads import ToolCall, ToolWorkers
from .worker_process import ANSWER_BYTES, FUNCTIONS, PLAIN, TooLongError, receive, send

START_SECONDS = 60.0  # for the interpreter, and for the imports of a tool's module; no tool's deadline counts them
ANSWER_PARTS = 4 << 20  # commas and brackets: each may become an object of some 60 bytes
ANSWER_PIXELS = 1 << 26  # of all images together: 256 MiB in RGBA, from a PNG that may have a thousandth of that


class ProcessWorkers(ToolWorkers):
    """A pool that runs tools in processes. They start when first needed and are reused; a thread serves each of them.

    The `value` of a call's outcome is not the tool's result itself, but the content of a tool message that is made from
    the result in the process. If a call passes its deadline, it is reported as lost, and its process is killed with all
    that it started. The time to start the process and to import the tool's module does not count. A process that
    crashes loses only the call that it runs.

    A process shares no state with the trainer. It imports what the tool needs, by the trainer's `sys.path`, but never
    the trainer's script. Functions of the script are pickled by value, with the globals that they use, as they are at
    the first call. Context variables are not sent. Results and exceptions come back as plain data (such as texts,
    numbers, images, and lists of them; see `trlx_hybrid.interprocess.plain_data`), never as pickles.

    Args:
        limit: the largest number of processes.
        characters: the largest number of characters of a result that the model is shown.
    """

    interrupts = True

    def __init__(self, limit: int, characters: int = CHARACTERS) -> None:
        super().__init__(limit)
        self._characters = characters
        self._free: list[WorkerProcess] = []
        self._serving: dict[ToolCall, WorkerProcess] = {}
        self._pickled: dict[int, tuple[Tool, bytes]] = {}  # by id; the function is held: ids are reused
        self._pickling = threading.Lock()

    def refuses(self, function: Tool, name: str | None = None) -> str | None:
        """Return a text that says why a function cannot run in a process (it is a method of an object, is asynchronous,
        or cannot be pickled), or None if it can.

        Args:
            function: the function.
            name: the tool's name, with which the text begins; by default the function's own.
        """
        inner = innermost(function)
        name = name or getattr(inner, "__name__", type(inner).__name__)
        owner = getattr(inner, "__self__", None)
        if owner is not None and not isinstance(owner, type | ModuleType):
            return (
                f"{name!r} is a method of a {type(owner).__qualname__}: a process would change a copy of that "
                "object, not the object. Run it in threads, or make it a function."
            )
        if inspect.iscoroutinefunction(inner):
            return f"{name!r} is asynchronous: it belongs on the event loop, not in a process."
        try:
            self._pickle(function)
        except Exception as error:  # pickling may run any code
            return (
                f"{name!r} cannot be sent to a process ({type(error).__name__}: {error}). "
                "Run it in threads, or let it make what it needs inside."
            )
        return None

    def close(self) -> None:
        """End all processes. Safe to call twice."""
        super().close()
        with self._lock:
            idle, self._free = self._free, []
        for process in idle:
            process.kill()
        for process in idle:  # after `kill` they end in parallel
            process.close()

    def _perform(self, call: ToolCall) -> Outcome:
        pickled = self._pickle(call.function)
        try:
            arguments = cloudpickle.dumps(call.arguments)
        except Exception as error:
            reason = f"tool {call.name!r} cannot be sent its arguments: {type(error).__name__}: {error}."
            return Outcome(lost=reason, seconds=call.seconds())
        process = self._taken(call)
        try:
            with self._lock:
                self._expect(call, START_SECONDS, f"was not loaded in its process within {START_SECONDS:g} s.")
            process.ask(pickled)
            with self._lock:
                late = f"did not return within {call.deadline:g} s; its process was killed."
                self._expect(call, call.deadline, late, by_tool=True)
            started = time.perf_counter()
            reply = process.ask(arguments)
            seconds, content = time.perf_counter() - started, reply["content"]
        except CrashError as crash:
            return Outcome(lost=f"tool {call.name!r} {crash}", by_tool=call.by_tool, seconds=call.seconds())
        except RefusedError as refusal:
            reason = f"tool {call.name!r} {refusal}"
            return Outcome(lost=reason, by_tool=refusal.by_tool, seconds=call.seconds())
        except BaseException:  # perhaps in the middle of a message: the process cannot be used again
            process.kill()
            raise
        finally:
            with self._lock:
                del self._serving[call]
                call.expires = math.inf
                if keep := process.usable and not self._closed:
                    self._free.append(process)
            if not keep:
                process.close()
        if reply["kind"] == "value":
            return Outcome(value=content, seconds=seconds)
        shown = reply["kind"] == "error"
        raised = (
            remote_errors.restore(content, "the tool's process", classes=False) if shown else UnshowableError(content)
        )
        return Outcome(error=raised, seconds=seconds)

    def _taken(self, call: ToolCall) -> WorkerProcess:
        """Return a process for a call: the idle one that was used last and still lives, or a new one."""
        while True:
            with self._lock:
                process = self._free.pop() if self._free else None
            process = process or WorkerProcess(self._characters)
            with self._lock:
                if process.usable:
                    self._serving[call] = process
                    if call.settled:  # given up before there was anything to interrupt
                        process.kill()
                    return process
            process.close()  # it died while idle: no tool caused that

    def _interrupt(self, call: ToolCall) -> None:
        if call in self._serving:
            self._serving[call].kill()

    def _give_up(self, late: list[ToolCall]) -> list[tuple[ToolCall, str]]:
        lost = []
        for call in late:
            process, call.expires = self._serving[call], math.inf
            ended = process.how_it_ended()  # with its socket open: a tool killed its supervisor
            lost.append((call, ended or call.late))
            process.kill()
        return lost

    def _pickle(self, function: Tool) -> bytes:
        """Return the pickled function. The pickle is made once and kept for later calls."""
        with self._pickling:
            known = self._pickled.get(id(function))
            if known is None:
                with by_value_if_needed(function):
                    known = function, bytes(cloudpickle.dumps(function))
                if len(self._pickled) >= FUNCTIONS:  # functions made anew for each call must not pile up
                    del self._pickled[next(iter(self._pickled))]
                self._pickled[id(function)] = known
            return known[1]


class RefusedError(Exception):
    """Raised where a tool's process refused a call (it cannot load the function or its arguments), or sent an answer
    that is too large or is not plain data.

    Its message continues the sentence "tool 'name' ...".

    Attributes:
        by_tool: whether the tool itself is to blame, because it wrote to the socket through which its process sends
            results.
    """

    def __init__(self, text: str, *, by_tool: bool = False) -> None:
        super().__init__(text)
        self.by_tool = by_tool


class CrashError(Exception):
    """Raised where a tool's process ended during a call. Its message continues the sentence "tool 'name' ..."."""


class WorkerProcess(SupervisedProcess):
    """The trainer's handle of a process that calls tools. One thread at a time may use it, except for `kill`.

    Until it ends, what tools started goes on running, for later calls.

    Args:
        characters: the largest number of characters of a result that the model is shown.

    Raises:
        OSError: the system gives no more processes.
    """

    def __init__(self, characters: int) -> None:
        super().__init__(Path(worker_process.__file__), str(characters))

    @property
    def usable(self) -> bool:
        """Return whether the process can take a call: it is alive, and its socket has nothing to read. Between calls
        there is nothing to read unless the process is ending or a tool wrote to the socket."""
        return self.how_it_ended() is None and not self._killed and not self.readable(0.0)

    def ask(self, message: bytes) -> dict[str, Any]:
        """Send a message to the process, wait for the answer, and return it. The wait has no time limit: without an
        answer it lasts until the process ends or is killed.

        Args:
            message: a pickled function to load, or the pickled keyword arguments with which to call the function that
                was loaded last.

        Returns:
            The answer, a dict with "kind" and "content". The content depends on the kind: "loaded" has None, "value"
            has what the model is shown, "unshowable" has the reason why the model cannot be shown the result, and
            "error" has a description of the tool's exception.

        Raises:
            CrashError: the process ended.
            RefusedError: the process refused, or its answer is invalid.
        """
        number = secrets.randbits(64)  # so that no tool knows the next one
        try:
            send(self.channel, number, message)
            answered, body = None, b""
            while answered != number:  # an earlier call left something behind that wrote this
                answered, body = receive(self.channel, ANSWER_BYTES)
        except TooLongError as error:
            self.kill()
            raise RefusedError(f"gave an answer of {error}.", by_tool=True) from error
        except (EOFError, OSError):
            raise CrashError(self.gone()) from None
        try:
            answer = _answer_in(body)
        except plain_data.NotPlainError as error:
            raise RefusedError(f"returned {error}. {PLAIN}") from error
        except Exception as error:  # the tool wrote to the socket itself: nothing that follows can be trusted
            self.kill()
            text = f"gave an answer that cannot be read: {type(error).__name__}: {error}."
            raise RefusedError(text, by_tool=True) from error
        if answer["kind"] == "refused":
            raise RefusedError(str(answer["content"]))
        return answer


def _answer_in(body: bytes) -> dict[str, Any]:
    """Parse the answer of a tool's process, after checking that it is harmless.

    Args:
        body: the bytes of the answer, JSON of plain data, which the tool may have forged.

    Returns:
        A dict: "kind", which is "loaded", "value", "unshowable", "refused" or "error", and "content", whose type
            depends on the kind.

    Raises:
        NotPlainError: a value is not plain data.
        Exception: the bytes are not an answer.
    """
    parts = sum(map(body.count, (b"[", b"{", b",")))
    if parts > ANSWER_PARTS:
        raise ValueError(f"it has {parts:,} parts, more than {ANSWER_PARTS:,}")
    answer: dict[str, Any] = plain_data.loads(body, classes=False, pixels=ANSWER_PIXELS)
    kind, content = answer["kind"], answer["content"]
    expected = {"value": str | list, "unshowable": str, "refused": str, "error": dict, "loaded": type(None)}
    if not isinstance(content, expected[kind]):
        raise TypeError(f"a {type(content).__name__} as its {kind}")
    return answer


@contextlib.contextmanager
def by_value_if_needed(function: Tool) -> Iterator[None]:
    """Return a context in which cloudpickle pickles a function by value, not by its name, if a new process could not
    import the function's module, as may be so for the module of a test.

    By itself, cloudpickle pickles only functions of `__main__` by value.

    Args:
        function: the function that is going to be pickled.
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
    """Return whether a new interpreter could import a module.

    `importlib.util.find_spec` cannot tell, because it also finds modules that are already loaded here. Python takes any
    folder for a package, even a folder without `__init__.py`. The result is False in two cases with such a folder: the
    module itself is one, or the module lies below one in the current directory, which a new interpreter may not search.

    Args:
        name: the module's full name.
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
    """Return whether any of a package's folders lies directly in the current directory, from which a new interpreter
    may be unable to import."""
    here = os.path.realpath(os.curdir)
    return any(os.path.dirname(os.path.realpath(folder)) == here for folder in folders)


def innermost(function: Tool) -> Tool:
    """Return the function that is wrapped in `functools.partial` objects, or the function itself if it is not
    wrapped."""
    while isinstance(function, functools.partial):
        function = function.func
    return function
