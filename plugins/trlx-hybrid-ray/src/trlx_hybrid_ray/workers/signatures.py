"""What a type checker sees of `@register`. Nothing here runs.

A registered method is a descriptor. On an instance it is the method as it was written, which is how workers call each
other's code; on the class it is what the group offers, with the results of all workers. A group is typed as its worker
class, so that `group.score(prompts)` has the second type, without a plugin for the type checker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Concatenate, Generic, Literal, ParamSpec, Protocol, TypeVar, overload

from .future import Arrival, Future
from .register import Reduction

P = ParamSpec("P")
R = TypeVar("R")
A = TypeVar("A")
A_contra = TypeVar("A_contra", contravariant=True)
X = TypeVar("X")
X_co = TypeVar("X_co", covariant=True)


class DealtCall(Protocol[A_contra, P, X_co]):
    """A group's method whose first argument is dealt out; a future of another group's will do as well."""

    def __call__(self, dealt: A_contra | Future[A_contra], /, *args: P.args, **kwargs: P.kwargs) -> X_co: ...


class Whole(Generic[P, R, X]):
    """A method whose arguments go out as they are: `R` is what a worker returns, `X` what the group does."""

    @overload
    def __get__(self, worker: None, owner: Any) -> Callable[P, X]: ...
    @overload
    def __get__(self, worker: object, owner: Any) -> Callable[P, R]: ...
    def __get__(self, worker: Any, owner: Any) -> Any: ...


class Dealt(Generic[A, P, R, X]):
    """A method whose first argument is cut into chunks."""

    @overload
    def __get__(self, worker: None, owner: Any) -> DealtCall[A, P, X]: ...
    @overload
    def __get__(self, worker: object, owner: Any) -> Callable[Concatenate[A, P], R]: ...
    def __get__(self, worker: Any, owner: Any) -> Any: ...


class Each(Generic[A, P, R, X]):
    """A method whose first argument is given as a list, one item per worker or replica."""

    @overload
    def __get__(self, worker: None, owner: Any) -> DealtCall[Sequence[A], P, X]: ...
    @overload
    def __get__(self, worker: object, owner: Any) -> Callable[Concatenate[A, P], R]: ...
    def __get__(self, worker: Any, owner: Any) -> Any: ...


# ruff: noqa: D102
class _WholeOne(Protocol):
    def __call__(self, method: Callable[Concatenate[Any, P], R]) -> Whole[P, R, R]: ...


class _WholeOneLater(Protocol):
    def __call__(self, method: Callable[Concatenate[Any, P], R]) -> Whole[P, R, Future[R]]: ...


class _WholeAll(Protocol):
    def __call__(self, method: Callable[Concatenate[Any, P], R]) -> Whole[P, R, list[R]]: ...


class _WholeAllLater(Protocol):
    def __call__(self, method: Callable[Concatenate[Any, P], R]) -> Whole[P, R, Future[list[R]]]: ...


class _WholeStream(Protocol):
    def __call__(self, method: Callable[Concatenate[Any, P], R]) -> Whole[P, R, Iterator[Arrival[R]]]: ...


class _Dealt(Protocol):
    def __call__(self, method: Callable[Concatenate[Any, A, P], R]) -> Dealt[A, P, R, R]: ...


class _DealtLater(Protocol):
    def __call__(self, method: Callable[Concatenate[Any, A, P], R]) -> Dealt[A, P, R, Future[R]]: ...


class _DealtStream(Protocol):
    def __call__(self, method: Callable[Concatenate[Any, A, P], R]) -> Dealt[A, P, R, Iterator[Arrival[R]]]: ...


class _Each(Protocol):
    def __call__(self, method: Callable[Concatenate[Any, A, P], R]) -> Each[A, P, R, list[R]]: ...


class _EachLater(Protocol):
    def __call__(self, method: Callable[Concatenate[Any, A, P], R]) -> Each[A, P, R, Future[list[R]]]: ...


class _EachStream(Protocol):
    def __call__(self, method: Callable[Concatenate[Any, A, P], R]) -> Each[A, P, R, Iterator[Arrival[R]]]: ...


class _Reduced(Protocol):
    @overload
    def __call__(self, method: Callable[[Any], R]) -> Whole[[], R, R]: ...
    @overload
    def __call__(self, method: Callable[Concatenate[Any, A, P], R]) -> Dealt[A, P, R, R]: ...


class _ReducedLater(Protocol):
    @overload
    def __call__(self, method: Callable[[Any], R]) -> Whole[[], R, Future[R]]: ...
    @overload
    def __call__(self, method: Callable[Concatenate[Any, A, P], R]) -> Dealt[A, P, R, Future[R]]: ...


_One = Literal["broadcast", "rank_zero"]
_Eachwise = Literal["all_to_all", "replicate"]
_Now = Literal["blocking"]
_Later = Literal["future"]
_Stream = Literal["stream"]
_Reduce = Reduction | Callable[[list[Any]], Any]


@overload
def register(dispatch: _One, execute: _Now = ..., *, deadline: float | None = ...) -> _WholeOne: ...
@overload
def register(dispatch: _One, execute: _Later, *, deadline: float | None = ...) -> _WholeOneLater: ...
@overload
def register(dispatch: Literal["one_to_all"], execute: _Now = ..., *, deadline: float | None = ...) -> _WholeAll: ...
@overload
def register(dispatch: Literal["one_to_all"], execute: _Later, *, deadline: float | None = ...) -> _WholeAllLater: ...
@overload
def register(dispatch: Literal["one_to_all"], execute: _Stream, *, deadline: float | None = ...) -> _WholeStream: ...
@overload
def register(dispatch: _Eachwise, execute: _Now = ..., *, deadline: float | None = ...) -> _Each: ...
@overload
def register(dispatch: _Eachwise, execute: _Later, *, deadline: float | None = ...) -> _EachLater: ...
@overload
def register(dispatch: _Eachwise, execute: _Stream, *, deadline: float | None = ...) -> _EachStream: ...
@overload
def register(
    dispatch: Literal["scatter"], execute: _Now = ..., *, pad: str | None = ..., deadline: float | None = ...
) -> _Dealt: ...
@overload
def register(
    dispatch: Literal["scatter"], execute: _Later, *, pad: str | None = ..., deadline: float | None = ...
) -> _DealtLater: ...
@overload
def register(
    dispatch: Literal["scatter"], execute: _Stream, *, pad: str | None = ..., deadline: float | None = ...
) -> _DealtStream: ...
@overload
def register(
    dispatch: Literal["reduce"],
    execute: _Now = ...,
    *,
    pad: str | None = ...,
    reduction: _Reduce = ...,
    deadline: float | None = ...,
) -> _Reduced: ...
@overload
def register(
    dispatch: Literal["reduce"],
    execute: _Later,
    *,
    pad: str | None = ...,
    reduction: _Reduce = ...,
    deadline: float | None = ...,
) -> _ReducedLater: ...
def register(dispatch: Any, execute: Any = "blocking", **settings: Any) -> Any:
    """Say how a method is called when a whole group is.

    Args:
        dispatch: who gets which arguments, and what the caller gets:

            - "broadcast": all workers, the same arguments; the result of rank 0. For what workers do together.
            - "one_to_all": all workers, the same arguments; a list of their results.
            - "all_to_all": the first argument is a list with an item for each worker; a list of their results.
            - "scatter": the first argument is a batch, cut by rows over the replicas; every rank of a replica gets its
              chunk, and the replicas' results are joined again.
            - "replicate": the first argument is a list with an item for each replica, whose ranks all get it; a list of
              the replicas' results.
            - "rank_zero": rank 0 only; its result.
            - "reduce": as "scatter" where the method takes an argument, else all workers; one result, reduced over the
              replicas.

        execute: "blocking" waits; "future" returns a `Future` at once; "stream" returns an iterator of `Arrival`, as
            workers finish.
        pad: name of a parameter that takes a mask. Chunks are then padded to one size, by repeating a row, and the
            worker finds out by the mask: a boolean array (rows,), False for padding. Results come back without it.
        reduction: "mean" weighs by rows; or a function of the list of results.
        deadline: seconds that a call may take; by default the group's. `math.inf` waits for ever.

    Raises:
        ConfigError: the combination or the method's signature makes no sense; says why.
    """
