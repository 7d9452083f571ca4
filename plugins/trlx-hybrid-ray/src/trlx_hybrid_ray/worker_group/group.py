"""What every group does, whether its workers are actors or threads: a call is given out, waited for and collected."""

from __future__ import annotations

import functools
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast
from weakref import WeakSet

from trlx_hybrid.errors import ConfigError

from .batch import join, row_ranges, rows_of, split
from .errors import Call, Failure, WorkerDiedError, WorkerError
from .registration import Registered, registered
from .worker import Location, this_worker

if TYPE_CHECKING:
    from ..placement import Placement

R_co = TypeVar("R_co", covariant=True)
W = TypeVar("W")

DEADLINE = 600.0
"""Seconds that a call may take unless its method or its group says otherwise."""
START_SECONDS = 120.0
"""Seconds that all workers' constructors may take unless the group says otherwise."""
CLOSE_SECONDS = 5.0
"""Seconds that workers are given at the group's end for what they are at."""
GRACE = 2.0
"""Seconds that the others are given once one has failed: a worker's death is often noticed after the errors it causes
in those that talked to it, and it is the death that has to be named."""


class Future(Generic[R_co]):
    """The result of a call that goes on. Give it to another group's method as its batch, or ask it.

    Where both groups split batches alike, the data then goes from worker to worker and never to this process.
    """

    def __init__(
        self,
        workers: Workers,
        method: Registered,
        call: Call,
        answers: list[Any],
        *,
        seconds: float,
        upstream: Future[Any] | None,
    ) -> None:
        self.answers = answers  # one per called worker, as `Workers.get` takes them
        self._workers, self._method, self._call = workers, method, call
        self._seconds, self._upstream = seconds, upstream
        self._value: list[R_co] = []

    def result(self, timeout: float | None = None) -> R_co:
        """Wait for it.

        Args:
            timeout: seconds; by default the call's deadline. `math.inf` waits for ever.

        Raises:
            WorkerError: a worker raised, or died (`WorkerDiedError`): rank, method, node and its traceback.
            DeadlineError: not everyone answered in time. The call goes on, and can be asked again.
            DispatchError: the results of a scattered batch cannot be joined.
        """
        if not self._value:
            seconds = self._seconds if timeout is None else timeout
            results: Any = self._workers.results(self._call, self.answers, seconds, self._upstream)
            if self._method.splits:
                results = join(results[:: self._workers.tensor_parallel])
            self._value.append(results if self._method.dispatch in ("one_to_all", "scatter") else results[0])
        return self._value[0]

    def done(self) -> bool:
        """Whether `result` would not wait."""
        return bool(self._value) or len(self._workers.wait(self.answers, 0.0)) == len(self.answers)

    def chunks_for(self, workers: Workers) -> list[Any] | None:
        """One answer per replica, where it is a scattered batch that those workers split alike, so that they can be
        given the answers in the place of their values."""
        alike = (
            self._method.splits and type(workers) is type(self._workers) and workers.replicas == self._workers.replicas
        )
        return self.answers[:: self._workers.tensor_parallel] if alike else None

    def error(self) -> WorkerError | None:
        """What `result` would raise at once, if anything."""
        try:
            self._workers.results(self._call, self.answers, 0.0, self._upstream)
        except WorkerError as error:
            return None if isinstance(error, TimeoutError) else error
        return None

    def cancel(self) -> None:
        """Take what has not begun out of the workers' queues."""
        self._workers.cancel(self.answers)

    def __repr__(self) -> str:
        return f"<Future of {self._call}, {'done' if self.done() else 'at work'}>"


