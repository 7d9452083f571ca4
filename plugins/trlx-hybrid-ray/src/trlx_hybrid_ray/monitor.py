"""The monitor of a launch's ranks. It watches all nodes until the ranks have ended, finds the failure that caused the
others, and ends the ranks that are left."""

from __future__ import annotations

import math
import re
import signal
import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from signal import SIGINT, SIGTERM, Signals
from types import FrameType
from typing import Any

from trlx_hybrid.errors import listed
from trlx_hybrid.interprocess.deadline import unreachable

from .cluster import ask
from .errors import brief
from .node import STOPPED_SECONDS, NodeActor, NodeReport
from .placement import Placement
from .printer import Printer
from .waiting import Handle, Reference, replies

TICK = 0.2
POLL = 1.0  # seconds between a node's answers, at most
SILENCE = 10.0  # seconds without an answer until a node counts as lost
SETTLE = 1.5  # seconds from the first failure until it is named: reports of earlier ones may still arrive
BLAME = 13.0  # the same, while the error of each failure points at another rank
GRACE = 8.0  # seconds from the stop signal to SIGKILL
KILL = 5.0  # seconds from SIGKILL until a node counts as not cleaned up
HEAD_SECONDS = 15.0  # seconds that the cluster's head may refuse connections
HEAD = -1  # stands for the head in place of a node's number
SEEN_LATE = 1.0  # seconds by which the end of a process may be seen later than a failure that it caused
TAIL = 1 << 16  # bytes of standard error that are kept of each rank
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

LOST_PEER = re.compile(
    r"DistBackendError|DistNetworkError|DistStoreError"
    r"|connection (closed|reset|refused|was|lost)|closed by (remote )?peer|broken pipe|socket (timeout|closed|error)"
    r"|\b(nccl|gloo|tcpstore|processgroup\w*|rendezvous|watchdog)\b|timed out waiting for .*(rank|client|key)"
    r"|which never entered it|did not complete bucket|another rank",
    re.IGNORECASE,
)
"""A pattern of the error texts by which torch, vLLM and the weight sync report that another rank is gone."""
TRACEBACK = "Traceback (most recent call last):"
CHAINED = ("The above exception was the direct cause", "During handling of the above exception")
TORCHS = re.compile(r"^\[rank\d+\]: ?")  # prefix of the last lines that a process with a process group prints
DOTTED = re.compile(r"[\w.]+")


@dataclass(frozen=True, slots=True)
class LaunchFailure:
    """A failure of a rank, a node or the cluster's head. It either ended the run, or is a consequence of the failure
    that did.

    Attributes:
        node: the node's number, or `HEAD` for the head of the Ray cluster.
        rank: the rank, or None where the whole node failed.
        time: the time of the failure, on this machine's clock.
        code: the exit code, or minus the number of the signal that ended the process; None where there is neither.
        why: the reason, in a line; empty where the rank's own output says it.
    """

    node: int
    rank: int | None
    time: float
    code: int | None = None
    why: str = ""


@dataclass(slots=True)
class _Node:
    actor: Handle
    name: str
    poll: Reference | None = None
    seen: int = 0
    quiet: float = 0.0
    code: int | None = None  # accelerate's exit code, once it has ended and all output has arrived
    lost: bool = False
    unclean: bool = False  # the node has not confirmed that all of its processes ended
    pids: dict[int, int] = field(default_factory=dict)
    finished: dict[int, float] = field(default_factory=dict)  # when ranks ended with exit code 0

    @property
    def over(self) -> bool:
        return self.lost or self.code is not None


