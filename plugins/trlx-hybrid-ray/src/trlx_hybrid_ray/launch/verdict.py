"""What the launcher says at the end: which rank failed first, where, how, and what became of the others. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from signal import Signals

from trlx_hybrid.errors import listed

from .blame import How, Report, first_failure
from .rank_place import RankPlace

WORDLESS = (
    "its process ended without a Python error. Something killed it (the out-of-memory killer, kill -9), native code "
    "crashed, or the script called os._exit."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """How a start of all ranks ended.

    Attributes:
        places: the ranks.
        reports: of those that ended by themselves.
        interrupted: the signal with which the user ended the run.
        remaining: ranks whose process could not be ended, or not be reached to see.
        pids: processes, where known.
    """

    places: Sequence[RankPlace]
    reports: Sequence[Report]
    interrupted: Signals | None = None
    remaining: Sequence[int] = ()
    pids: Mapping[int, int]

    @property
    def first(self) -> Report | None:
        """The failure that the others followed from."""
        return first_failure(self.reports)

    @property
    def exit_code(self) -> int:
        """As a shell would have it: that of the rank that failed first, 128 + n for signal n."""
        if self.first is None:
            return 0 if self.interrupted is None else 128 + int(self.interrupted)
        return self.first.code or 1

    def text(self) -> str:
        """For standard error; empty where all went well. What matters most stands last."""
        lines = []
        if self.remaining:
            ranks = listed([f"{rank} ({self._where(rank)})" for rank in self.remaining])
            lines.append(f"Not known to have ended: rank {ranks}. Look there before the next start.")
        if self.first is not None:
            lines += [*self._others(self.first), *self._trace(self.first), self._named(self.first)]
        elif self.interrupted is not None:
            lines.append(f"Stopped by {self.interrupted.name}; every rank was ended.")
        return "\n".join(lines)

    def _where(self, rank: int) -> str:
        pid = self.pids.get(rank)
        return self.places[rank].where + (f", pid {pid}" if pid is not None else "")

    def _named(self, first: Report) -> str:
        if first.how in (How.NODE_LOST, How.SILENT):
            place = self.places[first.rank]
            lost = [str(p.rank) for p in self.places if p.node == place.node]
            why = "its raylet ended" if first.how is How.NODE_LOST else first.error
            plural = "s" if len(lost) > 1 else ""
            return f"Node {place.address} ({place.node[:6]}) was lost, with rank{plural} {listed(lost, 8)}: {why}."
        if first.how is How.NOT_STARTED:
            return f"Rank {first.rank} did not start ({self._where(first.rank)}): {first.error}"
        why = {
            How.DIED: WORDLESS,
            How.EXITED: f"the script ended with exit code {first.code}.",
            How.UNWATCHED: "the connection to its warden broke. Its node is gone, or the warden was killed.",
        }.get(first.how, _line(first.error))
        return f"Rank {first.rank} failed first ({self._where(first.rank)}): {why}"

    @staticmethod
    def _trace(first: Report) -> list[str]:
        return ["", *first.traceback.rstrip().splitlines(), ""] if first.traceback else []

    def _others(self, first: Report) -> list[str]:
        """Who failed later, and where every error speaks of a lost peer, who had left before."""
        lines = []
        finished = [str(r.rank) for r in self.reports if not r.failed and r.time <= first.time]
        if first.lost_peer and finished:
            lines.append(f"Rank {listed(finished, 8)} had finished the script before: did it skip a collective call?")
        node = self.places[first.rank].node
        lost = first.how in (How.NODE_LOST, How.SILENT)
        followed = [
            r
            for r in self.reports
            if r.failed and r.rank != first.rank and not (lost and self.places[r.rank].node == node)
        ]
        lines += [f"Rank {r.rank} failed after it: {_line(r.error) or r.how.value}" for r in followed[:3]]
        if len(followed) > 3:
            lines.append(f"So did rank {listed([str(r.rank) for r in followed[3:]], 8)}.")
        return lines


def _line(text: str) -> str:
    """The first line, cut where it is long."""
    first = text.strip().partition("\n")[0]
    return first if len(first) <= 300 else first[:299] + "…"
