"""The rewards of a batch as they come in, row by row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .reward_worker import Scored


class Tally:
    """Which rows have a reward, and what was logged along with them.

    Attributes:
        rewards: by row; None where there is none, or the function said None.
        deaths: how often workers died over this batch.
    """

    def __init__(self, rows: int) -> None:
        self.rewards: list[float | None] = [None] * rows
        self.deaths = 0
        self._open = dict.fromkeys(range(rows))
        self._extra: dict[str, list[Any]] = {}
        self._metrics: dict[str, list[tuple[int, float]]] = {}

    def missing(self) -> list[int]:
        """Rows that nobody has scored, in order."""
        return list(self._open)

    def add(self, rows: Sequence[int], scored: Scored) -> None:
        """Take in what a worker made of these rows."""
        for row, reward in zip(rows, scored.rewards, strict=True):
            self.rewards[row] = reward
            del self._open[row]
        for column, values in scored.extra.items():
            every = self._extra.setdefault(column, [None] * len(self.rewards))
            for row, value in zip(rows, values, strict=True):
                every[row] = value
        for name, value in scored.metrics:
            self._metrics.setdefault(name, []).append((len(rows), value))

    def report(
        self, log_extra: Callable[[str, list[Any]], None] | None, log_metric: Callable[[str, float], None] | None
    ) -> None:
        """Log what the workers logged: columns in the order of rows, metrics as the mean over rows."""
        for column, values in self._extra.items():
            assert log_extra is not None, "workers log only what they were given a logger for"
            log_extra(column, values)
        for name, found in self._metrics.items():
            assert log_metric is not None, "workers log only what they were given a logger for"
            log_metric(name, sum(rows * value for rows, value in found) / sum(rows for rows, _ in found))
