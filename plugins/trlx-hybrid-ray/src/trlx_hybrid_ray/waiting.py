"""Functions that wait for answers of Ray actors, with a deadline, and types for Ray's references and handles. Only
time in which this process ran counts towards a deadline, not time in which it was suspended."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

if TYPE_CHECKING:
    from ray import ObjectRef

K = TypeVar("K")

LOOK = 1.0  # seconds of one wait

Reference: TypeAlias = "ObjectRef[Any]"
"""Ray's reference to the answer of a call."""


class Method(Protocol):
    """A method of an actor, as a type for type checkers: the object that an attribute of Ray's handle returns."""

    def remote(self, *args: object, **kwargs: object) -> Reference:
        """Call the method and return at once, with a reference to the answer."""


class Handle(Protocol):
    """Ray's handle of an actor, as a type for type checkers: any attribute is a method of the actor. Ray's own type has
    no methods."""

    def __getattr__(self, name: str) -> Method: ...


class RunningClock:
    """A clock that counts only the seconds in which this process ran, for deadlines on answers of other processes. Call
    `now` about once a second, or time is lost.

    A process that is stopped (SIGSTOP, a suspended machine) receives nothing from other processes meanwhile. So the
    time of the stop does not show that another process is late. Between two calls of `now`, at most `2 * LOOK` seconds
    count.
    """

    def __init__(self) -> None:
        self._seconds, self._looked = 0.0, time.monotonic()

    def now(self) -> float:
        """Return the wall-clock seconds since the clock was made, without the time in which this process was stopped or
        its machine suspended."""
        before, self._looked = self._looked, time.monotonic()
        self._seconds += min(self._looked - before, 2 * LOOK)
        return self._seconds


def wait(
    references: Sequence[Reference], seconds: float, count: int | None = None, clock: RunningClock | None = None
) -> tuple[list[Reference], list[Reference]]:
    """Wait as `ray.wait` does, but count only seconds in which this process ran. Returns two lists: the references that
    are ready and those that are not.

    Args:
        count: the number of ready references to wait for; by default all.
        clock: the clock that counts the seconds, so that several waits can share one limit; by default a new one, which
            begins now.
    """
    import ray

    clock, count = clock or RunningClock(), len(references) if count is None else count
    while references:
        look = min(LOOK, max(0.0, seconds - clock.now()))
        ready, late = ray.wait(list(references), num_returns=count, timeout=look)
        if len(ready) >= count or clock.now() >= seconds:
            return ready, late
    return [], []


async def arrives(reference: Reference, seconds: float) -> bool:
    """Wait on the event loop until one of Ray's references is ready, and return True; return False after `seconds`.
    Time in which this process was stopped, or its machine suspended, does not count."""
    future, clock = asyncio.wrap_future(reference.future()), RunningClock()
    try:
        while not future.done() and (left := seconds - clock.now()) > 0:
            await asyncio.wait([future], timeout=min(LOOK, left))
        return future.done()
    finally:
        if not future.cancel():
            future.exception()  # otherwise asyncio logs that the exception was never retrieved


def replies(calls: Mapping[K, Reference], seconds: float) -> Iterator[tuple[K, Any]]:
    """Wait for the answers to actors' calls, and yield each as (key, answer) as soon as it is ready. Where a call
    failed, Ray's error is yielded as its answer rather than raised.

    Args:
        calls: the references to the answers, by keys of the caller's choice.
        seconds: the limit for all calls together. Late calls come last, each with a `GetTimeoutError` as its answer.
            `math.inf` waits for ever.
    """
    import ray

    clock, pending = RunningClock(), {reference: key for key, reference in calls.items()}
    while pending:
        ready, late = wait(list(pending), seconds, 1, clock)
        for reference in ready or late:
            try:
                found = ray.get(reference, timeout=None if ready else 0)
            except ray.exceptions.GetTimeoutError:
                found = ray.exceptions.GetTimeoutError(f"no answer within {seconds:g} s")
            except ray.exceptions.RayError as error:
                found = error
            yield pending.pop(reference), found
