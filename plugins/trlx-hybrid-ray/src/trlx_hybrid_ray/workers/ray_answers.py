"""What actors answer: values in the object store, and how the reason is found where one is missing."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator, Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError, TaskCancelledError

from .failure import GRACE, Call, Fault, Ledger, WorkerError, overdue, verdict
from .future import Answers, left
from .register import timeout


class RayAnswers:
    """Of workers that were called directly.

    Args:
        references: by position.
        upstream: the answers that the workers were given references to.
    """

    def __init__(self, crew: Ledger, call: Call, references: list[Any], upstream: Answers | None) -> None:
        self._crew, self._call, self._references, self._upstream = crew, call, references, upstream

    def all(self, seconds: float) -> list[Any]:
        """See `Answers`."""
        try:
            return list(ray.get(self._references, timeout=timeout(seconds)))
        except RayError as error:
            reason = self._reason(error, self._references, seconds)
            raise reason from reason.__cause__

    def arriving(self, seconds: float) -> Iterator[tuple[int, Any]]:
        """See `Answers`."""
        until = time.monotonic() + seconds
        positions = {reference: position for position, reference in enumerate(self._references)}
        pending = self._references
        while pending:
            ready, pending = ray.wait(pending, num_returns=1, timeout=timeout(left(until)))
            if not ready:
                raise self._reason(GetTimeoutError(), self._references, seconds)
            try:
                value = ray.get(ready[0], timeout=timeout(left(until)))
            except RayError as error:
                reason = self._reason(error, self._references, seconds)
                raise reason from reason.__cause__
            yield positions[ready[0]], value

    def _reason(self, error: RayError, references: Sequence[Any], seconds: float) -> WorkerError:
        if is_timeout(error):
            pending = set(ray.wait(list(references), num_returns=len(references), timeout=0, fetch_local=False)[1])
            missing = [position for position, reference in enumerate(references) if reference in pending]
            return overdue(self._call, missing or [len(references) - 1], seconds)
        if self._upstream is not None:
            try:
                self._upstream.all(0.0)
            except TimeoutError:
                pass
            except WorkerError as earlier:
                return earlier
        grace = GRACE if self._crew.lost is None else 0.0
        done = set(ray.wait(list(references), num_returns=len(references), timeout=grace, fetch_local=False)[0])
        found = [fault_of(position, reference) for position, reference in enumerate(references) if reference in done]
        faults = [one for one in found if one is not None] or [Fault(0, "raised", error)]
        return verdict(self._call, faults, self._crew)

    def done(self) -> bool:
        """See `Answers`."""
        ready, _ = ray.wait(self._references, num_returns=len(self._references), timeout=0, fetch_local=False)
        return len(ready) == len(self._references)

    def references(self) -> list[Any] | None:
        """See `Answers`."""
        return self._references

    def cancel(self) -> None:
        """Take what has not begun out of the workers' queues."""
        for reference in self._references:
            with contextlib.suppress(RayError, ValueError, TypeError):
                ray.cancel(reference)


def is_timeout(error: RayError) -> bool:
    """Whether our wait was too short; a worker that failed with such an error itself has failed."""
    return isinstance(error, GetTimeoutError) and not isinstance(error, RayTaskError)


def fault_of(position: int, reference: Any) -> Fault | None:
    """What went wrong with one call; None where its answer is there."""
    try:
        ray.get(reference, timeout=GRACE)
    except RayError as error:
        return fault(position, error)
    return None


def fault(position: int, error: BaseException) -> Fault:
    """Ray's error, as a fault of the worker at a position."""
    if isinstance(error, RayTaskError):
        cause = error.cause if isinstance(error.cause, BaseException) else error
        return Fault(position, "raised", cause, traceback_of(error))
    if isinstance(error, RayActorError):
        return Fault(position, "raised" if error.actor_init_failed else "died", error)
    return Fault(position, "dropped" if isinstance(error, TaskCancelledError) else "raised", error)


def traceback_of(error: RayTaskError) -> str:
    """The worker's traceback. Ray keeps it in the error's text only, behind colours and remains of its own frames."""
    lines = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).splitlines()
    start = next((number for number, line in enumerate(lines) if line.startswith('  File "')), 0)
    return "\n".join(["Traceback (most recent call last):", *lines[start:]])
