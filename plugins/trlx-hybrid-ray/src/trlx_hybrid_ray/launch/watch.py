"""Follows all ranks of one start until the last of their processes is gone."""

from __future__ import annotations

import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from signal import Signals
from typing import Any

from trlx_hybrid.errors import listed

from .blame import How, Report
from .course import Course, Limits, silent
from .errors import RankStartError
from .logs import Printer
from .rank_place import RankPlace
from .switchboard import Message, Switchboard
from .verdict import Verdict

TICK = 0.2  # seconds
REMINDER = 60.0  # seconds between two lines about what is waited for
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

Say = Callable[[str], None]


class Watch:
    """Reads what wardens say, asks Ray about ranks whose warden has not called, and sends what the course demands.

    Args:
        places: the ranks.
        pids: their processes.
        board: where their wardens call.
        runs: Ray's references to what the ranks do, by rank. One that ends before its warden called has failed.
        kill: ends a rank, by its number, the way Ray does; for ranks that no warden watches yet.
        limits: the deadlines.
        printer: for what ranks print.
        say: for a line of the launcher's own.
    """

    def __init__(
        self,
        places: Sequence[RankPlace],
        pids: Mapping[int, int],
        board: Switchboard,
        runs: Mapping[int, Any],
        kill: Callable[[int], None],
        limits: Limits,
        printer: Printer,
        say: Say,
    ) -> None:
        self._places, self._pids, self._board, self._runs = places, pids, board, runs
        self._kill, self._limits, self._printer, self._say = kill, limits, printer, say
        self._course = Course(len(places), limits)
        self._quiet = dict.fromkeys(range(len(places)), 0.0)  # seconds without a word, by rank
        self._called: set[int] = set()
        self._finished: dict[int, float] = {}
        self._stops: deque[Signals] = deque()
        self._hopeless: RankStartError | None = None
        self._began = self._looked = self._reminded = self._listened = time.monotonic()

    def until_over(self) -> Verdict:
        """Wait for the end, and bring it about where it must be.

        Raises:
            RankStartError: a rank cannot run the script where it is; the others were ended.
        """
        with self._stoppable():
            while not self._course.over(time.monotonic()):
                self._step()
        self._printer.close()
        if self._hopeless is not None:
            raise self._hopeless
        return Verdict(
            places=self._places,
            reports=self._course.reports,
            interrupted=self._course.interrupted,
            remaining=self._course.remaining,
            pids=self._pids,
        )

    def _step(self) -> None:
        for message in self._board.poll(TICK):
            self._quiet[message.actor] = 0.0
            self._take(message)
        now = time.monotonic()
        self._ask_ray(now)
        self._listen_for_silence(now)
        while self._stops:
            which = self._stops.popleft()
            if self._course.interrupted is None:
                self._say(f"{which.name}: ending all ranks. Once more kills them at once.")
            self._course.interrupt(which, now)
        for rank, which in self._course.signals(now):
            if not self._board.send(rank, which):
                self._kill(rank)
                self._course.clean(rank)
        self._printer.tick()
        self._remind(now)

    def _take(self, message: Message) -> None:
        rank, fields = message.actor, message.fields
        if message.event == "output":
            self._printer.write(rank, message.error, message.data)
        elif message.event == "connected":
            self._called.add(rank)
        elif message.event == "failed":
            told = {key: fields[key] for key in ("error", "traceback", "lost_peer")}
            self._report(rank, How.RAISED, code=1, at=fields["time"], **told)
        elif message.event == "finished":
            self._finished[rank] = time.monotonic()
            how = How.EXITED if fields["code"] else How.FINISHED
            self._report(rank, how, code=fields["code"], at=fields["time"])
        elif message.event == "ended":
            how = How.NODE_LOST if fields["raylet_died"] else How.DIED
            self._report(rank, how, at=fields["time"])  # counts only where it had not said anything before
            self._course.ended(rank)
        elif message.event == "swept":
            if fields["killed"]:
                self._say(f"rank {rank} left {len(fields['killed'])} processes behind; they were killed.")
            self._course.clean(rank)
        elif message.event == "gone":
            if rank in self._course.remaining:
                self._report(rank, How.UNWATCHED, at=time.time())
                self._kill(rank)
            self._course.clean(rank)

    def _report(self, rank: int, how: How, *, at: float, **fields: Any) -> None:
        self._course.reported(Report(rank=rank, how=how, time=at, **fields), time.monotonic())

    def _ask_ray(self, now: float) -> None:
        """About ranks that no warden speaks for yet: they may have failed before they had one."""
        waiting = {rank: run for rank, run in self._runs.items() if rank not in self._called}
        if not waiting or now - self._looked < TICK:
            return
        import ray

        self._looked = now
        done, _ = ray.wait(list(waiting.values()), num_returns=len(waiting), timeout=0)
        for rank, run in waiting.items():
            if run in done:
                self._not_started(rank, _failure(run))
            elif now - self._began > self._limits.start and self._course.stopped_at is None:
                self._not_started(rank, None)

    def _not_started(self, rank: int, error: BaseException | None) -> None:
        if rank in self._called:
            return
        self._called.add(rank)
        cause = getattr(error, "cause", error)
        if isinstance(cause, RankStartError):
            self._hopeless = self._hopeless or cause
        said = str(cause) if error is not None else f"nothing was heard of it for {self._limits.start:g} s"
        self._report(rank, How.NOT_STARTED, at=time.time(), error=said)
        self._course.clean(rank)

    def _listen_for_silence(self, now: float) -> None:
        """Count only time in which we listened: a launcher that was suspended has lost nobody."""
        passed, self._listened = min(now - self._listened, 2 * TICK), now
        for rank in self._called:
            self._quiet[rank] += passed
            if self._quiet[rank] > self._limits.silence and rank in self._course.remaining:
                self._course.reported(silent(rank, time.time(), self._limits), now)

    def _remind(self, now: float) -> None:
        leaving = [rank for rank in self._course.remaining if now - self._finished.get(rank, now) > REMINDER]
        if leaving and now - self._reminded > REMINDER and self._course.stopped_at is None:
            self._reminded = now
            ranks = listed([str(rank) for rank in leaving], 8)
            self._say(f"waiting for rank {ranks} to exit: the script has ended, a thread or an exit handler has not.")

    @contextmanager
    def _stoppable(self) -> Iterator[None]:
        """Signals become events, so that none cuts the handling of a message short."""
        before = {which: signal.signal(which, lambda n, _: self._stops.append(Signals(n))) for which in STOPS}
        try:
            yield
        finally:
            for which, handler in before.items():
                signal.signal(which, handler)


def _failure(run: Any) -> BaseException | None:
    import ray

    try:
        ray.get(run)
    except Exception as error:
        return error
    return None
