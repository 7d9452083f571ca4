"""Stands for an environment here: same class name, same methods, same docstrings and signatures, as TRL reads them."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import weakref
from collections.abc import Callable
from typing import Any

from ..worker_group.group import timeout
from .fleet import Fleet, Worker
from .lost import EnvironmentLostError
from .seat import Seat, answered, lost_error, result_of

logger = logging.getLogger(__name__)
OPTIONAL = ("get_reward", "close")
"""Methods that a lost environment answers with None: it cannot be scored, and need not be closed."""


class RemoteEnvironment:
    """Base of all. Methods go to the worker; other attributes are read there, and cannot be set here."""

    __slots__ = ("__weakref__", "_finalizer", "_fleet", "_lost", "_name", "_seat", "_turn", "_worker")

    _fleet: Fleet | None
    _worker: Worker | None
    _seat: Seat
    _lost: str | None  # why, once it is
    _turn: int | None  # of the next asynchronous call; only its maker's process keeps them in order

    def __init__(self, fleet: Fleet) -> None:
        self._fleet, self._name = fleet, fleet.name
        self._move_in()

    def _move_in(self) -> None:
        assert self._fleet is not None, "only its maker's process gives an environment a place"
        self._worker, self._seat = self._fleet.seat()
        self._lost, self._turn = None, 0
        self._finalizer = weakref.finalize(self, self._fleet.free, self._worker, self._seat.key)
        self._finalizer.atexit = False

    def _ask(self, verb: str, method: str, *details: Any) -> Any:
        self._refuse_lost()
        reference = getattr(self._seat.handle, verb).remote(self._seat.key, method, *details)
        try:
            return answered(self._name, method, self._seat, reference)
        except EnvironmentLostError as error:
            self._give_up(error, reference)
            raise

    async def _ask_later(self, method: str, args: Any, kwargs: Any) -> Any:
        from ray.exceptions import RayError

        self._refuse_lost()
        reference = self._seat.handle.call.remote(self._seat.key, method, args, kwargs, self._turn)
        if self._turn is not None:
            self._turn += 1
        try:
            waiting = asyncio.wrap_future(reference.future())
            return result_of(self._name, method, await asyncio.wait_for(waiting, timeout(self._seat.deadline)))
        except (RayError, TimeoutError) as error:
            lost = lost_error(self._name, method, self._seat, error)
            lost.__cause__ = error
            self._give_up(lost, reference)
            raise lost from error

    def _refuse_lost(self) -> None:
        if self._lost is not None:
            raise EnvironmentLostError(self._lost)

    def _give_up(self, error: EnvironmentLostError, call: Any) -> None:
        """After a death, and after a call that may still run, nothing more can be asked of this environment."""
        if error.__cause__ is None:
            return  # it returned what cannot be sent, and is well
        self._lost = str(error)
        if self._fleet is not None and self._worker is not None:
            died = not isinstance(error.__cause__, TimeoutError)
            self._fleet.lost(self._worker, self._seat.key, call, died=died)

    def _missing(self, error: EnvironmentLostError) -> None:
        """What an environment answers that turns out to be lost when its episode is over: None, said aloud.

        Raises:
            EnvironmentLostError: it is well, and returned what cannot be sent.
        """
        if self._lost is None:
            raise error
        logger.warning("The episode of an environment is over, and cannot be scored by it: %s", error)

    def _renew(self) -> None:
        """Another environment in the place of one that is lost."""
        self._finalizer()
        self._move_in()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if self._lost is not None:
            return None
        try:
            return self._ask("read", name)
        except EnvironmentLostError as error:
            self._missing(error)
            return None

    def __reduce__(self) -> Any:
        return _visiting, (type(self), self._name, self._seat, self._lost)

    def __repr__(self) -> str:
        return f"<remote environment {self._name!r} in {self._seat.where}>"


def _visiting(kind: type[RemoteEnvironment], name: str, seat: Seat, lost: str | None) -> RemoteEnvironment:
    """The same environment, seen from another process: a reward function's worker."""
    found = object.__new__(kind)
    found._fleet, found._worker, found._name, found._seat, found._lost = None, None, name, seat, lost
    found._turn = None
    return found


@functools.cache  # TRL tells environments apart by their class, so one class has one proxy
def proxy_class(environment: type[Any]) -> type[RemoteEnvironment]:
    """The class that stands for an environment class."""
    methods = {
        name: _method(environment, name, function)
        for name, function in inspect.getmembers(environment, predicate=inspect.isfunction)
        if not name.startswith("_")
    }
    about = {"__slots__": (), "__doc__": environment.__doc__, "__module__": __name__}
    return type(environment.__name__, (RemoteEnvironment,), about | methods)


def _method(environment: type, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    method: Any
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            if self._lost is not None and name in OPTIONAL:
                return None
            if self._lost is not None and name == "reset" and self._fleet is not None:
                await asyncio.to_thread(self._renew)
            try:
                return await self._ask_later(name, args, kwargs)
            except EnvironmentLostError as error:
                if name not in OPTIONAL:
                    raise
                self._missing(error)
                return None

    elif name == "reset":

        @functools.wraps(function)
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            if self._lost is None or self._fleet is None:
                try:
                    return self._ask("call", name, args, kwargs)
                except EnvironmentLostError:
                    if self._worker is None or not self._worker.dead:
                        raise
            self._renew()  # its episode has not begun, so nothing is lost with the old one
            return self._ask("call", name, args, kwargs)

    else:

        @functools.wraps(function)
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            if self._lost is not None and name in OPTIONAL:
                return None
            try:
                return self._ask("call", name, args, kwargs)
            except EnvironmentLostError as error:
                if name not in OPTIONAL:
                    raise
                self._missing(error)
                return None

    if isinstance(inspect.getattr_static(environment, name), staticmethod):  # it has no `self` that could be left out
        signature = inspect.signature(function)
        own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        method.__signature__ = signature.replace(parameters=[own, *signature.parameters.values()])
    return method  # type: ignore[no-any-return]
