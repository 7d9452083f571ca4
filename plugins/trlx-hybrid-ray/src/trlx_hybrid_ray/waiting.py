"""Waits for what actors answer. They end, and count only the time in which this process ran."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

K = TypeVar("K")

LOOK = 1.0  # seconds of waiting at a time


class RunningClock:
    """Seconds that this process ran since the clock was made; looked at once a second or so.

    A process that is stopped (SIGSTOP, a suspended machine) hears nothing of the others meanwhile. That time says
    nothing about them: of the time between two looks, no more than `2 * LOOK` counts.
    """

    def __init__(self) -> None:
        self._seconds, self._looked = 0.0, time.monotonic()

    def now(self) -> float:
        """Seconds so far."""
        before, self._looked = self._looked, time.monotonic()
        self._seconds += min(self._looked - before, 2 * LOOK)
        return self._seconds


def wait(
    references: Sequence[Any], seconds: float, count: int | None = None, clock: RunningClock | None = None
) -> tuple[list[Any], list[Any]]:
    """As `ray.wait`, for so many seconds in which this process ran: those that are there, and those that are not.

    Args:
        count: how many are enough; by default all.
        clock: that the seconds are read from; by default they begin now.
    """
    import ray

    clock, count = clock or RunningClock(), len(references) if count is None else count
    while references:
        look = min(LOOK, max(0.0, seconds - clock.now()))
        ready, late = ray.wait(list(references), num_returns=count, timeout=look)
        if len(ready) >= count or clock.now() >= seconds:
            return ready, late
    return [], []


async def arrives(reference: Any, seconds: float) -> bool:
    """The same for one reference, on an event loop: whether it is there."""
    future, clock = asyncio.wrap_future(reference.future()), RunningClock()
    try:
        while not future.done() and (left := seconds - clock.now()) > 0:
            await asyncio.wait([future], timeout=min(LOOK, left))
        return future.done()
    finally:
        if not future.cancel():
            future.exception()  # or asyncio logs that nobody asked for it


def replies(calls: Mapping[K, Any], seconds: float) -> Iterator[tuple[K, Any]]:
    """What actors answer, each as soon as it is there: the result, or in its place the error that Ray has instead.

    Args:
        calls: references, by whatever the caller knows them by.
        seconds: for all of them; those that are late then come last, as a `GetTimeoutError`. `math.inf` waits for ever.
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
