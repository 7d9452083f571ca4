"""A process that holds one object, so that two engines that cannot share a process take turns on one device."""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any

CLOSING_SECONDS = 15.0


class WorkerError(Exception):
    """Raised where a worker raised, died, or did not answer in time."""


class Worker:
    """A spawned process that builds `factory(*arguments)` and calls its methods. It uses no core while it waits.

    It is a context manager, and ends the process in any case.

    Args:
        name: name of the worker, for messages.
        factory: importable by name, since the process starts afresh.
        arguments: arguments of `factory`.
    """

    def __init__(self, name: str, factory: Callable[..., object], *arguments: Any) -> None:
        self.name = name
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, factory, arguments), name=name)
        self._process.start()
        theirs.close()  # so that the pipe ends when the process dies

    def call(self, method: str, *arguments: Any, seconds: float) -> Any:
        """Call a method in the process and return its result.

        Raises:
            WorkerError: the method raised (with its traceback), the process died, or `seconds` passed.
        """
        self.pipe.send((method, arguments))
        return self.answer(f"{method}{arguments}", seconds)

    def answer(self, what: str, seconds: float) -> Any:
        """Return the next answer; `what` names the question in errors."""
        if not self.pipe.poll(seconds):
            raise WorkerError(f"Worker {self.name!r} did not answer {what} within {seconds:g} s.")
        try:
            fine, value = self.pipe.recv()
        except EOFError:
            self._process.join(CLOSING_SECONDS)
            raise WorkerError(
                f"Worker {self.name!r} died in {what} with exit code {self._process.exitcode}; its output is above."
            ) from None
        if not fine:
            raise WorkerError(f"Worker {self.name!r} failed in {what}:\n{value}")
        return value

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.pipe.close()  # ends the worker's loop, if it still runs
        if kind is None:
            self._process.join(CLOSING_SECONDS)
        self._process.kill()
        self._process.join()


def wait_until_built(workers: Iterable[Worker], seconds: float) -> None:
    """Wait until all workers are built; an error is raised as soon as the first one fails.

    Raises:
        WorkerError: as in `Worker.call`.
    """
    building = {worker.pipe: worker for worker in workers}
    deadline = time.monotonic() + seconds
    while building:
        answered = wait(list(building), max(0.0, deadline - time.monotonic()))
        if not answered:
            names = ", ".join(worker.name for worker in building.values())
            raise WorkerError(f"Not built within {seconds:g} s: {names}.")
        for pipe in answered:
            building.pop(pipe).answer("its building", 0.0)  # type: ignore[call-overload]


def _serve(pipe: Connection, factory: Callable[..., object], arguments: tuple[Any, ...]) -> None:
    """Build the object, then answer calls until the pipe ends. The first error is the last answer."""
    try:
        target = factory(*arguments)
        pipe.send((True, None))
        while True:
            method, given = pipe.recv()
            pipe.send((True, getattr(target, method)(*given)))
    except EOFError:
        return
    except BaseException:
        pipe.send((False, traceback.format_exc()))
