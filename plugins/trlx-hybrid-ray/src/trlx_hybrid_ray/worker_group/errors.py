"""What goes wrong in a worker group, and how it is told: rank, node, and the worker's own traceback."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from trlx_hybrid.errors import HybridError, listed

from ..errors import brief
from .worker import Location


class DispatchError(HybridError, ValueError):
    """Arguments cannot be split, or results cannot be joined. Names the place in the data."""


class WorkerError(HybridError):
    """A worker raised. `__cause__` is its exception, where it could be pickled.

    Attributes:
        rank: the worker's rank.
        method: what it was called for.
        node: where it runs.
        traceback: as text, of the worker's process.
    """

    def __init__(self, message: str, *, rank: int, method: str, node: str, traceback: str = "") -> None:
        super().__init__(message)
        self.rank, self.method, self.node, self.traceback = rank, method, node, traceback

    def __reduce__(self) -> tuple[Any, ...]:  # a worker may itself call a group, and fail with it
        return functools.partial(type(self), str(self), **vars(self)), ()


class WorkerDiedError(WorkerError):
    """A worker's process or node is gone. The group cannot be called any more."""


class DeadlineError(WorkerError, TimeoutError):
    """A worker did not answer in time. It may still be at work; a future can be asked again."""


@dataclass(frozen=True, slots=True)
class Failure:
    """What one worker answered instead of a result.

    Attributes:
        position: of the worker among those called.
        kind: its method "raised", the worker "died", or the call was "dropped" before it began.
        error: the exception, as near to the original as it could be had.
        traceback: as text.
    """

    position: int
    kind: Literal["raised", "died", "dropped"]
    error: BaseException
    traceback: str = ""


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a group, as messages speak of it.

    Attributes:
        worker: name of the worker class.
        method: what was called.
        ranks: the ranks that were called; positions are indices into it.
        locations: where each rank of the group runs, by rank; empty before it is known.
    """

    worker: str
    method: str
    ranks: Sequence[int]
    locations: Sequence[Location]

    def __str__(self) -> str:
        return f"{self.worker}.{self.method}"

    def who(self, position: int) -> str:
        """Rank and place of the worker at a position."""
        node = self._node(position)
        return f"rank {self.ranks[position]}" + (f" ({node})" if node else "")

    def failed(self, failures: Sequence[Failure]) -> WorkerError:
        """The error of the true victim: a worker that died makes those that it talked to fail, so death comes first."""
        first = min(failures, key=lambda f: (f.kind != "died", f.kind != "raised", f.position))
        others = [f"{self.ranks[f.position]} ({_told(f.error)})" for f in failures if f is not first]
        also = f"\nFailed as well: ranks {listed(others)}." if others else ""
        who, why = self.who(first.position), _told(first.error)
        if first.kind == "died":
            error = self._error(
                WorkerDiedError,
                first.position,
                f"{self.worker} {who} died while {self} was called: {why}. Its log and the node's say why; out of "
                f"memory is the usual cause. Close the group, make a new one.{also}",
            )
        else:
            trace = f"\n{first.traceback.rstrip()}" if first.traceback else ""
            error = self._error(WorkerError, first.position, f"{self} failed on {who}: {why}.{also}{trace}")
        error.traceback, error.__cause__ = first.traceback, first.error
        return error

    def closed(self) -> WorkerError:
        """The group was closed while the call was under way."""
        return self._error(
            WorkerError,
            0,
            f"The group of {self.worker} was closed before {self} was done on all {len(self.ranks)} workers. Ask for "
            "the result before the group's block is left.",
        )

    def overdue(self, missing: Sequence[int], seconds: float) -> WorkerError:
        """No answer from the workers at these positions: a `DeadlineError`."""
        answered = len(self.ranks) - len(missing)
        return self._error(
            DeadlineError,
            missing[0],
            f"No answer to {self} within {seconds:g} s from {listed([self.who(p) for p in missing], limit=3)}; "
            f"{answered} of {len(self.ranks)} workers answered. They may still be at work, and later calls wait behind "
            "this one: ask the future again, set a longer `deadline`, or close the group.",
        )

    def _node(self, position: int) -> str:
        return str(self.locations[self.ranks[position]]) if self.locations else ""

    def _error(self, kind: type[WorkerError], position: int, text: str) -> WorkerError:
        return kind(text, rank=self.ranks[position], method=self.method, node=self._node(position))


def _told(error: BaseException) -> str:
    return brief(error).rstrip(".: ")