class Monitor:
    """The launcher's monitor of all ranks, from one start to the end of the ranks; each restart makes a new monitor.
    The constructor starts the actors that run the ranks on the nodes; leaving the monitor's `with` block kills them.

    Args:
        placement: the ranks' placement, with a bundle for each node.
        head: host:port of the cluster's head.
        printer: the printer of the ranks' output.
        debug: whether to wait for nodes and ranks without a deadline.

    Attributes:
        actors: a `NodeActor` for each bundle of the placement.
    """

    def __init__(self, placement: Placement, head: str, printer: Printer, debug: bool) -> None:
        import ray

        # Detached: Ray ends other actors when their owner does not answer, as a launcher that is suspended. These end
        # with the placement group, which goes when this driver is gone.
        settled = {"max_restarts": 0, "max_concurrency": 4, "lifetime": "detached"}
        kind: Any = ray.remote(NodeActor)
        numbers = range(len(placement.bundles))
        self.actors = [kind.options(**settled, **placement.replica_options(number)).remote() for number in numbers]
        names = [bundle.node.name for bundle in placement.bundles]
        self._nodes = [_Node(actor, name) for actor, name in zip(self.actors, names, strict=True)]
        self._placement, self._printer, self._debug = placement, printer, debug
        self._size = placement.request.size  # ranks of a node
        self._failures: list[LaunchFailure] = []
        self._tails: dict[tuple[int, int | None], bytearray] = {}
        self._first_at: float | None = None
        self._stopped_at: float | None = None
        self._kill_at = math.inf
        self._killed = False
        self._interrupted: Signals | None = None
        self._stops: deque[Signals] = deque()
        self._listened = time.monotonic()
        self._head, self._head_lost, self._over = head, False, threading.Event()
        threading.Thread(target=self._watch_head, name="watches the head", daemon=True).start()

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, *_: object) -> None:
        """Kill the nodes' actors. If ranks still run on a node, the reaper ends them: a process beside each actor that
        waits for the actor's end."""
        import ray

        self._over.set()
        with suppress(ray.exceptions.RayError):
            ask(lambda: [ray.kill(actor) for actor in self.actors])

    def until_over(self) -> tuple[int, bool]:
        """Watch the ranks until all have ended, and print a summary. After a failure or a signal it ends the ranks that
        are left.

        Returns:
            The exit code of the launch, and whether the ranks may be started again: only after a failure, and not if
            the user stopped the run.
        """
        before = {which: signal.signal(which, self._stop_asked) for which in STOPS}
        try:
            while not self._ended():
                self._step()
            self._finish()
        finally:
            for which, handler in before.items():
                signal.signal(which, handler)
        if text := self._summary():
            self._printer.say(text)
        first = self._first
        if first is None:
            return (0, False) if self._interrupted is None else (128 + self._interrupted, False)
        return (first.code if first.code and first.code > 0 else 1), self._interrupted is None

    # --- the loop -----------------------------------------------------------------------------------------------------

    def _ended(self) -> bool:
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
                self._printer.say(f"{which.name}: ending all ranks. Once more kills them at once.")
                self._interrupted = which
                if self._stopped_at is None:
                    # A signal to all processes of a job may have reached ranks first: ranks that it ended did not fail.
                    self._failures = [f for f in self._failures if not self._signalled(f)]
                    self._stop(SIGINT if which == SIGINT else SIGTERM, now)
            else:
                self._kill_at = min(self._kill_at, now)
        if self._head_lost and self._stopped_at is None and not self._failures:
            why = f"The cluster's head, {self._head}, has accepted no connection for {HEAD_SECONDS:g} s."
            self._fail(LaunchFailure(HEAD, None, time.time(), why=why))
        if self._stopped_at is None and self._first_at is not None and now >= self._first_at + self._patience():
            self._stop(SIGTERM, now)
        if now >= self._kill_at and not self._killed:
            self._killed = True
            self._call("kill")

    def _listen(self, seconds: float) -> None:
        """Process the reports that the nodes' actors return, after waiting up to `seconds` for the first one. Nodes
        whose actor is gone or silent are recorded as lost."""
        import ray

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
                continue  # the connection broke; the next poll gets this report again, or the node is silent
            except ray.exceptions.RayError as error:
                self._lose(number, _cause_of_death(error))
        now = time.monotonic()
        # Count only time in which the launcher ran: after a suspension of the launcher no node counts as lost.
        passed, self._listened = min(now - self._listened, 2 * TICK), now
        for number, node in enumerate(self._nodes):
            node.quiet += passed
            if node.quiet > SILENCE and not node.over and not self._debug:
                self._lose(number, f"no sign of life for {SILENCE:g} s.")

    def _take(self, number: int, report: NodeReport) -> None:
        node = self._nodes[number]
        node.quiet, node.seen = 0.0, report.number
        node.pids |= report.started
        for rank, error, data in report.output:
            self._printer.write((number, rank, error), data)
            if error:
                tail = self._tails.setdefault((number, rank), bytearray())
                tail += data
                del tail[:-TAIL]
        offset = time.time() - report.clock
        for rank, code, at in report.ended:
            if rank is not None and code == 0:
                node.finished[rank] = at + offset
            else:
                self._fail(LaunchFailure(number, rank, at + offset, code))
        for what, pid, seconds in report.stopped:
            self._stands_still(number, what, pid, seconds)
        if report.code is not None:
            node.code = report.code
            if report.code != 0 and not any(failure.node == number for failure in self._failures):
                self._fail(LaunchFailure(number, None, time.time(), report.code))

    def _stands_still(self, number: int, what: str, pid: int, seconds: float) -> None:
        told = f"{what}, pid {pid} on node {self._nodes[number].name}, has been stopped by a signal for {seconds:.0f} s"
        if seconds < STOPPED_SECONDS or self._debug:
            self._printer.say(f"{told}. `kill -CONT {pid}` there lets it go on.")
        else:
            rank = int(what.removeprefix("rank ")) if what.startswith("rank ") else None
            self._fail(LaunchFailure(number, rank, time.time() - seconds, why=f"{told} (SIGSTOP, Ctrl-Z, a debugger)."))

    def _lose(self, number: int, why: str) -> None:
        """Record that a node is lost, because its actor is gone or does not answer. The reaper, a process on the node
        that waits for the actor's end, ends the ranks there.

        Args:
            number: the node's number.
            why: the reason, for the message.
        """
        import ray

        node = self._nodes[number]
        node.lost, node.poll = True, None
        threading.Thread(target=lambda: ray.kill(self.actors[number]), daemon=True).start()
        self._fail(LaunchFailure(number, None, time.time() - node.quiet, why=why))

    def _fail(self, failure: LaunchFailure) -> None:
        """Record a failure. A failure that is reported after the ranks were told to stop is ignored, because stopping
        the ranks has caused it."""
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

    def _call(self, method: str, *arguments: object) -> dict[int, Reference]:
        """Call a method of the actors of all nodes that are not lost. Returns references to their answers, by the
        node's number."""
        there = [(number, node.actor) for number, node in enumerate(self._nodes) if not node.lost]
        return {number: getattr(actor, method).remote(*arguments) for number, actor in there}

    def _finish(self) -> None:
        """Let every node end the processes that are left on it, and print which processes it had to kill."""
        for number, left in replies(self._call("finish"), GRACE + KILL):
            node = self._nodes[number]
            if isinstance(left, Exception):
                node.unclean = True
            elif left and not self._killed:
                self._printer.say(f"node {node.name} had leftovers, which were removed: {listed(left, 4)}")

    def _watch_head(self) -> None:
        """Check every second, in a thread, whether the cluster's head still accepts connections, and set `_head_lost`
        if it has accepted none for `HEAD_SECONDS`. Ray's client would end this process after a minute without the
        head."""
        host, _, port = self._head.rpartition(":")
        refused = 0.0
        while not self._over.wait(1.0):
            began = time.monotonic()
            gone = unreachable(host.strip("[]"), int(port), seconds=2.0)
            refused = refused + 1.0 + time.monotonic() - began if gone else 0.0
            self._head_lost = refused > HEAD_SECONDS

    def _stop_asked(self, number: int, _: FrameType | None) -> None:
        self._stops.append(Signals(number))

    # --- what is said -------------------------------------------------------------------------------------------------

    @property
    def _first(self) -> LaunchFailure | None:
        """The failure that caused the others, or None where none happened."""
        return first_of({failure: self._lost_peer(failure) for failure in self._failures})

    def _signalled(self, failure: LaunchFailure) -> bool:
        """Return whether a failure can be the effect of a signal that was sent to all processes of the job, such as
        Ctrl-C. The signal may have ended the failed rank itself, or another rank that it communicated with."""
        signalled = failure.rank is None or (failure.code or 0) < 0 or self._lost_peer(failure)
        return signalled or self._error(failure)[0] == "KeyboardInterrupt"

    def _lost_peer(self, failure: LaunchFailure) -> bool:
        return failure.rank is not None and bool(LOST_PEER.search(self._error(failure)[0]))

    def _error(self, failure: LaunchFailure) -> tuple[str, list[str]]:
        """Return the last exception that the failed rank printed, as a line, and its traceback as lines. Both are empty
        where the rank printed no exception, or where a signal ended it."""
        text = self._tails.get((failure.node, failure.rank), b"").decode(errors="replace")
        return last_error(text) if failure.code is None or failure.code >= 0 else ("", [])

    def _summary(self) -> str:
        """Return the text to print when the ranks have ended: processes that may be left, the failures, and last the
        one that caused them. It is "" where all went well."""
        lines, first = [], self._first
        if unclean := [node.name for node in self._nodes if node.unclean or not node.over]:
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
        node = self._nodes[first.node]
        if first.rank is not None:
            gpus = self._placement.gpus(first.rank)
            gpu = f", GPU {gpus[0]}" if gpus else ""
            pid = f", pid {node.pids[first.rank]}" if first.rank in node.pids else ""
            return f"Rank {first.rank} failed first (node {node.name}{gpu}{pid}): {self._why(first)}"
        if not node.lost:
            return f"Node {node.name} failed first: {self._why(first)}"
        ranks = [str(rank) for rank in range(first.node * self._size, (first.node + 1) * self._size)]
        return f"Node {node.name} was lost, with rank{'s' * (self._size > 1)} {listed(ranks, 8)}: {self._why(first)}"

    def _why(self, failure: LaunchFailure) -> str:
        if failure.why:
            return failure.why
        what = "accelerate launch" if failure.rank is None else "its process"
        if failure.code is not None and failure.code < 0:
            name = next((s.name for s in Signals if s == -failure.code), f"signal {-failure.code}")
            return f"{what} was ended by {name}{' (the out-of-memory killer, or kill -9)' * (name == 'SIGKILL')}."
        what = "accelerate launch" if failure.rank is None else "the script"
        return self._error(failure)[0] or f"{what} ended with exit code {failure.code}."

    def _others(self, first: LaunchFailure) -> list[str]:
        """Return lines for the summary on the ranks that failed after the first failure. If even the first failure only
        reports that another rank is gone, a line also names the ranks that had finished the script before: they may
        have skipped a collective call.

        Args:
            first: the failure that caused the others.
        """
        lines = []
        finished = [str(r) for node in self._nodes for r, at in sorted(node.finished.items()) if at <= first.time]
        if self._lost_peer(first) and finished:
            lines.append(f"Rank {listed(finished, 8)} had finished the script before: did it skip a collective call?")
        # torchelastic ends a node's other ranks with SIGTERM.
        others = [f for f in self._failures if f.rank not in (None, first.rank) and f.code != -SIGTERM]
        if first.rank is None:  # the lost node's ranks ended with it
            others = [f for f in others if f.node != first.node]
        lines += [f"Rank {f.rank} failed after it: {self._why(f)}" for f in others[:3]]
        if len(others) > 3:
            lines.append(f"So did rank {listed([str(f.rank) for f in others[3:]], 8)}.")
        return lines


