"""What a user sees of the weight syncs: a line for each, and a warning where they take too much of the time."""

from __future__ import annotations

import logging
import statistics
import sys
from collections import deque
from collections.abc import Callable

logger = logging.getLogger(__name__)

SHOWN = 3
"""Lines that are printed even where nobody set up logging: the first sync connects the ranks, the third is as all
that follow."""

WARM, SEEN = 3, 3
LIMIT = 0.1


class SyncLog:
    """Of one rank. Told of every sync.

    Args:
        rank: rank 0 speaks for all; every rank logs.
        advice: what would make a sync shorter; asked for once at most.
    """

    def __init__(self, rank: int, advice: Callable[[], str]) -> None:
        self._speaks, self._advice = rank == 0, advice
        self._syncs = 0
        self._ended: float | None = None
        self._iterations: deque[tuple[float, float]] = deque(maxlen=SEEN)
        self._warned = False

    def done(self, started: float, ended: float, moved: str) -> None:
        """A sync went from one time to another, in seconds of one clock.

        It is `LIMIT` of an iteration, which is the time between the ends of two syncs, when each of the last `SEEN`
        was, the first `WARM` ones left out.
        """
        self._syncs += 1
        line = f"[Reshard] duration={ended - started:.3f}s, {moved}"
        logger.info(line)
        if self._speaks and self._syncs <= SHOWN and not logger.isEnabledFor(logging.INFO):
            print(line, file=sys.stderr, flush=True)
        before, self._ended = self._ended, ended
        if before is not None and self._syncs > WARM:
            self._iterations.append((ended - started, ended - before))
        self._warn()

    def _warn(self) -> None:
        seen = self._iterations
        if self._warned or len(seen) < SEEN or any(taken <= LIMIT * all_of_it for taken, all_of_it in seen):
            return
        self._warned = True
        if self._speaks:
            taken, iteration = (statistics.median(values) for values in zip(*seen, strict=True))
            logger.warning(
                "[Reshard] Resharding takes %.0f%% of an iteration, %.3g s of %.3g s. %s",
                100 * taken / iteration,
                taken,
                iteration,
                self._advice(),
            )
