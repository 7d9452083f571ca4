"""What the calls of one tool took."""

from __future__ import annotations

from dataclasses import dataclass

from .outcome import Outcome


@dataclass(slots=True)
class Usage:
    """What the calls of one tool took, in seconds of wall time and of processor time; and how many never returned."""

    calls: int = 0
    seconds: float = 0.0
    slowest: float = 0.0
    cpu_seconds: float = 0.0
    cut_off: int = 0

    def add(self, outcome: Outcome) -> None:
        """Count one call."""
        self.calls += 1
        self.seconds += outcome.seconds
        self.slowest = max(self.slowest, outcome.seconds)
        self.cpu_seconds += outcome.cpu_seconds
        self.cut_off += outcome.by_tool
