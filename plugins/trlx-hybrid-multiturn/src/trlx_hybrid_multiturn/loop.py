"""The loop that advances every trajectory independently, with one engine for all.

    admit trajectories, up to the limit
    deliver what tools have answered      -> trajectories go on: a request, another call, or the end
    let the engine take one step          -> each finished completion goes to its trajectory
    wait for a tool only if the engine has nothing to do

The loop runs in the trainer's thread and uses the engine only there. Tools answer from other threads, into a queue.

Where trajectories stay in flight over several rollouts, the loop stops when a batch is complete. What was sampled of
the unfinished requests goes to their trajectories, which ask for the rest; these requests are held until the loop gets
the next rollout's stream. Calls of tools go on in between, and so do requests on engines of their own.
"""

from __future__ import annotations

import functools
import math
import queue
import time
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from trlx_hybrid.contract.protocols import Stream
from trlx_hybrid.contract.types import Completion, Request

SHARED_WAIT = 0.005  # seconds: the other ranks of the replica wait for this one's next step
WAIT = 1.0  # seconds: so that the progress bar moves while tools work


Tool = Callable[..., Any]
"""A function that is called like a tool: a tool itself, or a method of an environment."""

ToolCoroutine = Coroutine[Any, Any, object]
"""The coroutine of one call of an asynchronous tool; it returns the tool's result."""


class Observer(Protocol):
    """A listener to which the loop reports its progress, such as `progress.Progress`, which shows a bar."""

    def stepped(self, seconds: float, sampling: int, finished: Sequence[tuple[int, Completion]]) -> None:
        """Note that the engine took a step.

        Args:
            seconds: duration of the step.
            sampling: number of requests that were being sampled in the step.
            finished: key and completion of each request that the step finished.
        """

    def interrupted(self, sampled: Sequence[Completion]) -> None:
        """Note what was sampled of the requests that are unfinished at the end of a rollout. Called by `Loop.go_on`
        only."""

    def moved(self, done: int, sampling: int, calling: int) -> None:
        """Note how far the rollout is. Called after each step of the loop.

        Args:
            done: the number of trajectories that are over.
            sampling: the number of requests that are being sampled.
            calling: the number of calls that have not been answered.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of a call of a tool: exactly one of a returned value (`value`), an exception (`error`), and a loss
    (`lost`). A loss means that neither a value nor an exception will come.

    Attributes:
        value: what the tool returned; None if it did not return.
        error: the exception that the tool raised, `SystemExit` and `KeyboardInterrupt` included. The model is shown its
            text.
        lost: a sentence that names the tool and says why there is no result: the call passed its deadline, its process
            crashed, or the result cannot be sent back.
        by_tool: whether the tool itself caused the loss, by taking too long or ending its process. If so, the model is
            shown the sentence, since it may have written the code that was run; otherwise the trajectory ends.
        seconds: wall time since the call began, in seconds; 0 for a call that never began.
        cpu_seconds: processor time of the call's thread, in seconds; 0 if the call has no thread of its own, or was
            lost.
    """

    value: Any = None
    error: BaseException | None = None
    lost: str | None = None
    by_tool: bool = False
    seconds: float = 0.0
    cpu_seconds: float = 0.0


class OutOfTimeError(Exception):
    """Raised inside a trajectory that has taken longer than the option `max_seconds`, at the point at which the
    trajectory waits for the engine or a tool."""


class Generate:
    """One request to the engine, which a trajectory awaits; the result is the Completion."""

    def __init__(self, request: Request) -> None:
        self.request = request

    def __await__(self) -> Generator[Generate, Completion, Completion]:
        return (yield self)


class CallTool:
    """One call of a tool or of an environment's method. A trajectory awaits it, and gets its Outcome.

    Args:
        name: name of what is called, for messages.
        start: a function that begins the call. Its argument is a function that takes the call's Outcome, and that may
            be called from any thread. It returns a function that abandons the call. The argument of the returned
            function is a reason that continues the sentence "tool 'name' ...".

    Attributes:
        expires: the time of `time.monotonic()` at which the loop stops waiting by itself. This is the last resort for a
            call that should have reported its own timeout by then.
    """

    def __init__(self, name: str, start: Callable[[Callable[[Outcome], None]], Callable[[str], None]]) -> None:
        self.name = name
        self.start = start
        self.expires = math.inf

    def __await__(self) -> Generator[CallTool, Outcome, Outcome]:
        return (yield self)


