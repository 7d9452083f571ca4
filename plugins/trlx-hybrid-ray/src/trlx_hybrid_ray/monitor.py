"""Watches all nodes of one start to their end, names the failure that the others followed from, and ends the rest."""

from __future__ import annotations

import math
import re
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from signal import SIGINT, SIGTERM, Signals
from types import FrameType
from typing import TYPE_CHECKING, Any

from trlx_hybrid.deadline import unreachable
from trlx_hybrid.errors import listed

from .cluster import ask
from .errors import brief
from .placement import Placement
from .printer import Printer, say

if TYPE_CHECKING:
    from .launch import Job
    from .node import News

TICK = 0.2
POLL = 1.0  # a node answers at least that often
SILENCE = 10.0  # without an answer, until a node counts as lost
SETTLE = 1.5  # from the first failure until it is named, for others may have come before it
BLAME = 13.0  # the same while each failure points at another rank
GRACE = 8.0  # from the signal to stop until SIGKILL
KILL = 5.0  # from SIGKILL until a node counts as one that cannot be cleaned
HEAD_SECONDS = 15.0  # that the cluster's head may refuse connections
HEAD = -1  # in the place of a node's number
TAIL = 1 << 16  # bytes of standard error that are kept of each rank
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

LOST_PEER = re.compile(
    r"DistBackendError|DistNetworkError|DistStoreError"
    r"|connection (closed|reset|refused|was|lost)|closed by (remote )?peer|broken pipe|socket (timeout|closed|error)"
    r"|\b(nccl|gloo|tcpstore|processgroup\w*|rendezvous|watchdog)\b|timed out waiting for .*(rank|client|key)"
    r"|which never entered it|did not complete bucket|another rank",
    re.IGNORECASE,
)
"""Texts of errors by which torch, vLLM and the weight syncs say that another rank is gone."""
TRACEBACK = "Traceback (most recent call last):"
CHAINED = ("The above exception was the direct cause", "During handling of the above exception")
TORCHS = re.compile(r"^\[rank\d+\]: ?")  # in front of what a process with a process group prints at its end
RAISED = re.compile(r"[\w.]*[A-Z]\w*(:|$)")


@dataclass(slots=True)
class LaunchFailure:
    """What ended the run, or followed from it.

    Attributes:
        node: its number, or HEAD.
        rank: None where all of the node failed.
        time: on this machine's clock.
        code: exit code, or minus the signal; None where there is neither.
        why: in a line; empty where the rank's own last words say it.
    """

    node: int
    rank: int | None
    time: float
    code: int | None = None
    why: str = ""


@dataclass(slots=True)
class _Node:
    actor: Any
    where: str
    poll: Any = None
    seen: int = 0
    quiet: float = 0.0
    code: int | None = None  # of accelerate, once it has ended and all that it printed is here
    lost: bool = False
    unclean: bool = False  # it did not say that all is gone
    pids: dict[int, int] = field(default_factory=dict)
    finished: dict[int, float] = field(default_factory=dict)  # when ranks ended well

    @property
    def over(self) -> bool:
        return self.lost or self.code is not None


