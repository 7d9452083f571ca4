"""What every group does, whoever its workers are: turn a call into a deal, have it carried out, collect."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, cast

from trlx_hybrid.errors import ConfigError

from . import dispatch, future
from .dispatch import Deal
from .failure import Call, Home
from .future import Answers, Future
from .grid import Grid
from .pool import Pool, pool_of
from .register import Rule, rules, seconds

W = TypeVar("W")

DEADLINE = 600.0
"""Seconds that a call may take unless its method or its group says otherwise."""
START_SECONDS = 120.0
"""Seconds that all workers' constructors may take unless the group says otherwise."""


class Crew(Protocol):
    """Workers that carry out calls, each one call at a time and in the order in which they came."""

    @property
    def homes(self) -> Sequence[Home]:
        """Where each rank runs."""

    def start(self, seconds: float) -> None:
        """Wait until every worker is constructed.

        Raises:
            WorkerError: a constructor raised; names the rank.
            DeadlineError: not all are constructed in time.
        """

    def check(self) -> None:
        """Raise what stands against calling anybody: a worker that died (`WorkerDiedError`), or `close`."""

    def takes(self, answers: Answers) -> bool:
        """Whether its workers can be given references to these."""

    def submit(
        self,
        rule: Rule,
        deal: Deal,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        call: Call,
        upstream: Answers | None,
    ) -> Answers:
        """Hand a call to its workers and return at once.

        Args:
            args, kwargs: what everyone gets beside its parcel.
            upstream: whose answers the parcels refer to, where they are references.
        """

    def close(self, at_once: bool) -> None:
        """End the workers: those at work finish first, unless `at_once`, and not for long."""


class GroupCall:
    """A registered method of a group. Calling it calls the workers."""

    def __init__(self, rule: Rule, worker: str, grid: Grid, crew: Crew, deadline: float) -> None:
        self._rule, self._grid, self._crew = rule, grid, crew
        self._seconds = seconds(rule, deadline)
        self._whole = None if rule.deals else dispatch.whole(rule, grid)
        ranks = range(grid.ranks) if self._whole is None else self._whole.ranks
        self._call = Call(worker, rule.name, ranks, crew.homes)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """See `register`.

        Raises:
            TypeError: the arguments do not fit the method.
            DispatchError: they cannot be dealt out.
            WorkerError: see `Future.result`; at once where a worker had died before.
        """
        self._rule.signature.bind(*args, **kwargs)  # here rather than on every worker
        self._crew.check()
        deal, upstream = self._whole, None
        if deal is None:
            if not args:
                raise TypeError(f"{self._call}() takes its first argument by position: it is dealt out to the workers.")
            deal, upstream = self._dealt(args[0])
            args = args[1:]
            if self._rule.pad in kwargs:
                raise TypeError(f"{self._call}() makes {self._rule.pad!r} itself, from the padding it adds.")
        if any(isinstance(value, Future) for value in (*args, *kwargs.values())):
            raise TypeError(f"{self._call}() takes a future as the argument that is dealt out only. Pass its result().")
        answers = self._crew.submit(self._rule, deal, args, kwargs, self._call, upstream)
        if self._rule.execute == "blocking":
            return dispatch.collect(self._rule, deal, answers.all(self._seconds))
        if self._rule.execute == "stream":
            return future.stream(deal, answers, self._seconds)
        return Future(self._rule, deal, self._call, answers, self._seconds)

    def _dealt(self, first: Any) -> tuple[Deal, Answers | None]:
        if not isinstance(first, Future):
            return dispatch.dealt(self._rule, self._grid, first), None
        if self._rule.dispatch == "scatter" and self._rule.pad is None and self._crew.takes(first.answers):
            parcels = first.parcels(self._grid.replicas)
            if parcels is not None:
                return dispatch.by_replica(self._grid, parcels), first.answers
        return dispatch.dealt(self._rule, self._grid, first.result(self._seconds)), None

    def __repr__(self) -> str:
        return f"<{self._call} of {self._grid.ranks} workers, {self._rule.dispatch}, {self._rule.execute}>"


class Group(Generic[W]):
    """Base of both groups. `with` gives the group as type checkers see it best: as its worker class.

    Arguments and errors of the constructor: see `WorkerGroup`.

    Attributes:
        grid: its shape.
    """

    grid: Grid

    def __init__(
        self,
        worker: type[W],
        pool: Pool | int,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        tensor_parallel: int = 1,
        deadline: float = DEADLINE,
        start_deadline: float = START_SECONDS,
    ) -> None:
        methods, pool = rules(worker), pool_of(pool)
        taken = [name for name in methods if name == "grid" or hasattr(Group, name)]
        if taken:
            raise ConfigError(
                f"{worker.__name__}.{taken[0]} cannot be registered: a group has a {taken[0]!r} of its own. Rename it."
            )
        self.grid, self._worker = Grid(len(pool), tensor_parallel), worker
        self._crew = self._hired(worker, pool, args, kwargs or {})
        try:
            self._crew.start(start_deadline)
        except BaseException:
            self._crew.close(at_once=True)
            raise
        self._calls = {
            name: GroupCall(rule, worker.__name__, self.grid, self._crew, deadline) for name, rule in methods.items()
        }
        vars(self).update(self._calls)

    def _hired(self, worker: type[W], pool: Pool, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Crew:
        """The workers; `Crew.start` waits for them."""
        raise NotImplementedError

    @property
    def workers(self) -> type[W]:
        """This group, with the types of the worker's registered methods: they read on a class as on a group."""
        return cast("type[W]", self)

    @property
    def homes(self) -> Sequence[Home]:
        """Where each rank runs."""
        return self._crew.homes

    def close(self) -> None:
        """End the workers: what they are at they finish, within seconds. Safe to call twice."""
        self._crew.close(at_once=False)

    def __len__(self) -> int:
        return self.grid.ranks

    def __enter__(self) -> type[W]:
        return self.workers

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._crew.close(at_once=kind is not None)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            calls = vars(self).get("_calls", {})
            known = hasattr(vars(self).get("_worker"), name)
            missing = f"{name!r} is not registered: put @register(dispatch=...) above it" if known else f"no {name!r}"
            raise AttributeError(f"{type(self).__name__}: {missing}. Methods: {', '.join(calls) or 'none yet'}.")

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.grid.ranks} × {self._worker.__name__}>"
