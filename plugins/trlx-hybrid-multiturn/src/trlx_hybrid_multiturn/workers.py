"""A bounded pool of daemon threads that take jobs first in, first out. How a job is performed is left to subclasses.

`concurrent.futures` joins its threads when the interpreter exits, so that one hung tool would keep the process alive.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from trlx_hybrid.errors import ConfigError

from .job import Job, WorkerError
from .outcome import Outcome

CLOSE_SECONDS = 5.0  # what `close` grants to threads that have nothing left to do


class Workers:
    """Runs jobs, at most `limit` at a time.

    Args:
        limit: threads of the pool. They start when there is work, and are reused.

    Raises:
        ConfigError: `limit` is below 1.
    """

    def __init__(self, limit: int) -> None:
        if limit < 1:
            raise ConfigError(f"Tools need at least one worker, got a limit of {limit}.")
        self._limit = limit
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._queue: deque[Job] = deque()
        self._running: dict[Job, threading.Thread] = {}
        self._threads: set[threading.Thread] = set()  # those that count towards `limit`
        self._idle = 0
        self._closed = False

    @property
    def busy(self) -> int:
        """Calls that run now."""
        return len(self._running)

    @property
    def queued(self) -> int:
        """Calls that wait for a worker."""
        return len(self._queue)

    def running(self) -> list[tuple[str, float]]:
        """Name and seconds of each call that runs now, the longest first."""
        now = time.monotonic()
        with self._lock:
            return sorted(((job.name, job.seconds(now)) for job in self._running), key=lambda call: -call[1])

    def submit(
        self,
        function: Callable[..., Any],
        arguments: Mapping[str, Any],
        done: Callable[[Outcome], None],
        deadline: float,
        *,
        name: str | None = None,
    ) -> Job:
        """Have `function(**arguments)` called by a worker. Returns at once.

        Args:
            done: called with the outcome exactly once: by some other thread, or by the one that abandons the call or
                closes the pool. It must be quick and thread-safe.
            deadline: seconds the call may take, counted from its start, not from here.
            name: what messages call the tool; by default the function's own name.

        Raises:
            WorkerError: the pool takes no more calls; says why and what to do.
        """
        name = name or str(getattr(function, "__name__", type(function).__name__))
        job = Job(function, arguments, done, deadline, name)
        with self._lock:
            if self._closed:
                raise WorkerError(f"Tool {job.name!r} was called after its workers were closed.")
            self._admit(job)
            self._queue.append(job)
            self._staff()
        return job

    def abandon(self, job: Job, reason: str) -> None:
        """Wait for a call no longer: it is lost at once for `reason`, which continues "tool 'name' ...".

        A call that waits is never started; one that runs keeps its worker until it ends or its deadline passes,
        unless the worker can be interrupted. Does nothing to a call that is over.
        """
        with self._lock:
            if job in self._queue:
                self._queue.remove(job)
        job.lose(reason)  # before the interruption becomes its cause
        with self._lock:
            self._interrupt(job)

    def close(self) -> None:
        """End all that is idle; what waits or runs is lost. Safe to call twice. Takes seconds at most."""
        with self._lock:
            self._closed = True
            waiting, running = list(self._queue), list(self._running)
            self._queue.clear()
            threads = self._close()
            self._work.notify_all()
        for job in waiting:
            job.lose("was not started: the workers were closed.")
        for job in running:
            job.lose("still ran when the workers were closed.")
        with self._lock:
            for job in running:
                self._interrupt(job)
        until = time.monotonic() + CLOSE_SECONDS
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, until - time.monotonic()))

    def _perform(self, job: Job) -> Outcome:
        """Do it, in the calling thread, without the lock."""
        raise NotImplementedError

    def _close(self) -> list[threading.Thread]:
        """Under the lock: the threads that will end soon once the pool is closed."""
        raise NotImplementedError

    def _admit(self, job: Job) -> None:
        """Under the lock: raise `WorkerError` to refuse the job."""

    def _interrupt(self, job: Job) -> None:
        """Under the lock: make a running job end soon, where that is possible."""

    def _started(self, job: Job) -> None:
        """Under the lock: a worker took the job."""

    def _finished(self, job: Job) -> bool:
        """Under the lock: the job is over. Returns whether its thread still belongs to the pool."""
        del self._running[job]
        return True

    def _staff(self) -> None:
        """Under the lock: as many threads as the queue needs and `limit` allows."""
        self._work.notify()
        for _ in range(min(len(self._queue) - self._idle, self._limit - len(self._threads))):
            thread = threading.Thread(target=self._serve, name=f"tool-{len(self._threads)}", daemon=True)
            thread.start()
            self._threads.add(thread)

    def _serve(self) -> None:
        while self._serve_one():
            pass
        with self._lock:
            self._threads.discard(threading.current_thread())

    def _serve_one(self) -> bool:
        # A frame of its own: an idle thread must not keep the last call's arguments and result alive.
        job = self._next()
        if job is None:
            return False
        try:
            outcome = self._perform(job)
        except Exception as error:
            reason = f"tool {job.name!r} could not be run: {type(error).__name__}: {error}"
            outcome = Outcome(lost=reason, seconds=job.seconds())
        with self._lock:
            stays = self._finished(job)
        job.settle(outcome)
        return stays

    def _next(self) -> Job | None:
        """Wait for a job; None when the pool is closed."""
        with self._lock:
            while not self._queue and not self._closed:
                self._idle += 1
                self._work.wait()
                self._idle -= 1
            if self._closed:
                return None
            job = self._queue.popleft()
            job.taken = time.monotonic()
            self._running[job] = threading.current_thread()
            self._started(job)
            return job
