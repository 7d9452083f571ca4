"""The same group in this process: one thread per worker, and copies where Ray would make copies."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import pickle
import queue
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from .errors import Call, Failure
from .group import CLOSE_SECONDS, Group, Workers, answering, left, timeout
from .registration import Registered, registered
from .worker import Location, WorkerInfo, become

W = TypeVar("W")
Answer = concurrent.futures.Future


class LocalWorkerGroup(Group[W]):
    """Workers in threads of this process, for a single GPU, tests and debuggers. Takes what `WorkerGroup` takes.

    What a worker is given and what it returns is copied as Ray would copy it: nothing that one side changes shows on
    the other, and arrays arrive read-only. Resources in the workers' options are not claimed: there is nobody to claim
    them from. The threads share this process's random generators, environment and devices.

    Raises:
        ConfigError: as from `WorkerGroup`.
        WorkerError: a constructor raised.
        DeadlineError: a constructor did not return in time.
    """

    def _made(self, *arguments: Any) -> Threads:
        return Threads(*arguments)


class Threads(Workers):
    """Threads, each with a queue of what its worker has to do. A worker that exits has died."""

    errors = (Exception, SystemExit)

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.locations = [Location("this process")] * self.world
        self._given = Serialized.of((list(self._args), dict(self._kwargs)))
        self._methods = {
            name: answering(method, getattr(self._worker, name)) for name, method in registered(self._worker).items()
        }
        self._objects: Sequence[Any] = ()
        self._queues: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in range(self.world)]
        self._threads = [
            threading.Thread(target=_serve, args=(todo,), name=f"worker-{rank}", daemon=True)
            for rank, todo in enumerate(self._queues)
        ]
        for thread in self._threads:
            thread.start()

    def start(self, seconds: float) -> None:
        """See `Workers`."""
        made = [self._enqueued(rank, functools.partial(self._constructed, rank)) for rank in range(self.world)]
        self._objects = self.results(Call(self.name, "__init__", range(self.world), self.locations), made, seconds)

    def _constructed(self, rank: int) -> Any:
        become(WorkerInfo(rank, self.tensor_parallel, tuple(self.locations)), whole_process=False)
        args, kwargs = self._given.copy()
        return self._worker(*args, **kwargs)

    def submit(
        self, method: Registered, chunks: Sequence[Any] | None, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> list[Answer[Any]]:
        """See `Workers`."""
        everyone = Serialized.of((list(args), dict(kwargs)))
        given = [chunk if isinstance(chunk, Answer) else Serialized.of(chunk) for chunk in chunks or ()]
        answers = []
        for rank in range(1 if method.dispatch == "rank_zero" else self.world):
            chunk = given[rank // self.tensor_parallel] if given else None
            answers.append(self._enqueued(rank, functools.partial(self._answered, method.name, rank, chunk, everyone)))
        return answers

    def _answered(
        self, name: str, rank: int, chunk: Serialized | Answer[Any] | None, everyone: Serialized
    ) -> Serialized:
        args, kwargs = everyone.copy()
        if chunk is not None:
            args = [(chunk.result() if isinstance(chunk, Answer) else chunk).copy(), *args]
        return Serialized.of(self._methods[name](self._objects[rank], *args, **kwargs))

    def _enqueued(self, rank: int, work: Callable[[], Any]) -> Answer[Any]:
        answer: Answer[Any] = Answer()
        self._queues[rank].put((answer, work))
        return answer

    def wait(self, answers: Sequence[Answer[Any]], seconds: float) -> set[Answer[Any]]:
        """See `Workers`."""
        return concurrent.futures.wait(answers, timeout(seconds)).done

    def get(self, answers: Sequence[Answer[Any]], seconds: float) -> list[Any]:
        """See `Workers`."""
        there, late = concurrent.futures.wait(answers, timeout(seconds), concurrent.futures.FIRST_EXCEPTION)
        values = [answer.result() for answer in answers if answer in there]
        if late:
            raise TimeoutError
        return [value.copy() if isinstance(value, Serialized) else value for value in values]

    def failure(self, position: int, answer: Answer[Any]) -> Failure | None:
        """See `Workers`."""
        if answer.cancelled():
            return Failure(position, "dropped", concurrent.futures.CancelledError())
        error = answer.exception()
        if error is None:
            return None
        trace = "".join(traceback.format_exception(error))
        return Failure(position, "died" if isinstance(error, SystemExit) else "raised", error, trace)

    def cancel(self, answers: Sequence[Answer[Any]]) -> None:
        """See `Workers`."""
        for answer in answers:
            answer.cancel()

    def close(self, at_once: bool) -> None:
        """See `Workers`. A worker that does not come to an end keeps its thread, which ends with the process."""
        self.closed = True
        for todo in self._queues:
            with contextlib.suppress(queue.Empty):
                while at_once:
                    waiting = todo.get_nowait()
                    if waiting is not None:
                        waiting[0].cancel()
            todo.put(None)
        until = time.monotonic() + CLOSE_SECONDS
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(left(until))


def _serve(todo: queue.SimpleQueue[Any]) -> None:
    while (job := todo.get()) is not None:
        answer, work = job
        if answer.set_running_or_notify_cancel():
            try:
                answer.set_result(work())
            except BaseException as error:
                answer.set_exception(error)
        del job, answer, work  # an idle worker must not keep what it was given alive


@dataclass(frozen=True, slots=True)
class Serialized:
    """A value on its way, copied as Ray would copy it: pickled, its large buffers beside it."""

    body: bytes
    buffers: tuple[bytes, ...]

    @classmethod
    def of(cls, value: Any) -> Serialized:
        """With Ray's pickle, so that what can be sent there can be sent here."""
        from ray import cloudpickle

        buffers: list[pickle.PickleBuffer] = []
        body: bytes = cloudpickle.dumps(value, protocol=5, buffer_callback=buffers.append)  # type: ignore[no-untyped-call]
        return cls(body, tuple(bytes(buffer.raw()) for buffer in buffers))

    def copy(self) -> Any:
        """The value as its receiver has it; arrays are read-only, and share memory with those of other receivers."""
        return pickle.loads(self.body, buffers=self.buffers)
