"""Threads that carry out calls."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future as Promise
from typing import Any

from .dispatch import Deal
from .failure import Call, Home, WorkerDiedError, WorkerError, refuse
from .future import Answers, left
from .local_answers import DroppedError, LocalAnswers
from .parcel import Parcel
from .register import Rule

CLOSE_SECONDS = 5.0


class LocalCrew:
    """Threads, each with a queue of what its worker has to do.

    Args:
        worker: name of their class.
        methods: by name, taking the worker first.
        constructors: of the workers, by rank; each is called in its worker's thread.

    Attributes:
        workers: by rank; set once they are constructed.
    """

    def __init__(
        self, worker: str, methods: Mapping[str, Callable[..., Any]], constructors: Sequence[Callable[[], Any]]
    ) -> None:
        ranks = len(constructors)
        self.homes: Sequence[Home] = [Home("this process", "", 0)] * ranks
        self.lost: WorkerDiedError | None = None
        self.workers: Sequence[Any] = ()
        self.over = False
        self._worker, self._methods, self._constructors = worker, methods, constructors
        self._queues: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in range(ranks)]
        self._threads = [
            threading.Thread(target=_serve, args=(todo,), name=f"worker-{rank}", daemon=True)
            for rank, todo in enumerate(self._queues)
        ]
        for thread in self._threads:
            thread.start()

    def start(self, seconds: float) -> None:
        """See `Crew`."""
        call = Call(self._worker, "__init__", range(len(self._queues)), self.homes)
        promises = [self.enqueue(rank, construct) for rank, construct in enumerate(self._constructors)]
        self.workers = LocalAnswers(self, call, promises, None).all(seconds)

    def check(self) -> None:
        """See `Crew`."""
        refuse(self._worker, self)

    def takes(self, answers: Answers) -> bool:
        """See `Crew`."""
        return isinstance(answers, LocalAnswers)

    def enqueue(self, rank: int, work: Callable[[], Any]) -> Promise[Any]:
        """Have a worker's thread do something after all it was given before."""
        promise: Promise[Any] = Promise()
        self._queues[rank].put((promise, work))
        return promise

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
        everyone = Parcel.of((list(args), dict(kwargs)))
        parcels = [parcel if isinstance(parcel, Promise) else Parcel.of(parcel) for parcel in deal.parcels]
        promises = []
        for position, rank in enumerate(deal.ranks):
            parcel = parcels[deal.parcel_of[position]] if parcels else None
            extra = deal.keywords[deal.parcel_of[position]] if deal.keywords else {}
            promises.append(self.enqueue(rank, self._work(rule.name, rank, parcel, everyone, extra)))
        return LocalAnswers(self, call, promises, upstream)

    def _work(
        self, name: str, rank: int, parcel: Parcel | Promise[Any] | None, everyone: Parcel, extra: Mapping[str, Any]
    ) -> Callable[[], Any]:
        def work() -> Any:
            args, kwargs = everyone.copy()
            if parcel is not None:
                answer = parcel.result() if isinstance(parcel, Promise) else parcel
                args = [answer.copy(), *args]
            return Parcel.of(self._methods[name](self.workers[rank], *args, **kwargs, **extra))

        return work

    def lose(self, error: WorkerError) -> WorkerError:
        """Note what went wrong; where a worker died, nobody does what it has not begun."""
        if isinstance(error, WorkerDiedError) and self.lost is None:
            self.lost = error
            for todo in self._queues:
                _drop(todo)
        return error

    def close(self, at_once: bool) -> None:
        """See `Crew`. A worker that does not come to an end keeps its thread, which ends with the process."""
        self.over = True
        for todo in self._queues:
            if at_once:
                _drop(todo)
            todo.put(None)
        until = time.monotonic() + CLOSE_SECONDS
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(left(until))


def _serve(todo: queue.SimpleQueue[Any]) -> None:
    while (job := todo.get()) is not None:
        promise, work = job
        try:
            promise.set_result(work())
        except BaseException as error:
            promise.set_exception(error)
        del job, promise, work  # an idle worker must not keep what it was given alive


def _drop(todo: queue.SimpleQueue[Any]) -> None:
    with contextlib.suppress(queue.Empty):
        while True:
            job = todo.get_nowait()
            if job is not None:
                job[0].set_exception(DroppedError())
