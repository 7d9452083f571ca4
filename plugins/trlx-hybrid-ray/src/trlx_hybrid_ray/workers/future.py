"""Results that are still to come."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from . import dispatch
from .dispatch import Deal
from .failure import Call
from .register import Rule

R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


class Answers(Protocol):
    """What the workers of one call answer. Every position is one of the call's, see `Deal`."""

    def all(self, seconds: float) -> list[Any]:
        """The answers of all workers, those that nobody collects as None.

        Raises:
            WorkerError: a worker raised or died; names the true victim.
            DeadlineError: not everyone answered in time; can be asked again.
        """

    def arriving(self, seconds: float) -> Iterator[tuple[int, Any]]:
        """Position and answer, as they come. Raises as `all` does."""

    def done(self) -> bool:
        """Whether `all` would return, or raise, at once."""

    def references(self) -> list[Any] | None:
        """By position, what another group's call can be given in the place of the answer; None where nothing can."""


@dataclass(frozen=True, slots=True)
class Arrival(Generic[R_co]):
    """What one worker, or one replica, returned.

    Attributes:
        number: of the worker or replica.
        rows: the rows of the batch that it is of; None where no batch was split.
        value: without padding.
    """

    number: int
    rows: range | None
    value: R_co


class Future(Generic[R_co]):
    """The result of a call that goes on. Give it to another group's method as its first argument, or ask it.

    Where both groups cut batches alike, the data then goes from worker to worker and never to this process.
    """

    def __init__(self, rule: Rule, deal: Deal, call: Call, answers: Answers, seconds: float) -> None:
        self._rule, self._deal, self._call, self._answers = rule, deal, call, answers
        self._seconds = seconds
        self._value: list[R_co] = []

    def result(self, timeout: float | None = None) -> R_co:
        """Wait for it.

        Args:
            timeout: seconds; by default the call's deadline. `math.inf` waits for ever.

        Raises:
            WorkerError: a worker raised, or died (`WorkerDiedError`): rank, method, node and its traceback.
            DeadlineError: not everyone answered in time. The call goes on, and can be asked again.
        """
        if not self._value:
            results = self._answers.all(self._seconds if timeout is None else timeout)
            self._value.append(dispatch.collect(self._rule, self._deal, results))
        return self._value[0]

    def done(self) -> bool:
        """Whether `result` would not wait."""
        return bool(self._value) or self._answers.done()

    def parcels(self, replicas: int) -> list[Any] | None:
        """References to the answers that count, where they are a batch cut over so many replicas without padding."""
        if self._rule.dispatch != "scatter" or self._rule.pad is not None or len(self._deal.collected) != replicas:
            return None
        references = self._answers.references()
        return None if references is None else [references[position] for position in self._deal.collected]

    @property
    def answers(self) -> Answers:
        """Of the call: whoever was given its parcels fails with it."""
        return self._answers

    def __repr__(self) -> str:
        return f"<Future of {self._call}, {'done' if self.done() else 'at work'}>"


def stream(deal: Deal, answers: Answers, seconds: float) -> Iterator[Arrival[Any]]:
    """What counts of the answers, as it comes."""
    for position, value in answers.arriving(seconds):
        if position in deal.collected:
            yield Arrival(*dispatch.part(deal, position, value))


def left(until: float) -> float:
    """Seconds until a moment of the monotonic clock, at least 0."""
    return max(0.0, until - time.monotonic())
