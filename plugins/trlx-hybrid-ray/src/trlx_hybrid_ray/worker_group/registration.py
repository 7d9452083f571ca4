"""The decorator `@register`, which says how a worker group calls a method of its workers.

At run time the method stays the same function, with the arguments of `register` as an attribute. For a type checker it
becomes a descriptor with two types. On an instance of the worker class it is the method as it was written, since
workers call their own methods that way. On the class it is the group's method, which returns the results of all
workers. A group is typed as its worker class, so `group.score(prompts)` has the second type, without a plugin for the
type checker.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Concatenate, Generic, Literal, ParamSpec, Protocol, TypeVar, get_args, overload

from trlx_hybrid.errors import ConfigError, did_you_mean

from .worker import Location, WorkerInfo, located, set_this_worker, this_worker

if TYPE_CHECKING:
    from .workers import Future

Dispatch = Literal["broadcast", "one_to_all", "scatter", "rank_zero"]
"""The ways in which a group's call reaches its workers. "broadcast": all get the same arguments, and rank 0's result is
returned. "one_to_all": all get the same arguments, and a list of their results is returned. "scatter": the first
argument is split by rows, and the results are joined. "rank_zero": rank 0 alone is called."""
Execute = Literal["blocking", "future"]
"""The two ways of waiting for a call: "blocking" returns the result, "future" returns a `Future` at once."""

MARK = "__trlx_registered__"
"""The name of the attribute of a function in which `register` stores its arguments, as a `Registered`."""


@dataclass(frozen=True, slots=True)
class Registered:
    """The registration of a method: the arguments of `register`, the method's name and its signature.

    Attributes:
        name: the method's name.
        dispatch, execute, deadline: the arguments of `register`.
        signature: the method's signature, without `self`.
    """

    name: str
    dispatch: Dispatch
    execute: Execute
    deadline: float | None
    signature: inspect.Signature

    @property
    def splits(self) -> bool:
        """True if the first argument is a batch that is split over the replicas; otherwise every worker that is called
        gets all arguments unchanged."""
        return self.dispatch == "scatter"

    @property
    def entry(self) -> str:
        """The name of the actor's method that the group calls. Where the dispatch (how arguments reach the workers and
        results are collected) uses the results of some workers only, this names a wrapper, which returns None on the
        other workers. The method itself stays unchanged, for the worker's own calls."""
        return f"{self.name}__answer" if self.dispatch in ("broadcast", "scatter") else self.name


def registered(worker: type) -> dict[str, Registered]:
    """Return what `@register` recorded about the methods of a class and its bases, by the method's name.

    Args:
        worker: the class of a group's workers.

    Raises:
        ConfigError: no method is registered.
    """
    found = {name: getattr(value, MARK) for name, value in inspect.getmembers(worker) if hasattr(value, MARK)}
    if not found:
        raise ConfigError(
            f"{worker.__name__} has no registered method, so a group of it could do nothing. Put "
            "@register(dispatch=...) above the methods that the group is to have."
        )
    return found


def worker_class(worker: Any, *, local: bool) -> type:
    """Return the class that a group really starts as actors: a subclass of `worker`, of the same name. For registered
    methods whose result only some workers have to send, it adds wrappers, named by `Registered.entry`.

    The subclass is constructed with the rank alone. The constructor of `worker` is called later, when the nodes and
    processes of all workers are known.

    Args:
        worker: the user's class.
        local: whether the workers are threads of one process.
    """

    def start(self: Any, rank: int) -> None:
        self.__trlx_rank__ = rank

    def locate(self: Any) -> Location:
        return Location("this process") if local else located(self.__trlx_rank__)

    def construct(
        self: Any, locations: tuple[Location, ...], tensor_parallel: int, /, *args: object, **kwargs: object
    ) -> None:
        set_this_worker(WorkerInfo(self.__trlx_rank__, tensor_parallel, locations), whole_process=not local)
        worker.__init__(self, *args, **kwargs)

    names = {"__module__": worker.__module__, "__init__": start}
    names |= {"__trlx_locate__": locate, "__trlx_construct__": construct}
    names |= {method.entry: _answering(method, getattr(worker, name)) for name, method in registered(worker).items()}
    return type(worker.__name__, (worker,), names)


def _answering(method: Registered, function: Callable[..., object]) -> Callable[..., object]:
    """Wrap a worker's method so that it returns None on workers whose result the group does not use, which saves
    sending the result. Where all results are used, return the method itself."""
    if method.entry == method.name:
        return function

    @functools.wraps(function)
    def answer(self: object, *args: object, **kwargs: object) -> object:
        result = function(self, *args, **kwargs)
        here = this_worker()
        return result if (here.tensor_rank if method.splits else here.rank) == 0 else None

    return answer


# --- what a type checker sees ---------------------------------------------------------------------------------------

P = ParamSpec("P")
R = TypeVar("R")  # what a worker's method returns
B = TypeVar("B")  # the batch that it takes
X = TypeVar("X")  # what the group's method returns
B_contra = TypeVar("B_contra", contravariant=True)
X_co = TypeVar("X_co", covariant=True)

