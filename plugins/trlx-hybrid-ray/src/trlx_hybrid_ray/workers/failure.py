"""What goes wrong in a worker group, and whom the message names."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from trlx_hybrid.errors import ConfigError, HybridError, listed

GRACE = 2.0
"""Seconds that the others are given once one has failed: a worker's death is often noticed after the errors it causes
in those that talked to it, and it is the death that has to be named."""


class DispatchError(HybridError, ValueError):
    """Arguments cannot be dealt out, or results cannot be put together. Names the place in the data."""


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
        about: dict[str, Any] = {
            "rank": self.rank,
            "method": self.method,
            "node": self.node,
            "traceback": self.traceback,
        }
        return functools.partial(type(self), str(self), **about), ()


class WorkerDiedError(WorkerError):
    """A worker's process or node is gone. The group cannot be called any more."""


class DeadlineError(WorkerError, TimeoutError):
    """A worker did not answer in time. It may still be at work; a future can be asked again."""


@dataclass(frozen=True, slots=True)
class Home:
    """Where a worker turned out to run.

    Attributes:
        node: Ray's id of the node; "this process" for a local worker.
        address: its IP address.
        pid: of the worker's process.
    """

    node: str
    address: str
    pid: int

    def __str__(self) -> str:
        return f"node {self.node[:12]} at {self.address}, pid {self.pid}" if self.address else self.node


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a group, as messages speak of it.

    Attributes:
        worker: name of the worker class.
        method: what was called.
        ranks: the ranks that were called, in order; whatever else is numbered by position refers to it.
        homes: where each rank of the group runs, by rank.
    """

    worker: str
    method: str
    ranks: Sequence[int]
    homes: Sequence[Home]

    def __str__(self) -> str:
        return f"{self.worker}.{self.method}"

    def home(self, position: int) -> str:
        """Rank and place of the worker at a position."""
        rank = self.ranks[position]
        return f"rank {rank} ({self.homes[rank]})" if self.homes else f"rank {rank}"


@dataclass(frozen=True, slots=True)
class Fault:
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


def verdict(call: Call, faults: Sequence[Fault], ledger: Ledger) -> WorkerError:
    """The error to raise: what these workers did, or what had happened to the group before."""
    if all(fault.kind != "raised" for fault in faults):
        if ledger.lost is not None:
            return ledger.lost
        if ledger.over:
            return closed(call)
    return ledger.lose(blamed(call, faults))


def blamed(call: Call, faults: Sequence[Fault]) -> WorkerError:
    """The error of the true victim: a worker that died makes those it talked to fail, so death comes first."""
    fault = min(faults, key=lambda f: (f.kind != "died", f.kind != "raised", f.position))
    others = [f"{call.ranks[f.position]} ({_one_line(f.error)})" for f in faults if f is not fault]
    also = f"\nFailed as well: ranks {listed(others)}." if others else ""
    rank = call.ranks[fault.position]
    node = str(call.homes[rank]) if call.homes else ""
    about = {"rank": rank, "method": call.method, "node": node, "traceback": fault.traceback}
    if fault.kind == "died":
        message = (
            f"{call.worker} {call.home(fault.position)} died while {call} was called: {_one_line(fault.error)}. "
            f"Its log and the node's say why; out of memory is the usual cause. Close the group, make a new one.{also}"
        )
        died = WorkerDiedError(message, **about)  # type: ignore[arg-type]
        died.__cause__ = fault.error
        return died
    trace = f"\n{fault.traceback.rstrip()}" if fault.traceback else ""
    message = f"{call} failed on {call.home(fault.position)}: {_one_line(fault.error)}.{also}{trace}"
    raised = WorkerError(message, **about)  # type: ignore[arg-type]
    raised.__cause__ = fault.error
    return raised


def closed(call: Call) -> WorkerError:
    """The group was closed while the call was under way."""
    rank = call.ranks[0]
    return WorkerError(
        f"The group of {call.worker} was closed before {call} was done on all {len(call.ranks)} workers. Ask for the "
        "result before the group's block is left.",
        rank=rank,
        method=call.method,
        node=str(call.homes[rank]) if call.homes else "",
    )


def overdue(call: Call, missing: Sequence[int], seconds: float) -> DeadlineError:
    """No answer from the workers at these positions."""
    position = missing[0]
    rank = call.ranks[position]
    waited = listed([call.home(p) for p in missing], limit=3)
    message = (
        f"No answer to {call} within {seconds:g} s from {waited}; {len(call.ranks) - len(missing)} of "
        f"{len(call.ranks)} workers answered. They may still be at work, and later calls wait behind this one: ask the "
        "future again, set a longer `deadline`, or close the group."
    )
    node = str(call.homes[rank]) if call.homes else ""
    return DeadlineError(message, rank=rank, method=call.method, node=node)


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}{'…' if len(text) > 300 else ''}".rstrip(".: ")


class Ledger(Protocol):
    """Of a group: what happened to it that its calls have to tell."""

    lost: WorkerDiedError | None
    """Of the first worker that died."""
    over: bool
    """Whether it was closed."""

    def lose(self, error: WorkerError) -> WorkerError:
        """Note an error, and return it."""


def refuse(worker: str, ledger: Ledger) -> None:
    """Raise what stands against calling anybody.

    Raises:
        WorkerDiedError: a worker died earlier.
        ConfigError: the group was closed.
    """
    if ledger.lost is not None:
        raise ledger.lost
    if ledger.over:
        raise ConfigError(f"This group of {worker} was closed. Make a new one.")