class Monitor:
    """One start of all ranks, seen from the launcher.

    Args:
        actors: a `NodeActor` for each bundle of the placement.
        head: host:port of the cluster's head.
    """

    def __init__(self, job: Job, placement: Placement, actors: Sequence[Any], head: str) -> None:
        self._job = job
        self._nodes = [
            _Node(actor, f"{bundle.node.address} ({bundle.node.id[:6]})")
            for actor, bundle in zip(actors, placement.bundles, strict=True)
        ]
        self._gpus = [bundle.gpus for bundle in placement.bundles]
        self._failures: list[LaunchFailure] = []
        self._tails: dict[tuple[int, int | None], bytearray] = {}
        self._first_at: float | None = None
        self._stopped_at: float | None = None
        self._kill_at = math.inf
        self._killed = False
        self._interrupted: Signals | None = None
        self._stops: deque[Signals] = deque()
        self._listened = time.monotonic()
        self._head = _Head(head)
        self._printer: Printer | None = None

    def where(self, number: int) -> str:
        """A node's name."""
        return self._nodes[number].where

    def until_over(self) -> tuple[int, bool]:
        """Wait for the end, and bring it about where it must be; the exit code, and whether a start may be repeated."""
        before = {which: signal.signal(which, self._stop_asked) for which in STOPS}
        self._printer = Printer(self._names(), sys.stdout.buffer, sys.stderr.buffer)
        try:
            while not self._over():
                self._step()
            self._finish()
        finally:
            for which, handler in before.items():
                signal.signal(which, handler)
        self._printer.close(GRACE)
        if text := self._summary():
            say(text)
        first = self._first
        if first is None:
            return (0, False) if self._interrupted is None else (128 + self._interrupted, False)
        return (first.code if first.code and first.code > 0 else 1), self._interrupted is None

    def close(self) -> None:
        """Let go of the actors; where they still run something, they end it."""
        import ray

        with suppress(ray.exceptions.RayError):
            ask(lambda: [ray.kill(node.actor) for node in self._nodes])
        self._head.close()

    # --- the loop -----------------------------------------------------------------------------------------------------

    def _over(self) -> bool:
        now = time.monotonic()
        if self._stopped_at is None:
            return all(node.over for node in self._nodes) and not self._failures
        return all(node.over for node in self._nodes) or now >= self._kill_at + KILL

    def _step(self) -> None:
        self._listen(TICK)
        now = time.monotonic()
        while self._stops:
            which = self._stops.popleft()
            if self._interrupted is None:
                self._say(f"{which.name}: ending all ranks. Once more kills them at once.")
                self._interrupted = which
                if self._stopped_at is None:
                    # A signal to all processes of a job may have reached ranks first: what it ended has not failed.
                    self._failures = [f for f in self._failures if not self._signalled(f)]
                    self._stop(SIGINT if which == SIGINT else SIGTERM, now)
            else:
                self._kill_at = min(self._kill_at, now)
        if self._head.lost and self._stopped_at is None and not self._failures:
            why = f"The cluster's head, {self._head.address}, has accepted no connection for {HEAD_SECONDS:g} s."
            self._fail(LaunchFailure(HEAD, None, time.time(), why=why))
        if self._stopped_at is None and self._first_at is not None and now >= self._first_at + self._patience():
            self._stop(SIGTERM, now)
        if now >= self._kill_at and not self._killed:
            self._killed = True
            self._call("kill")

    def _listen(self, seconds: float) -> None:
        """Take in what nodes answer; waits up to `seconds` for the first answer."""
        import ray

        assert self._printer is not None
        for node in self._nodes:
            if node.poll is None and not node.over:
                node.poll = node.actor.poll.remote(node.seen, POLL, output=self._printer.has_room)
        polls = {node.poll: number for number, node in enumerate(self._nodes) if node.poll is not None}
        if not polls:
            time.sleep(seconds)
            return
        done, _ = ray.wait(list(polls), num_returns=1, timeout=seconds)
        if done:
            done, _ = ray.wait(list(polls), num_returns=len(polls), timeout=0)
        for call in done:
            number = polls[call]
            self._nodes[number].poll = None
            try:
                self._take(number, ray.get(call))
            except ray.exceptions.ActorUnavailableError:
                continue  # the connection broke; what it said then is said again, or it is silent
            except ray.exceptions.RayError as error:
                self._lose(number, _cause_of_death(error))
        now = time.monotonic()
        # Count only time in which we listened: a launcher that was suspended has lost nobody.
        passed, self._listened = min(now - self._listened, 2 * TICK), now
        for number, node in enumerate(self._nodes):
            node.quiet += passed
            if node.quiet > SILENCE and not node.over and not self._job.debug:
                self._lose(number, f"no sign of life for {SILENCE:g} s.")

    def _take(self, number: int, news: News) -> None:
        assert self._printer is not None
        node = self._nodes[number]
        node.quiet, node.seen = 0.0, news.number
        node.pids |= news.started
        for rank, error, data in news.output:
            self._printer.write((number, rank, error), data)
            if error:
                tail = self._tails.setdefault((number, rank), bytearray())
                tail += data
                del tail[:-TAIL]
        offset = time.time() - news.clock
        for rank, code, at in news.ended:
            if rank is not None and code == 0:
                node.finished[rank] = at + offset
            else:
                self._fail(LaunchFailure(number, rank, at + offset, code))
        for what, pid, seconds in news.stopped:
            self._stands_still(number, what, pid, seconds)
        if news.code is not None:
            node.code = news.code
            if news.code != 0 and not any(failure.node == number for failure in self._failures):
                self._fail(LaunchFailure(number, None, time.time(), news.code))

    def _stands_still(self, number: int, what: str, pid: int, seconds: float) -> None:
        from .node import STOPPED_SECONDS

        told = f"{what}, pid {pid} on node {self.where(number)}, has been stopped by a signal for {seconds:.0f} s"
        if seconds < STOPPED_SECONDS or self._job.debug:
            self._say(f"{told}. `kill -CONT {pid}` there lets it go on.")
        else:
            rank = int(what.removeprefix("rank ")) if what.startswith("rank ") else None
            self._fail(LaunchFailure(number, rank, time.time() - seconds, why=f"{told} (SIGSTOP, Ctrl-Z, a debugger)."))

    def _lose(self, number: int, why: str) -> None:
        """A node's actor is gone, or does not answer. Ranks there are ended by what lives on that node."""
        import ray

        node = self._nodes[number]
        node.lost, node.poll = True, None
        threading.Thread(target=lambda: ray.kill(node.actor), daemon=True).start()
        self._fail(LaunchFailure(number, None, time.time() - node.quiet, why=why))

    def _fail(self, failure: LaunchFailure) -> None:
        """What comes after the order to stop is its effect, and does not count."""
        if self._stopped_at is None:
            self._failures.append(failure)
            if self._first_at is None:
                self._first_at = time.monotonic()

    def _patience(self) -> float:
        first = self._first
        told = {failure.node for failure in self._failures}
        return BLAME if first is not None and self._lost_peer(first) and len(told) < len(self._nodes) else SETTLE

    def _stop(self, which: Signals, now: float) -> None:
        self._stopped_at, self._kill_at = now, now + GRACE
        self._call("signal", int(which))

    def _call(self, method: str, *arguments: Any) -> list[Any]:
        """Tell all nodes that are there; nobody waits for their answers."""
        return [getattr(node.actor, method).remote(*arguments) for node in self._nodes if not node.lost]

    def _finish(self) -> None:
        """Have every node end what is left there, and say what that was."""
        import ray

        there = [node for node in self._nodes if not node.lost]
        calls = self._call("finish")
        if calls:
            ray.wait(calls, num_returns=len(calls), timeout=GRACE + KILL)
        for node, call in zip(there, calls, strict=True):
            try:
                left = ray.get(call, timeout=0)
            except (ray.exceptions.RayError, TimeoutError):
                node.unclean = True
                continue
            if left and not self._killed:
                self._say(f"node {node.where} had leftovers, which were removed: {listed(left, 4)}")

    def _stop_asked(self, number: int, _: FrameType | None) -> None:
        self._stops.append(Signals(number))

    # --- what is said -------------------------------------------------------------------------------------------------

    def _say(self, text: str) -> None:
        """In the printer's thread: a terminal that takes no more must not keep us from ending ranks."""
        assert self._printer is not None
        self._printer.write((HEAD, None, True), f"{text}\n".encode())

    def _names(self) -> dict[tuple[int, int | None], str]:
        """What stands in front of lines."""
        size, width = self._job.processes_per_node, len(str(self._job.world - 1))
        names: dict[tuple[int, int | None], str] = {(HEAD, None): ""}  # the launcher's own
        for number in range(len(self._nodes)):
            node = f"node {number} " if len(self._nodes) > 1 else ""
            names[number, None] = f"[{node}accelerate] "
            for rank in range(number * size, (number + 1) * size):
                names[number, rank] = f"[{node}rank {rank:>{width}}] "
        return names

    @property
    def _first(self) -> LaunchFailure | None:
        """The failure that the others followed from: the earliest whose error does not point at another rank.

        A process that is killed is seen a little later than a peer's error about it may come. So errors that speak of a
        lost peer come into question only where there is nothing else, whatever the clocks say. Among the rest the
        clock decides: a process can also be aborted because of another rank's exception, as NCCL's watchdog does.
        """
        own = [f for f in self._failures if not self._ended_with_accelerate(f)]
        return min(own, key=lambda f: (self._lost_peer(f), f.time, f.rank or 0), default=None)

    def _ended_with_accelerate(self, failure: LaunchFailure) -> bool:
        """Whether a rank got its signal from accelerate, which a signal had ended."""
        return failure.rank is not None and any(
            f.rank is None and f.node == failure.node and f.code == failure.code for f in self._failures
        )

    def _signalled(self, failure: LaunchFailure) -> bool:
        """Whether a signal to all processes of a job can be what ended it, or what it followed from."""
        signalled = failure.rank is None or (failure.code or 0) < 0 or self._lost_peer(failure)
        return signalled or self._error(failure)[0] == "KeyboardInterrupt"

    def _lost_peer(self, failure: LaunchFailure) -> bool:
        return failure.rank is not None and bool(LOST_PEER.search(self._error(failure)[0]))

    def _error(self, failure: LaunchFailure) -> tuple[str, list[str]]:
        """The exception that a rank printed last, and its traceback."""
        text = self._tails.get((failure.node, failure.rank), b"").decode(errors="replace")
        return last_error(text) if failure.code is None or failure.code >= 0 else ("", [])

    def _summary(self) -> str:
        """For standard error; empty where all went well. What matters most stands last."""
        lines, first = [], self._first
        if unclean := [node.where for node in self._nodes if node.unclean or not node.over]:
            lines.append(
                f"Not known to have ended: what runs on node {listed(unclean)}. Look there before the next start."
            )
        if first is not None:
            trace = self._error(first)[1]
            lines += [*self._others(first), *(["", *trace, ""] if trace else []), self._named(first)]
        elif self._interrupted is not None:
            lines.append(f"Stopped by {self._interrupted.name}; every rank was ended.")
        return "\n".join(lines)

    def _named(self, first: LaunchFailure) -> str:
        if first.node == HEAD:
            return first.why
        node, size = self._nodes[first.node], self._job.processes_per_node
        if first.rank is not None:
            gpus = self._gpus[first.node]
            gpu = f", GPU {gpus[first.rank - first.node * size]}" if gpus else ""
            pid = f", pid {node.pids[first.rank]}" if first.rank in node.pids else ""
            return f"Rank {first.rank} failed first (node {node.where}{gpu}{pid}): {self._why(first)}"
        if not node.lost:
            return f"Node {node.where} failed first: {self._why(first)}"
        ranks = [str(rank) for rank in range(first.node * size, (first.node + 1) * size)]
        return f"Node {node.where} was lost, with rank{'s' * (size > 1)} {listed(ranks, 8)}: {self._why(first)}"

    def _why(self, failure: LaunchFailure) -> str:
        if failure.why:
            return failure.why
        what = "accelerate launch" if failure.rank is None else "its process"
        if failure.code is not None and failure.code < 0:
            name = _signal_name(-failure.code)
            return f"{what} was ended by {name}{' (the out-of-memory killer, or kill -9)' * (name == 'SIGKILL')}."
        what = "accelerate launch" if failure.rank is None else "the script"
        return self._error(failure)[0] or f"{what} ended with exit code {failure.code}."

    def _others(self, first: LaunchFailure) -> list[str]:
        """Who failed later, and where every error speaks of a lost peer, who had left before."""
        lines = []
        finished = [str(r) for node in self._nodes for r, at in sorted(node.finished.items()) if at <= first.time]
        if self._lost_peer(first) and finished:
            lines.append(f"Rank {listed(finished, 8)} had finished the script before: did it skip a collective call?")
        # torchelastic ends a node's other ranks with SIGTERM.
        others = [f for f in self._failures if f.rank not in (None, first.rank) and f.code != -SIGTERM]
        if first.rank is None:  # its ranks ended with it
            others = [f for f in others if f.node != first.node]
        lines += [f"Rank {f.rank} failed after it: {self._why(f)}" for f in others[:3]]
        if len(others) > 3:
            lines.append(f"So did rank {listed([str(f.rank) for f in others[3:]], 8)}.")
        return lines