if TYPE_CHECKING:

    class SplittingCall(Protocol[B_contra, P, X_co]):
        """The type that a group's method has for type checkers if its first argument is split over the replicas. This
        argument is a batch, or a `Future` of a batch from another group."""

        def __call__(self, batch: B_contra | Future[B_contra], /, *args: P.args, **kwargs: P.kwargs) -> X_co:
            """Call the method on the group's workers."""

    class Whole(Generic[P, R, X]):
        """The type that a registered method has for type checkers if every called worker gets its arguments unsplit. It
        is `Callable[P, R]` on a worker, and `Callable[P, X]` on a group, where X is R, a list of R, or a `Future` of
        either."""

        @overload
        def __get__(self, worker: None, owner: type) -> Callable[P, X]: ...
        @overload
        def __get__(self, worker: object, owner: type) -> Callable[P, R]: ...
        def __get__(self, worker: object, owner: type) -> Any: ...

    class Split(Generic[B, P, R, X]):
        """The type that a registered method has for type checkers if its first argument is a batch. On a worker the
        method takes a part of the batch, on a group the whole batch."""

        @overload
        def __get__(self, worker: None, owner: type) -> SplittingCall[B, P, X]: ...
        @overload
        def __get__(self, worker: object, owner: type) -> Callable[Concatenate[B, P], R]: ...
        def __get__(self, worker: object, owner: type) -> Any: ...


_One = Literal["broadcast", "rank_zero"]
_All = Literal["one_to_all"]
_Scatter = Literal["scatter"]
_Now = Literal["blocking"]
_Later = Literal["future"]
_Plain = Callable[Concatenate[Any, P], R]
_Batched = Callable[Concatenate[Any, B, P], R]
_Seconds = float | None


@overload
def register(
    dispatch: _One, execute: _Now = ..., *, deadline: _Seconds = ...
) -> Callable[[_Plain[P, R]], Whole[P, R, R]]: ...
@overload
def register(
    dispatch: _One, execute: _Later, *, deadline: _Seconds = ...
) -> Callable[[_Plain[P, R]], Whole[P, R, Future[R]]]: ...
@overload
def register(
    dispatch: _All, execute: _Now = ..., *, deadline: _Seconds = ...
) -> Callable[[_Plain[P, R]], Whole[P, R, list[R]]]: ...
@overload
def register(
    dispatch: _All, execute: _Later, *, deadline: _Seconds = ...
) -> Callable[[_Plain[P, R]], Whole[P, R, Future[list[R]]]]: ...
@overload
def register(
    dispatch: _Scatter, execute: _Now = ..., *, deadline: _Seconds = ...
) -> Callable[[_Batched[B, P, R]], Split[B, P, R, R]]: ...
@overload
def register(
    dispatch: _Scatter, execute: _Later, *, deadline: _Seconds = ...
) -> Callable[[_Batched[B, P, R]], Split[B, P, R, Future[R]]]: ...
def register(dispatch: Dispatch, execute: Execute = "blocking", *, deadline: float | None = None) -> Any:
    """Mark a worker's method for worker groups: say on which workers a group calls it, and what the caller gets.

    A replica is a set of consecutive workers that work on the same data; `tensor_parallel`, an argument of
    `WorkerGroup`, is their number.

    Args:
        dispatch: who gets which arguments, and what the caller gets:

            - "broadcast": all workers get the same arguments; the caller gets the result of rank 0. For work that all
              workers do together.
            - "one_to_all": all workers get the same arguments; the caller gets a list of their results.
            - "scatter": the first argument is a batch, split by rows over the replicas; every worker of a replica gets
              the same part, and the replicas' results are joined again.
            - "rank_zero": rank 0 alone gets the arguments; the caller gets its result.

        execute: "blocking" waits for the result; "future" returns a `Future` at once.
        deadline: seconds that a call may take; by default the group's. `math.inf` waits for ever.

    Returns:
        A decorator, which returns the method unchanged.

    Raises:
        ConfigError: an argument or the method's signature makes no sense; the message says why.
    """
    _one_of("dispatch", dispatch, get_args(Dispatch))
    _one_of("execute", execute, get_args(Execute))
    if deadline is not None and not deadline > 0:
        raise ConfigError(f"deadline={deadline}: seconds above 0, or math.inf to wait for ever.")

    def mark(method: Callable[P, R]) -> Callable[P, R]:
        name = getattr(method, "__name__", repr(method))
        if not inspect.isfunction(method):
            raise ConfigError(f"@register is for methods, and {name} is a {type(method).__name__}. Put it above def.")
        kinds = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
        if any(is_kind(method) for is_kind in kinds):
            raise ConfigError(
                f"{name} is a coroutine or a generator; a registered method returns its result. Wrap it in a plain one."
            )
        signature = inspect.signature(method)
        parameters = list(signature.parameters.values())[1:]
        found = Registered(name, dispatch, execute, deadline, signature.replace(parameters=parameters))
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        if found.splits and (not parameters or parameters[0].kind not in positional):
            raise ConfigError(f"{name} has no first argument, which dispatch={dispatch!r} would split.")
        setattr(method, MARK, found)
        return method

    return mark


def _one_of(what: str, given: str, known: Sequence[str]) -> None:
    """Raise a ConfigError that names the argument `what` unless its value is one of the known ones."""
    if given not in known:
        raise ConfigError(
            f"{what}={given!r} is not one of {', '.join(map(repr, known))}.{did_you_mean(str(given), known)}"
        )
