"""How a run ends: from the first failure to the last process. Pure: told what happened and when, it says what to do.

    running ──first failure──▶ settling ──named──▶ stopping ──▶ over
       └──────────────all ranks finished, Ctrl-C──────┘

A failure is not named at once, for the first that arrives is often that of a rank that lost its peer. Settling waits a
moment for the others, and longer while every error points at somebody else. Then the remaining ranks get SIGTERM and,
after a while, SIGKILL.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from signal import SIGINT, SIGKILL, SIGTERM, Signals

from .blame import How, Report, first_failure


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Seconds. Together they keep a run's end below 30.

    Attributes:
        settle: from the first failure until it is named.
        blame: the same while each failure points at another rank.
        grace: from the signal to stop until SIGKILL.
        kill: from SIGKILL until a process counts as one that cannot be ended.
        silence: without a sign of life from a node, until it counts as lost.
        start: for a rank's warden to call.
    """

    settle: float = 1.5
    blame: float = 13.0
    grace: float = 8.0
    kill: float = 5.0
    silence: float = 10.0
    start: float = 60.0

    @classmethod
    def lifted(cls) -> Limits:
        """For debugging: nobody is lost for being silent, or given up while starting."""
        return cls(silence=math.inf, start=math.inf)


@dataclass(slots=True)
class _Rank:
    ended: bool = False  # its process is gone
    clean: bool = False  # and all that it left, as far as can be known
    report: Report | None = None


@dataclass(slots=True)
class Course:
    """The course of one start of all ranks.

    Attributes:
        limits: the deadlines.
        interrupted: the signal that the user ended the run with.
        stopped_at: when the ranks were told to stop.
    """

    world: int
    limits: Limits = field(default_factory=Limits)
    interrupted: Signals | None = None
    stopped_at: float | None = None
    _ranks: list[_Rank] = field(init=False)
    _first_at: float | None = None
    _stop_with: Signals = SIGTERM
    _kill_at: float = math.inf
    _sent: dict[int, Signals] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._ranks = [_Rank() for _ in range(self.world)]

    def reported(self, report: Report, now: float) -> None:
        """A rank has finished or failed. What comes after the order to stop is its effect, and does not count."""
        rank = self._ranks[report.rank]
        if rank.report is None and self.stopped_at is None:
            rank.report = report
            if report.failed and self._first_at is None:
                self._first_at = now

    def ended(self, rank: int) -> None:
        """A rank's process is gone; what it left is being removed."""
        self._ranks[rank].ended = True

    def clean(self, rank: int) -> None:
        """Nothing of a rank is left, or nobody is there any more who could tell."""
        self._ranks[rank].ended = self._ranks[rank].clean = True

    def interrupt(self, which: Signals, now: float) -> None:
        """The user wants the end: with Ctrl-C, and with the second one at once.

        A signal to all processes of a job may have reached ranks first: what it ended has not failed.
        """
        if self.interrupted is not None:
            self._kill_at = now
            return
        self.interrupted = which
        if self.stopped_at is None:
            for rank in self._ranks:
                if rank.report is not None and rank.report.signalled:
                    rank.report = None
            self._stop(which if which == SIGINT else SIGTERM, now)

    def signals(self, now: float) -> list[tuple[int, Signals]]:
        """(rank, signal) that are due, each once."""
        if self.stopped_at is None and self._first_at is not None and now >= self._named_at():
            self._stop(SIGTERM, now)
        if self.stopped_at is None:
            return []
        due = SIGKILL if now >= self._kill_at else self._stop_with
        ranks = [i for i, rank in enumerate(self._ranks) if not rank.ended and self._sent.get(i) not in (due, SIGKILL)]
        self._sent.update(dict.fromkeys(ranks, due))
        return [(rank, due) for rank in ranks]

    def over(self, now: float) -> bool:
        """Whether all ranks are gone with everything, by no signal that may reach us as well, or all was tried."""
        first = first_failure(self.reports)
        settling = self.stopped_at is None and first is not None and first.signalled
        return (all(rank.clean for rank in self._ranks) and not settling) or now >= self._kill_at + self.limits.kill

    @property
    def reports(self) -> list[Report]:
        """Of the ranks that have finished or failed by themselves, in rank order."""
        return [rank.report for rank in self._ranks if rank.report is not None]

    @property
    def remaining(self) -> list[int]:
        """Ranks whose process is not known to be gone."""
        return [i for i, rank in enumerate(self._ranks) if not rank.ended]

    def _named_at(self) -> float:
        assert self._first_at is not None
        first = first_failure(self.reports)
        pointing = first is not None and first.lost_peer and len(self.reports) < self.world
        return self._first_at + (self.limits.blame if pointing else self.limits.settle)

    def _stop(self, which: Signals, now: float) -> None:
        self.stopped_at, self._stop_with = now, which
        self._kill_at = now + self.limits.grace


def silent(rank: int, now: float, limits: Limits) -> Report:
    """For a rank whose node no longer says anything."""
    error = f"no sign of life for {limits.silence:g} s"
    return Report(rank=rank, how=How.SILENT, time=now - limits.silence, error=error)