class Start:
    """A further coroutine of a trajectory, such as one of several requests that are open at a time. A trajectory awaits
    it, and goes on at once. What is still running when the trajectory ends is ended with it.

    Args:
        coroutine: a coroutine that has not been started.
    """

    def __init__(self, coroutine: TrajectoryCoroutine) -> None:
        self.coroutine = coroutine

    def __await__(self) -> Generator[Start, None, None]:
        yield self


TrajectoryCoroutine = Coroutine[Generate | CallTool | Start, Any, None]
"""A coroutine that runs one episode to its end; its creator keeps the result.

There is no asyncio here: its loop would have to run in the trainer's thread, where a notebook already runs one.
"""


class Clock(Protocol):
    """A record of how long a trajectory has been played, over all its rollouts."""

    seconds: float
    """Wall time in seconds, without the time between rollouts."""


class _Run:
    """The state of a trajectory in progress: its coroutine, its deadline, the request or call that it waits for, and
    the further coroutines that it has started."""

    __slots__ = ("abandon", "clock", "coroutine", "expires", "further", "key", "of", "waiting_for")

    def __init__(
        self, coroutine: TrajectoryCoroutine, expires: float, clock: Clock | None = None, of: _Run | None = None
    ) -> None:
        self.coroutine = coroutine
        self.expires = expires
        self.clock = clock
        self.of = of  # the trajectory that started this coroutine; None where it is a trajectory itself
        self.further: dict[_Run, None] = {}
        self.waiting_for: Generate | CallTool | None = None
        self.key = -1  # key of the request that it waits for; -1 where the request is held
        self.abandon: Callable[[str], None] = lambda reason: None


