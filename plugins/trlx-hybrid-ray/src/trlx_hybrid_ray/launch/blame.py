"""Which failure came first, and which ones only followed from it. Pure.

When one rank dies, all others fail too, a moment later, in whatever collective they were: the error that a user sees
last, and often the only one that a launcher shows, is that of an innocent rank.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

LOST_PEER = re.compile(
    r"connection (closed|reset|refused|was|lost)|closed by (remote )?peer|broken pipe|socket (timeout|closed|error)"
    r"|\b(nccl|gloo|tcpstore|processgroup\w*|rendezvous|watchdog)\b|timed out waiting for .*(rank|client|key)"
    r"|which never entered it|did not complete bucket|another rank",
    re.IGNORECASE,
)
"""Texts of errors by which torch, vLLM and the weight syncs say that another rank is gone."""
LOST_PEER_TYPES = {"DistBackendError", "DistNetworkError", "DistStoreError"}


class How(Enum):
    """How a rank ended."""

    FINISHED = "finished"
    RAISED = "raised"
    EXITED = "exited"
    DIED = "died"
    NODE_LOST = "node lost"
    SILENT = "silent"
    UNWATCHED = "unwatched"
    NOT_STARTED = "not started"


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """How one rank ended.

    Attributes:
        rank: which one.
        how: in which way.
        time: when, in seconds on the launcher's clock; what the launcher stopped afterwards has a later one.
        code: exit code, or None where the process ended without telling.
        error: the exception in one line, or what Ray says.
        traceback: of the exception.
        lost_peer: the exception says that another rank is gone.
    """

    rank: int
    how: How
    time: float
    code: int | None = None
    error: str = ""
    traceback: str = ""
    lost_peer: bool = False

    @property
    def failed(self) -> bool:
        """Whether this ends the run."""
        return self.how is not How.FINISHED

    @property
    def signalled(self) -> bool:
        """Whether a signal to all processes of a job can be what ended it, or what it followed from."""
        return self.how in (How.DIED, How.NODE_LOST) or self.lost_peer or self.error == "KeyboardInterrupt"


def first_failure(reports: Sequence[Report]) -> Report | None:
    """The failure that the others followed from: the earliest whose error does not point at another rank.

    A process that ended without a word counts from the moment at which its warden saw it, which can be a little later
    than a peer's error about it. So errors that speak of a lost peer come into question only where there is nothing
    else, whatever the clocks say. Among the rest the clock decides: a process can also be aborted because of another
    rank's exception, as NCCL's watchdog does.
    """
    failures = [report for report in reports if report.failed]
    return min(failures, key=lambda report: (report.lost_peer, report.time, report.rank), default=None)


def is_consequence(error: BaseException) -> bool:
    """Whether an exception, or one that it was raised from, says that another rank is gone."""
    return any(
        {kind.__name__ for kind in type(link).__mro__} & LOST_PEER_TYPES or LOST_PEER.search(str(link))
        for link in _chain(error)
    )


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