class Workers(ABC):
    """The workers of one group. Each carries out one call at a time, in the order in which they came.

    Args:
        worker: their class.
        options: for each, what Ray's `.options()` takes.
        tensor_parallel: how many are a replica.
        args, kwargs: of their constructors.

    Attributes:
        name: of their class.
        world, replicas: how many there are.
        locations: where each rank runs; empty before it is known.
        lost: the error of the first worker that died.
        closed: whether the group was.
        errors: what `get` raises where an answer is missing.
    """

    errors: tuple[type[BaseException], ...] = (Exception,)

    def __init__(
        self,
        worker: type,
        options: Sequence[Mapping[str, Any]],
        tensor_parallel: int,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> None:
        world = len(options)
        if world < 1 or tensor_parallel < 1 or world % tensor_parallel:
            raise ConfigError(
                f"{world} workers cannot be replicas of tensor_parallel={tensor_parallel}: it must divide their "
                "number, and both must be 1 or more."
            )
        self.name, self.world, self.tensor_parallel = worker.__name__, world, tensor_parallel
        self.replicas = world // tensor_parallel
        self._worker, self._options, self._args, self._kwargs = worker, options, args, kwargs
        self.locations: Sequence[Location] = ()
        self.lost: WorkerDiedError | None = None
        self.closed = False
        self.futures: WeakSet[Future[Any]] = WeakSet()

    @abstractmethod
    def start(self, seconds: float) -> None:
        """Wait until every worker is constructed.

        Raises:
            WorkerError: a constructor raised; names the rank.
            DeadlineError: not all are constructed in time.
        """

    @abstractmethod
    def submit(
        self, method: Registered, chunks: Sequence[Any] | None, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> list[Any]:
        """Hand a call to the workers and return at once: for each called worker, what `get` and `wait` take.

        Args:
            chunks: the first argument of each replica's workers, its value or another group's answer; None where all
                arguments go to everyone.
            args, kwargs: what everyone gets.
        """

    @abstractmethod
    def wait(self, answers: Sequence[Any], seconds: float) -> set[Any]:
        """Those that are there, as soon as all are, or after so many seconds."""

    @abstractmethod
    def get(self, answers: Sequence[Any], seconds: float) -> list[Any]:
        """The values of all answers; raises one of `errors`, which a TimeoutError is, where one is missing."""

    @abstractmethod
    def failure(self, position: int, answer: Any) -> Failure | None:
        """What went wrong with an answer that is there."""

    @abstractmethod
    def cancel(self, answers: Sequence[Any]) -> None:
        """Drop what no worker has begun with."""

    @abstractmethod
    def close(self, at_once: bool) -> None:
        """End the workers: those at work finish first, unless `at_once`, and not for long."""

    def check(self) -> None:
        """Raise what stands against calling anybody.

        Raises:
            WorkerDiedError: a worker died earlier.
            ConfigError: the group was closed.
        """
        if self.lost is not None:
            raise self.lost
        if self.closed:
            raise ConfigError(f"This group of {self.name} was closed. Make a new one.")

    def results(
        self, call: Call, answers: Sequence[Any], seconds: float, upstream: Future[Any] | None = None
    ) -> list[Any]:
        """The values of all answers.

        Args:
            upstream: the future whose answers the workers were given.

        Raises:
            WorkerError, DeadlineError: see `Future.result`.
        """
        try:
            return self.get(answers, seconds)
        except self.errors as error:
            reason = self.explained(call, answers, error, seconds, upstream)
            raise reason from reason.__cause__

    def explained(
        self, call: Call, answers: Sequence[Any], error: BaseException, seconds: float, upstream: Future[Any] | None
    ) -> WorkerError:
        """The error to raise where answers are missing: it names the worker that is to blame."""
        earlier = upstream.error() if upstream is not None else None
        if earlier is not None:
            return earlier
        failures = self._failures(answers, 0.0)
        if not failures and isinstance(error, TimeoutError):
            there = self.wait(answers, 0.0)
            missing = [position for position, answer in enumerate(answers) if answer not in there]
            return call.overdue(missing or [len(answers) - 1], seconds)
        if self.lost is None:
            failures = self._failures(answers, GRACE)
        if all(failure.kind != "raised" for failure in failures):
            if self.lost is not None:
                return self.lost
            if self.closed:
                return call.closed()
        reason = call.failed(failures or [Failure(0, "raised", error)])
        if isinstance(reason, WorkerDiedError):
            self.lost = reason
            for future in list(self.futures):  # the others may wait for the dead one for ever
                future.cancel()
        return reason

    def _failures(self, answers: Sequence[Any], seconds: float) -> list[Failure]:
        there = self.wait(answers, seconds)
        found = [self.failure(position, answer) for position, answer in enumerate(answers) if answer in there]
        return [failure for failure in found if failure is not None]


class GroupMethod:
    """A registered method of a group. Calling it calls the workers."""

    def __init__(self, method: Registered, workers: Workers, deadline: float) -> None:
        self._method, self._workers = method, workers
        self._seconds = deadline if method.deadline is None else method.deadline
        ranks = range(1 if method.dispatch == "rank_zero" else workers.world)
        self._call = Call(workers.name, method.name, ranks, workers.locations)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """See `register`.

        Raises:
            TypeError: the arguments do not fit the method.
            DispatchError: the batch cannot be split.
            WorkerError: see `Future.result`; at once where a worker had died before.
        """
        method, workers = self._method, self._workers
        method.signature.bind(*args, **kwargs)  # here rather than on every worker
        workers.check()
        chunks = upstream = None
        if method.splits:
            if not args:
                raise TypeError(f"{self._call}() takes its first argument by position: it is split.")
            batch, *args = args  # type: ignore[assignment]
            if isinstance(batch, Future):
                chunks, upstream = batch.chunks_for(workers), batch
                batch = batch.result(self._seconds) if chunks is None else None
            if chunks is None:
                chunks, upstream = split(batch, row_ranges(rows_of(batch), workers.replicas)), None
        if any(isinstance(value, Future) for value in (*args, *kwargs.values())):
            raise TypeError(f"{self._call}() takes a future as the argument that is split only. Pass its result().")
        answers = workers.submit(method, chunks, args, kwargs)
        future: Future[Any] = Future(workers, method, self._call, answers, seconds=self._seconds, upstream=upstream)
        workers.futures.add(future)
        return future if method.execute == "future" else future.result()

    def __repr__(self) -> str:
        return f"<{self._call} of {self._workers.world} workers, {self._method.dispatch}, {self._method.execute}>"


class Group(ABC, Generic[W]):
    """Base of both groups. `with` gives the group as type checkers see it best: as its worker class.

    Arguments and errors of the constructor: see `WorkerGroup`.
    """

    def __init__(
        self,
        worker: type[W],
        workers: int | Placement | Sequence[Mapping[str, Any]],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        tensor_parallel: int = 1,
        deadline: float = DEADLINE,
        start_deadline: float = START_SECONDS,
    ) -> None:
        methods = registered(worker)
        taken = [name for name in methods if hasattr(Group, name)]
        if taken:
            raise ConfigError(
                f"{worker.__name__}.{taken[0]} cannot be registered: a group has a {taken[0]!r} of its own. Rename it."
            )
        if isinstance(workers, int):
            options: list[Mapping[str, Any]] = [{"num_cpus": 1}] * workers
        elif isinstance(workers, Sequence):
            options = list(workers)
        else:
            options = [workers.options(rank) for rank in range(len(workers))]
        self._worker = worker
        self._workers = self._made(worker, options, tensor_parallel, args, kwargs or {})
        try:
            self._workers.start(start_deadline)
        except BaseException:
            self._workers.close(at_once=True)
            raise
        self._methods = {name: GroupMethod(method, self._workers, deadline) for name, method in methods.items()}
        vars(self).update(self._methods)

    @abstractmethod
    def _made(self, *arguments: Any) -> Workers:
        """The workers, of these arguments of `Workers`."""

    @property
    def workers(self) -> type[W]:
        """This group, with the types of the worker's registered methods: they read on a class as on a group."""
        return cast("type[W]", self)

    @property
    def locations(self) -> Sequence[Location]:
        """Where each rank runs."""
        return self._workers.locations

    def close(self) -> None:
        """End the workers: what they are at they finish, within seconds. Safe to call twice."""
        self._workers.close(at_once=False)

    def __len__(self) -> int:
        return self._workers.world

    def __enter__(self) -> type[W]:
        return self.workers

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._workers.close(at_once=kind is not None)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            methods = vars(self).get("_methods", {})
            known = hasattr(vars(self).get("_worker"), name)
            missing = f"{name!r} is not registered: put @register(dispatch=...) above it" if known else f"no {name!r}"
            raise AttributeError(f"{type(self).__name__}: {missing}. Methods: {', '.join(methods) or 'none yet'}.")

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {len(self)} × {self._worker.__name__}>"


def answering(method: Registered, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, returning None on workers whose result nobody collects: it would travel for nothing."""
    if method.entry == method.name:
        return function

    @functools.wraps(function)
    def answer(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = function(self, *args, **kwargs)
        worker = this_worker()
        return result if (worker.tensor_rank if method.splits else worker.rank) == 0 else None

    return answer


def left(until: float) -> float:
    """Seconds until a moment of the monotonic clock, at least 0."""
    return max(0.0, until - time.monotonic())


def timeout(seconds: float) -> float | None:
    """As most waits take it, where a deadline of `math.inf` is none."""
    return None if seconds == math.inf else seconds