class Loop:
    """A loop that plays many trajectories at once, with one stream of requests to the engine.

    Args:
        stream: the engine's stream.
        observer: is told of each step of the engine and of the progress.
        width: how many trajectories may be in progress at once.
        seconds: time limit of one trajectory, in seconds; None for no limit.
    """

    def __init__(self, stream: Stream, observer: Observer, *, width: int, seconds: float | None = None) -> None:
        self._stream, self._observer = stream, observer
        self._width, self._seconds = width, math.inf if seconds is None else seconds
        self._inbox: queue.SimpleQueue[tuple[_Run, CallTool, Outcome]] = queue.SimpleQueue()
        self._waiting: deque[tuple[TrajectoryCoroutine, Clock | None]] = deque()
        self._begin: Callable[[], Sequence[tuple[TrajectoryCoroutine, Clock]]] = lambda: ()
        self._live: dict[_Run, None] = {}  # with the further coroutines of trajectories
        self._playing = 0  # trajectories
        self._sampling: dict[int, _Run] = {}
        self._holds = False  # requests are not added to the stream, but held for the next
        self._done = 0

    def run(self, trajectories: Sequence[TrajectoryCoroutine]) -> None:
        """Run all trajectories to their end. If one raises, the others are ended too, and its exception is raised.

        Args:
            trajectories: coroutines that have not been started.
        """
        self._waiting += [(coroutine, None) for coroutine in trajectories]
        try:
            anyone = True
            while anyone:
                anyone = self._iterate(lambda: not (self._live or self._waiting))
        finally:
            self.close()

    def go_on(
        self,
        stream: Stream,
        observer: Observer,
        begin: Callable[[], Sequence[tuple[TrajectoryCoroutine, Clock]]],
        over: Callable[[], bool],
        leave: bool = False,
    ) -> None:
        """Go on with the trajectories of earlier rollouts, and start others, until the rollout is over; then interrupt
        the requests that are unfinished, or leave them to the engine. If a trajectory raises, all are ended, and its
        exception is raised. Collective where ranks share the engine: trajectories of a rank whose rollout is over go on
        until it is over everywhere, but their further requests are held.

        Args:
            stream: the stream of this rollout.
            observer: is told of its steps.
            begin: returns further trajectories, which have not been started, and what records their time; none where
                no further ones may begin in this rollout.
            over: whether the rollout is over on this rank.
            leave: whether unfinished requests are left to the engine. `interrupt` is called before the next rollout.
        """
        self._stream, self._observer, self._begin, self._done = stream, observer, begin, 0
        if over() and not stream.shared and not leave:  # earlier rollouts have completed the batch
            return
        try:
            self._reopen()
            anyone = True
            while anyone and (stream.shared or not self._holds):
                anyone = self._iterate(over)
                self._holds = over()
            self._holds = True
            if leave:
                self._step(False)  # the engine gets what it has not been given yet
            else:
                self._interrupt()
            self._stop_clocks()
        except BaseException:
            self.close()
            raise

    def interrupt(self) -> None:
        """Interrupt the requests that the last rollout has left to the engine. If a trajectory raises, all are ended,
        and its exception is raised."""
        try:
            self._interrupt()
        except BaseException:
            self.close()
            raise

    def add(self, trajectories: Iterable[tuple[TrajectoryCoroutine, Clock]]) -> None:
        """Queue trajectories, which have not been started; `go_on` starts them.

        Args:
            trajectories: coroutines, and what records their time.
        """
        self._waiting += trajectories

    def settle(self, seconds: float) -> None:
        """Wait for the calls of tools and environments that are under way, after `go_on`. Requests are held.

        Args:
            seconds: how long at most.
        """
        until = time.monotonic() + seconds
        while any(isinstance(run.waiting_for, CallTool) for run in self._live):
            left = until - time.monotonic()
            if left <= 0:
                return
            self._deliver(left)

    def close(self) -> None:
        """End all trajectories, and abandon the calls of tools."""
        live, waiting, self._live, self._waiting = self._live, self._waiting, {}, deque()
        self._playing = 0
        for run in live:
            run.abandon("was not waited for: the rollout ended.")
            run.coroutine.close()
        for coroutine, _ in waiting:
            coroutine.close()

    def _iterate(self, over: Callable[[], bool]) -> bool:
        """Start what there is room for, deliver what tools have answered, and let the engine take one step. Wait for a
        tool where the engine has nothing to do.

        Args:
            over: whether nothing is left to do on this rank.

        Returns:
            Whether any rank has something left to do.
        """
        while not self._holds and self._can_start():
            self._start(*self._waiting.popleft())
        self._deliver()
        self._expire()
        anyone = self._step(more=not over())
        self._observer.moved(self._done, len(self._sampling), len(self._live) - len(self._sampling))
        pending = not over() or (anyone and self._stream.shared)  # else no answer is needed
        if pending and not (self._stream.busy or (not self._holds and self._can_start())):
            self._deliver(self._seconds_to_wait())
        return anyone

    def _step(self, more: bool) -> bool:
        """Let the engine take one step, and hand out what it has finished. Return whether any rank goes on.

        Args:
            more: whether this rank goes on.
        """
        busy, sampling, started = self._stream.busy, len(self._sampling), time.perf_counter()
        finished, anyone = self._stream.step(more=more)
        if busy:
            self._observer.stepped(time.perf_counter() - started, sampling, finished)
        self._hand_out([(self._sampling.pop(key), completion) for key, completion in finished])
        return anyone

    def _can_start(self) -> bool:
        """Return whether a trajectory waits and there is room for it."""
        if self._playing >= self._width:
            return False
        if not self._waiting:
            self._waiting += self._begin()
        return bool(self._waiting)

    # --- trajectories go on -----------------------------------------------------------------------------------------

    def _reopen(self) -> None:
        """Add the requests that were held to the stream, the oldest trajectory's first. The time since the last rollout
        does not count."""
        self._holds, now = False, time.monotonic()
        for run in self._live:
            run.expires += now
            if isinstance(run.waiting_for, Generate):
                self._submit(run, run.waiting_for)

    def _interrupt(self) -> None:
        """Interrupt the unfinished requests, and hand out what was sampled.

        What tools have answered by now is delivered, so that trajectories whose tools answer at once all wait for the
        engine: a resumed run then goes on as this one."""
        sampling, self._sampling = self._sampling, {}
        pieces = [(run, self._stream.sampled(key)) for key, run in sampling.items()]
        self._observer.interrupted([piece for _, piece in pieces])
        self._hand_out(pieces)
        self._deliver()

    def _stop_clocks(self) -> None:
        """Record how long each trajectory has been played. The time until the next rollout does not count."""
        now = time.monotonic()
        for run in self._live:
            run.expires -= now
            if run.clock is not None and math.isfinite(run.expires):
                run.clock.seconds = self._seconds - run.expires

    def _start(self, coroutine: TrajectoryCoroutine, clock: Clock | None) -> None:
        run = _Run(coroutine, time.monotonic() + self._seconds - (0.0 if clock is None else clock.seconds), clock)
        self._live[run] = None
        self._playing += 1
        self._go_on(run, None)

    def _hand_out(self, completions: Sequence[tuple[_Run, Completion]]) -> None:
        """Pass completions to the coroutines that wait for them."""
        for run, completion in completions:
            if run in self._live:  # else its trajectory has ended with a completion before
                self._go_on(run, completion)

    def _go_on(self, run: _Run, value: object) -> None:
        self._advance(run, lambda: run.coroutine.send(value))

    def _advance(self, run: _Run, resume: Callable[[], Generate | CallTool | Start]) -> None:
        run.waiting_for = None
        try:
            awaited = resume()
            while isinstance(awaited, Start):
                further = _Run(awaited.coroutine, math.inf, of=run)
                self._live[further] = run.further[further] = None
                self._go_on(further, None)
                awaited = run.coroutine.send(None)
        except StopIteration:
            self._ended(run)
            return
        run.waiting_for = awaited
        if isinstance(awaited, Generate):
            run.key = -1
            if not self._holds:
                self._submit(run, awaited)
        else:
            run.abandon = awaited.start(lambda outcome: self._inbox.put((run, awaited, outcome)))

    def _ended(self, run: _Run) -> None:
        """Forget a coroutine that has ended, and end what it has started."""
        del self._live[run]
        if run.of is None:
            self._playing -= 1
            self._done += 1
        else:
            del run.of.further[run]
        for further in [*run.further]:
            self._withdraw(further, "was not waited for: its trajectory ended.")
            further.coroutine.close()
            self._ended(further)

    def _submit(self, run: _Run, awaited: Generate) -> None:
        run.key = self._stream.add(awaited.request)
        self._sampling[run.key] = run

    def _withdraw(self, run: _Run, reason: str) -> None:
        """Abort the request, or abandon the call, that a coroutine waits for.

        Args:
            run: the coroutine.
            reason: why, as `CallTool` takes it.
        """
        if isinstance(run.waiting_for, CallTool):
            run.abandon(reason)
        elif self._sampling.pop(run.key, None) is not None:  # else its request is held
            self._stream.abort(run.key)
        run.waiting_for = None

    # --- tools ------------------------------------------------------------------------------------------------------

    def _deliver(self, wait: float = 0.0) -> None:
        """Pass on the outcomes of calls that have ended, by resuming the trajectories that wait for them.

        Args:
            wait: how long to wait for an outcome if there is none yet, in seconds.
        """
        while True:
            try:
                run, call, outcome = self._inbox.get(timeout=wait) if wait else self._inbox.get_nowait()
            except queue.Empty:
                return
            wait = 0.0
            if call is run.waiting_for:  # else it was answered, or given up
                self._go_on(run, outcome)

    def _expire(self) -> None:
        """End the trajectories whose time is over, and give up calls that have not even reported their own timeout."""
        now = time.monotonic()
        for run in [run for run in self._live if run.expires <= now]:
            self._withdraw(run, "was not waited for: its trajectory's time is over.")
            run.expires = math.inf
            self._advance(run, functools.partial(run.coroutine.throw, OutOfTimeError()))
        calls = [(run, run.waiting_for) for run in self._live if isinstance(run.waiting_for, CallTool)]
        for run, call in calls:
            if call.expires <= now and call is run.waiting_for:
                reason = "never reported, not even that its time is over: it blocks the event loop it runs on."
                run.abandon(reason)
                self._go_on(run, Outcome(lost=f"tool {call.name!r} {reason}"))

    def _seconds_to_wait(self) -> float:
        """Return how long to wait for a tool, in seconds: until the next deadline of a trajectory or call.

        The result is at most `WAIT`, or at most `SHARED_WAIT` where other ranks share the engine.
        """
        ends = [run.expires for run in self._live]
        ends += [run.waiting_for.expires for run in self._live if isinstance(run.waiting_for, CallTool)]
        longest = SHARED_WAIT if self._stream.shared else WAIT
        return max(0.0, min([time.monotonic() + longest, *ends]) - time.monotonic())