def first_of(failures: Mapping[LaunchFailure, bool]) -> LaunchFailure | None:
    """Return the failure that caused the others: the earliest failure whose error does not blame another rank. None
    where there are no failures.

    A killed process may be noticed a little later than the error with which another rank reports that this process is
    gone. So a failure whose error reports a lost peer (another rank that is gone) is returned only if all failures
    report a lost peer, even if it is the earliest. Among failures of the same kind the earliest is returned. A signal
    alone does not make a failure the cause: NCCL's watchdog, for example, aborts a process because of another rank's
    exception.

    The time of a failure is the time at which the process was seen to have ended, and a busy machine sees it late. If a
    rank fails, torchelastic ends the node's other ranks with SIGTERM, and may be seen to have ended them first. So, of
    failures at about the same time, a rank that failed by itself comes before the ranks that SIGTERM ended.

    Args:
        failures: for each failure, whether its error reports a lost peer.
    """

    def ended_with_accelerate(failure: LaunchFailure) -> bool:
        """Return whether a rank was ended by a signal that `accelerate launch`, which a signal had ended, passed on to
        it."""
        return failure.rank is not None and any(
            f.rank is None and f.node == failure.node and f.code == failure.code for f in failures
        )

    def ended_with_another(failure: LaunchFailure) -> bool:
        """Return whether a rank was ended by torchelastic, which ends a node's ranks with SIGTERM when one of them has
        failed."""
        return failure.code == -SIGTERM and any(
            f.node == failure.node and f.rank is not None and f.code != -SIGTERM and not lost_peer
            for f, lost_peer in failures.items()
            if abs(f.time - failure.time) < SEEN_LATE
        )

    own = [f for f in failures if not ended_with_accelerate(f)]
    return min(own, key=lambda f: (failures[f], ended_with_another(f), f.time, f.rank or 0), default=None)


