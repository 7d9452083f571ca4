"""Tools in threads: no copies, no start-up, any function. But they share the interpreter, and none can be killed."""

from __future__ import annotations

import functools
import math
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from trlx_hybrid.errors import ConfigError

from .job import Job, WorkerError
from .outcome import Outcome
from .workers import Workers


def taking_this_device() -> Callable[[], None]:
    """What another thread is to call first: CUDA's current device, 0 in each new thread, becomes this thread's."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return lambda: None
    return functools.partial(torch.cuda.set_device, torch.cuda.current_device())


class ThreadWorkers(Workers):
    """Runs tools in daemon threads.

    A call whose deadline passes is lost at once. Its thread hangs until the tool returns: it is counted, a fresh one
    takes its place in the pool, and what it returns in the end is dropped. All compute on
    the GPU that was the current one where the pool was made.

    Args:
        limit: calls that run at once.
        lost_limit: threads that may hang at once. With more, waiting calls are lost and `submit` raises.

    Raises:
        ConfigError: `limit` is below 1, or `lost_limit` below 0.
    """

    def __init__(self, limit: int, lost_limit: int) -> None:
        if lost_limit < 0:
            raise ConfigError(f"The number of tool threads that may hang cannot be negative, got {lost_limit}.")
        super().__init__(limit)
        self._lost_limit = lost_limit
        self._hung: set[Job] = set()
        self._watcher: threading.Thread | None = None
        self._watch_again = threading.Condition(self._lock)
        self._watched_until = -math.inf  # the deadline that the watcher sleeps to
        self._take_device = taking_this_device()

    @property
    def hung(self) -> int:
        """Threads whose tool has not returned by its deadline, up to now."""
        return len(self._hung)

    def _serve(self) -> None:
        self._take_device()
        super()._serve()

    def hangs(self, job: Job) -> bool:
        """Whether a call has not returned by its deadline, nor since."""
        return job in self._hung

    def _perform(self, job: Job) -> Outcome:
        started, cpu_started = time.perf_counter(), time.thread_time()
        try:
            value = job.context.run(job.function, **job.arguments)
        # SystemExit and KeyboardInterrupt are the tool's own here: no signal is delivered to a thread.
        except BaseException as error:
            return Outcome(
                error=error, seconds=time.perf_counter() - started, cpu_seconds=time.thread_time() - cpu_started
            )
        return Outcome(value=value, seconds=time.perf_counter() - started, cpu_seconds=time.thread_time() - cpu_started)

    def _admit(self, job: Job) -> None:
        if len(self._hung) > self._lost_limit:
            raise WorkerError(f"Tool {job.name!r} is not called: {self._too_many()}")

    def _too_many(self) -> str:
        names = Counter(job.name for job in self._hung)
        hanging = ", ".join(f"{name!r}" + (f" ×{count}" if count > 1 else "") for name, count in names.most_common())
        return (
            f"{len(self._hung)} tool threads hang at once, {self._lost_limit} may: {hanging}. A thread cannot be "
            "killed. Give these tools a timeout of their own, run them in processes, which can be, or allow more."
        )

    def _started(self, job: Job) -> None:
        if self._watcher is None:
            self._watcher = threading.Thread(target=self._watch, name="tool-deadlines", daemon=True)
            self._watcher.start()
        elif job.expires < self._watched_until:
            self._watch_again.notify()

    def _finished(self, job: Job) -> bool:
        if job in self._hung:
            self._hung.discard(job)
            return False
        return super()._finished(job)

    def _watch(self) -> None:
        while self._watch_once():
            pass

    def _watch_once(self) -> bool:
        """Sleep to the next deadline and report whom it caught. Returns False when the pool is closed."""
        with self._lock:
            if self._closed:
                return False
            now = time.monotonic()
            late = [job for job in self._running if job.expires <= now]
            if not late:
                self._watched_until = min((job.expires for job in self._running), default=math.inf)
                self._watch_again.wait(min(self._watched_until - now, threading.TIMEOUT_MAX))
                return True
            for job in late:
                self._threads.discard(self._running.pop(job))
                self._hung.add(job)
            dropped: list[Job] = []
            if len(self._hung) > self._lost_limit:  # fresh threads for them would most likely hang as well
                dropped = list(self._queue)
                self._queue.clear()
                reason = f"was not started: {self._too_many()}"
            self._staff()
        for job in late:
            job.lose(f"did not return within {job.deadline:g} s; its thread hangs.", by_tool=True)
        for job in dropped:
            job.lose(reason)
        return True

    def _close(self) -> list[threading.Thread]:
        self._watch_again.notify()
        busy = set(self._running.values())
        watcher = [self._watcher] if self._watcher is not None else []
        return [thread for thread in self._threads if thread not in busy] + watcher