def last_error(text: str) -> tuple[str, list[str]]:
    """The last exception in what Python printed to standard error, in a line, and the lines of its traceback.

    With the exceptions that it followed from. A syntax error has no traceback, but lines that show it.
    """
    lines = [TORCHS.sub("", line) for line in text.rstrip().splitlines()]
    starts = [number for number, line in enumerate(lines) if line.startswith(TRACEBACK)]
    if starts:
        start = starts[-1]
        while start != starts[0] and lines[start - 2].startswith(CHAINED):  # with a blank line on either side
            start = max(number for number in starts if number < start)
        end = next((n for n in range(starts[-1] + 1, len(lines)) if lines[n][:1] not in ("", " ")), len(lines) - 1)
        error = lines[end]
    else:
        end = max((n for n, line in enumerate(lines) if RAISED.match(line) and "Error" in line), default=-1)
        if end < 0 or not any(line.startswith('  File "') for line in lines[max(0, end - 4) : end]):
            return "", []
        start = next(n for n in range(end, -1, -1) if lines[n].startswith('  File "'))
        error = lines[end]
    return (error if len(error) <= 300 else error[:299] + "…"), lines[start : end + 1]


def _signal_name(number: int) -> str:
    try:
        return Signals(number).name
    except ValueError:
        return f"signal {number}"


def _cause_of_death(error: BaseException) -> str:
    """What Ray says of an actor that died, in a line."""
    import ray

    if "node has died" in str(error):
        return "its raylet ended."
    if isinstance(error, ray.exceptions.RayActorError):
        return "Ray's actor there ended: it was killed, or the node's raylet was."
    return brief(error)


class _Head:
    """Whether the cluster's head still takes connections. Ray's client ends this process after a minute without."""

    def __init__(self, address: str) -> None:
        self.address, self.lost = address, False
        self._over = threading.Event()
        host, _, port = address.rpartition(":")
        self._at = host.strip("[]"), int(port)
        threading.Thread(target=self._watch, name="watches the head", daemon=True).start()

    def _watch(self) -> None:
        refused = 0.0
        while not self._over.wait(1.0):
            began = time.monotonic()
            gone = unreachable(*self._at, seconds=2.0)
            refused = refused + 1.0 + time.monotonic() - began if gone else 0.0
            self.lost = refused > HEAD_SECONDS

    def close(self) -> None:
        self._over.set()
