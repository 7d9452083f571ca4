"""Worker groups: objects whose methods call the method of the same name on all workers at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from trlx_hybrid.errors import ConfigError

from .batch import join, row_ranges, rows_of, split
from .registration import Registered, registered, worker_class
from .worker import Location
from .workers import Future, Workers

if TYPE_CHECKING:
    from ray.actor import ActorHandle

    from ..placement import Placement

W = TypeVar("W")

DEADLINE = 600.0
"""Seconds that a call may take unless its method or its group says otherwise."""
START_SECONDS = 120.0
"""Seconds that all workers' constructors may take unless the group says otherwise."""


class GroupMethod:
    """A method of a worker group that is marked with `@register`. Calling it calls the method of the same name on the
    group's workers.

    Args:
        method: the method's name and signature, and the arguments of `@register`.
        workers: the workers of the group.
        deadline: seconds that a call may take, unless the method has a deadline of its own.
    """

    def __init__(self, method: Registered, workers: Workers, deadline: float) -> None:
        self._method, self._workers = method, workers
        self._seconds = deadline if method.deadline is None else method.deadline
        self._ranks = range(1 if method.dispatch == "rank_zero" else workers.world)
        self._call = f"{workers.name}.{method.name}"

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Call the method on the workers, with the method's own arguments. The argument `dispatch` of `@register` says
        which arguments each worker gets, and which results are returned. A method registered with `execute="future"`
        returns a `Future` at once.

        Raises:
            TypeError: the arguments do not fit the method.
            ConfigError: the group was closed.
            DispatchError: the batch cannot be split, or the results cannot be joined.
            WorkerError: a worker raised an exception or died (`WorkerDiedError`), now or in an earlier call, or did not
                answer in time (`DeadlineError`).
        """
        method, workers = self._method, self._workers
        method.signature.bind(*args, **kwargs)  # here rather than on every worker
        workers.check()
        chunks: Sequence[object] | None = None
        upstream: Future[object] | None = None
        if method.splits:
            if not args:
                raise TypeError(f"{self._call}() takes its first argument by position: it is split.")
            batch, args = args[0], args[1:]
            if isinstance(batch, Future):
                chunks, upstream = batch.chunks_for(workers), batch
                batch = batch.result(self._seconds) if chunks is None else None
            if chunks is None:
                chunks, upstream = split(batch, row_ranges(rows_of(batch), workers.replicas)), None
        if any(isinstance(value, Future) for value in (*args, *kwargs.values())):
            raise TypeError(f"{self._call}() takes a future as the argument that is split only. Pass its result().")
        answers = workers.submit(method.entry, self._ranks, chunks, args, kwargs)
        future: Future[object] = Future(
            workers,
            self._call,
            answers,
            self._collected,
            seconds=self._seconds,
            splits=method.splits,
            upstream=upstream,
        )
        workers.futures.add(future)
        return future if method.execute == "future" else future.result()

    def _collected(self, results: list[object]) -> object:
        """Return the group's result of a call, made from the workers' results. For "scatter", it is one result of each
        replica, joined; for "one_to_all", the list of all results; otherwise, the result of rank 0.

        Args:
            results: the workers' results, by rank.
        """
        if self._method.splits:
            return join(results[:: self._workers.tensor_parallel])
        return results if self._method.dispatch == "one_to_all" else results[0]

    def __repr__(self) -> str:
        return f"<{self._call} of {self._workers.world} workers, {self._method.dispatch}, {self._method.execute}>"


class WorkerGroup(Generic[W]):
    """A group of Ray actors of one class, called as one object.

    ```python
    with WorkerGroup(Scorer, 4) as scorers:
        scores = scorers.score(prompts)
    ```

    `with` returns the group. Its type, for type checkers, is the worker class, so that the methods of the group are
    known. The group holds Ray's handles of its workers; the actors have no names. When an error leaves the block, the
    workers end at once; otherwise they finish their calls first.

    Args:
        worker: a class with methods marked with `@register`.
        workers: a number of workers, with one CPU each, on any node with room; or a `Placement`, which reserves the
            resources of each worker; or for each worker the arguments of Ray's `.options()`.
        args, kwargs: the arguments of each worker's constructor. `this_worker()` tells a worker its rank.
        tensor_parallel: the number of workers per replica. All workers of a replica get the same part of a split batch.
        deadline: seconds that a call may take; `math.inf` waits for ever.
        start_deadline: seconds for all workers to be constructed.

    Raises:
        ConfigError: the class has no registered method, or `tensor_parallel` does not divide the number of workers.
        WorkerError: a constructor raised; the message names the rank.
        DeadlineError: Ray did not start all workers in time.
    """

    _local = False

    def __init__(
        self,
        worker: type[W],
        workers: int | Placement | Sequence[Mapping[str, object]],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
        *,
        tensor_parallel: int = 1,
        deadline: float = DEADLINE,
        start_deadline: float = START_SECONDS,
    ) -> None:
        methods = registered(worker)
        taken = [name for name in methods if hasattr(WorkerGroup, name)]
        if taken:
            raise ConfigError(
                f"{worker.__name__}.{taken[0]} cannot be registered: a group has a {taken[0]!r} of its own. Rename it."
            )
        if isinstance(workers, int):
            options: list[Mapping[str, object]] = [{"num_cpus": 1}] * workers
        elif isinstance(workers, Sequence):
            options = list(workers)
        else:
            options = [workers.options(rank) for rank in range(len(workers))]
        self._worker = worker
        called = worker_class(worker, local=self._local)
        self._workers = Workers(called, options, tensor_parallel, args, kwargs or {}, local=self._local)
        try:
            self._workers.start(start_deadline)
        except BaseException:
            self._workers.close(at_once=True)
            raise
        self._methods = {name: GroupMethod(method, self._workers, deadline) for name, method in methods.items()}
        vars(self).update(self._methods)

    @property
    def workers(self) -> type[W]:
        """The group itself, typed as its worker class, so that type checkers know the registered methods and their
        results."""
        return cast("type[W]", self)

    @property
    def handles(self) -> Sequence[ActorHandle[Any]]:
        """The actors, by rank; empty once the group is closed."""
        return cast("Sequence[ActorHandle[Any]]", self._workers.handles)

    @property
    def locations(self) -> Sequence[Location]:
        """The node, process and GPUs of each worker, by rank."""
        return self._workers.locations

    def close(self) -> None:
        """End the workers. They may finish their current calls, for a few seconds at most. Safe to call twice."""
        self._workers.close(at_once=False)

    def __len__(self) -> int:
        return self._workers.world

    def __enter__(self) -> type[W]:
        return self.workers

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._workers.close(at_once=kind is not None)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            methods = vars(self).get("_methods", {})
            known = hasattr(vars(self).get("_worker"), name)
            missing = f"{name!r} is not registered: put @register(dispatch=...) above it" if known else f"no {name!r}"
            raise AttributeError(f"{type(self).__name__}: {missing}. Methods: {', '.join(methods) or 'none yet'}.")

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {len(self)} × {self._worker.__name__}>"


class LocalWorkerGroup(WorkerGroup[W]):
    """A worker group whose workers are threads of this process, for a single GPU, tests and debuggers. It has the
    arguments of `WorkerGroup`.

    Arguments and results are copied as Ray would copy them: a change on one side does not show on the other, and arrays
    arrive read-only. Resources in the workers' options are ignored. The threads share this process's random generators,
    environment and devices.

    Raises:
        ConfigError: the class has no registered method, or `tensor_parallel` does not divide the number of workers.
        WorkerError: a constructor raised.
        DeadlineError: a constructor did not return in time.
    """

    _local = True
