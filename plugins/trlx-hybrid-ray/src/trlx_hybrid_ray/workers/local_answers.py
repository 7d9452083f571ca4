"""What workers in threads answer."""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ALL_COMPLETED, FIRST_COMPLETED, FIRST_EXCEPTION, wait
from concurrent.futures import Future as Promise
from typing import Any

from .failure import GRACE, Call, Fault, Ledger, WorkerError, overdue, verdict
from .future import Answers, left
from .parcel import Parcel
from .register import timeout


class DroppedError(Exception):
    """A worker never began with this."""


class LocalAnswers:
    """Of workers in threads: `Parcel`s, but for constructors."""

    def __init__(self, crew: Ledger, call: Call, promises: list[Promise[Any]], upstream: Answers | None) -> None:
        self._crew, self._call, self._promises, self._upstream = crew, call, promises, upstream

    def all(self, seconds: float) -> list[Any]:
        """See `Answers`."""
        finished, pending = wait(self._promises, timeout(seconds), FIRST_EXCEPTION)
        if pending and not any(_error(promise) for promise in finished):
            raise overdue(self._call, [p for p, promise in enumerate(self._promises) if promise in pending], seconds)
        if any(_error(promise) for promise in finished):
            raise self._reason()
        return [_value(promise) for promise in self._promises]

    def arriving(self, seconds: float) -> Iterator[tuple[int, Any]]:
        """See `Answers`."""
        until = time.monotonic() + seconds
        pending = {promise: position for position, promise in enumerate(self._promises)}
        while pending:
            finished, _ = wait(pending, timeout(left(until)), FIRST_COMPLETED)
            if not finished:
                raise overdue(self._call, sorted(pending.values()), seconds)
            for promise in sorted(finished, key=pending.__getitem__):
                if _error(promise) is not None:
                    raise self._reason()
                yield pending.pop(promise), _value(promise)

    def _reason(self) -> WorkerError:
        if self._upstream is not None:
            try:
                self._upstream.all(0.0)
            except TimeoutError:
                pass
            except WorkerError as earlier:
                return earlier
        wait(self._promises, GRACE, ALL_COMPLETED)
        errors = [(position, _error(promise)) for position, promise in enumerate(self._promises)]
        faults = [fault_of(position, error) for position, error in errors if error is not None]
        return verdict(self._call, faults, self._crew)

    def done(self) -> bool:
        """See `Answers`."""
        return all(promise.done() for promise in self._promises)

    def references(self) -> list[Any] | None:
        """See `Answers`."""
        return list(self._promises)


def fault_of(position: int, error: BaseException) -> Fault:
    """What went wrong with one call."""
    if isinstance(error, DroppedError):
        return Fault(position, "dropped", error)
    trace = "".join(traceback.format_exception(error))
    return Fault(position, "died" if isinstance(error, SystemExit) else "raised", error, trace)


def _error(promise: Promise[Any]) -> BaseException | None:
    return promise.exception() if promise.done() else None


def _value(promise: Promise[Any]) -> Any:
    value = promise.result()
    return value.copy() if isinstance(value, Parcel) else value