def last_error(text: str) -> tuple[str, list[str]]:
    """Find the last exception in what a Python process printed to standard error. Returns it as a line, and the lines
    of its traceback; both are empty where there is none.

    The traceback includes the exceptions that the last one was chained to. A syntax error has no traceback, but lines
    that show the code.
    """
    lines = [TORCHS.sub("", line) for line in text.rstrip().splitlines()]
    starts = [number for number, line in enumerate(lines) if line.startswith(TRACEBACK)]
    if starts:
        start = starts[-1]
        while start != starts[0] and lines[start - 2].startswith(CHAINED):  # with a blank line on either side
            start = max(number for number in starts if number < start)
        end = next((n for n in range(starts[-1] + 1, len(lines)) if lines[n][:1] not in ("", " ")), len(lines) - 1)
    else:
        end = max((n for n, line in enumerate(lines) if _names_an_error(line)), default=-1)
        if end < 0 or not any(line.startswith('  File "') for line in lines[max(0, end - 4) : end]):
            return "", []
        start = next(n for n in range(end, -1, -1) if lines[n].startswith('  File "'))
    error = lines[end]
    return (error if len(error) <= 300 else error[:299] + "…"), lines[start : end + 1]


def _names_an_error(line: str) -> bool:
    """Return whether a line reads like the last line of a traceback: an exception's class, and a colon or nothing
    behind it.

    It uses no regular expression that backtracks, since a line may be as long as all output that is kept of a rank.
    """
    name = line.partition(":")[0]
    return "Error" in line and DOTTED.fullmatch(name) is not None and any(map(str.isupper, name.rpartition(".")[2]))


def _cause_of_death(error: BaseException) -> str:
    """Return, in a line for the summary, why a node's actor is gone, from the error with which Ray answers a call of
    it."""
    import ray

    if "node has died" in str(error):
        return "its raylet ended."
    if isinstance(error, ray.exceptions.RayActorError):
        return "Ray's actor there ended: it was killed, or the node's raylet was."
    return brief(error)
