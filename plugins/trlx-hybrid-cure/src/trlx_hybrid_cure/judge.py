"""The judge: the process that judges programs by their tests. It executes no program and no test itself: other
processes do this.

The module `sandbox` starts this process, which imports only the standard library and this package. It reads jobs, each
a program with its tests, from standard input, and writes the verdicts to standard output. Each program and each test
runs in a process of its own, forked by a helper process that has read neither programs nor tests. All messages between
a program and a test pass through the judge. So a program never sees a test, and cannot send a verdict.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import sys
import time
from dataclasses import dataclass, field
from typing import NoReturn

from .program import FOR_PROGRAM, USES_NOTHING, VERDICT, be_process
from .verdict import VERDICTS, Verdict, of_end
from .walls import can_restrict, enclose, end_with_parent
from .wire import Channel, dump

START, END = b"s", b"e"
ASKING = b'["ask"'
GONE = (EOFError, OSError)  # TimeoutError is one, too: it is caught before


@dataclass
class Limits:
    """The limits that programs and tests must keep when the judge has them executed.

    Attributes:
        seconds: largest CPU time of a program, and of each test, in seconds.
        wall: largest wall time of a program, and of each test, in seconds.
        memory: largest address space of a process, in bytes.
        batch: largest wall time of all jobs (programs with their tests) together, in seconds.
    """

    seconds: float
    wall: float
    memory: int
    batch: float


class Nursery:
    """Starts the processes that execute programs and tests, by means of a helper process that is forked before any
    program or test is read.

    The helper forks these processes, so that they begin without another program or test in their memory.

    Args:
        filtered: whether the kernel is to filter the system calls of these processes (`walls.restrict`).
    """

    def __init__(self, filtered: bool) -> None:
        self._ours, theirs = socket.socketpair()
        self._process = os.fork()
        if self._process == 0:
            self._ours.close()
            start_processes(theirs, filtered)
        theirs.close()

    def start(self, **asked: str | float) -> Running:
        """Start a process that executes one program or one test, and return it with the connection to it.

        Args:
            asked: the message that is sent to the process. Its entries are `source`, the Python source to execute;
                `seconds`, the CPU seconds that each source may take; `sources`, the number of sources that this process
                executes in its life; and `memory`, the limit of its address space in bytes. A test also gets `nonce`, a
                random secret that it has to send back with its verdict.
        """
        ours, theirs = socket.socketpair()
        socket.send_fds(self._ours, [START + bytes(4)], [theirs.fileno()])
        process = self._answer()
        theirs.close()
        ours.setblocking(False)
        running = Running(process, Channel(ours.detach()))
        with contextlib.suppress(OSError):  # the process ended, which the wait for it will show
            running.channel.send(dump(asked), time.monotonic() + 10)
        return running

    def end(self, running: Running) -> int:
        """Kill a process if it still runs, close the connection to it, and return its wait status (see
        `os.waitpid`)."""
        os.close(running.channel.descriptor)
        self._ours.sendall(END + running.process.to_bytes(4, "little"))
        return self._answer()

    def close(self) -> None:
        """End the helper process."""
        self._ours.close()
        os.waitpid(self._process, 0)

    def _answer(self) -> int:
        said = self._ours.recv(4, socket.MSG_WAITALL)
        if len(said) < 4:
            raise RuntimeError("the process that starts programs ended")
        return int.from_bytes(said, "little")


@dataclass
class Running:
    """A process that `Nursery` started, and that executes a program or a test.

    Attributes:
        process: the id of the process.
        channel: the judge's end of the connection to the process.
    """

    process: int
    channel: Channel


def start_processes(orders: socket.socket, filtered: bool) -> NoReturn:
    """Start and kill processes as the judge orders, until the judge is gone. This is the main loop of the helper
    process of `Nursery`.

    Args:
        orders: the socket to the judge: orders come in, process ids and wait statuses go out.
        filtered: whether the kernel is to filter the system calls of the started processes (`walls.restrict`).
    """
    end_with_parent()
    quiet = os.open(os.devnull, os.O_RDWR)
    for standard in range(3):
        os.dup2(quiet, standard)
    while True:
        order, descriptors, *_ = socket.recv_fds(orders, 5, 1)
        if len(order) < 5:
            os._exit(0)
        if order[:1] == START:
            process = os.fork()
            if process == 0:
                be_process(descriptors[0], filtered)
            os.close(descriptors[0])
            orders.sendall(process.to_bytes(4, "little"))
        else:
            process = int.from_bytes(order[1:], "little")
            os.kill(process, signal.SIGKILL)  # one that has ended keeps its status
            orders.sendall(os.waitpid(process, 0)[1].to_bytes(4, "little"))


@dataclass
class Judge:
    """Judges jobs one after the other, within the limits. A job is a program with its tests.

    Attributes:
        nursery: starts the processes of programs and tests.
        limits: the limits of time and memory.
        endless: the tests that exceeded a time limit without using anything of the program, with their verdicts, CPU or
            WALL, by the test's source. Such a test would exceed it with every program, so it is not run again.
    """

    nursery: Nursery
    limits: Limits
    endless: dict[str, Verdict] = field(default_factory=dict)

    def judge(self, jobs: list[tuple[str, list[str], int]]) -> list[list[Verdict]]:
        """Return a list of verdicts for each job, one per test. Time that a job does not use is shared by the jobs
        after it.

        Args:
            jobs: for each job the program's source, the tests' sources, and how many of the tests, from the first, are
                known to be right.
        """
        end, found = time.monotonic() + self.limits.batch, []
        for place, (program, tests, trusted) in enumerate(jobs):
            now = time.monotonic()
            found.append(self._verdicts(program, tests, trusted, now + (end - now) / (len(jobs) - place)))
        return found

    def _verdicts(self, program: str, tests: list[str], trusted: int, end: float) -> list[Verdict]:
        """Return the verdicts on one program with each of its tests.

        One process executes the program and serves all tests; if a test ended that process, a new one is started.

        Args:
            program: the program's source.
            tests: the tests' sources.
            trusted: how many of the tests, from the first, are known to be right. If one of them exceeds a time limit,
                the program is to blame, and all later tests get the same verdict without being run.
            end: the time on the monotonic clock, in seconds, at which the job's time is over.
        """
        found: list[Verdict] = []
        running: Running | None = None
        for test in tests:
            if time.monotonic() > end:
                break
            if test in self.endless and len(found) >= trusted:
                found.append(self.endless[test])
                continue
            if running is None:
                running, loaded = self._load(program, len(tests) + 1, end)
                if running is None:
                    return found + [loaded] * (len(tests) - len(found))
            verdict, running = self._test(test, running, end)
            found.append(verdict)
            if len(found) <= trusted and verdict in (Verdict.CPU, Verdict.WALL):
                found += [verdict] * (len(tests) - len(found))
                break
        if running is not None:
            self.nursery.end(running)
        return found + [Verdict.BUDGET] * (len(tests) - len(found))

    def _start(self, sources: int, **asked: str) -> Running:
        return self.nursery.start(seconds=self.limits.seconds, memory=self.limits.memory, sources=sources, **asked)

    def _late(self, deadline: float, end: float) -> Verdict:
        return Verdict.BUDGET if deadline == end else Verdict.WALL

    def _load(self, program: str, sources: int, end: float) -> tuple[Running | None, Verdict]:
        """Start a process that executes a program and then serves the program's tests.

        Args:
            program: the program's source.
            sources: for how many sources the process gets CPU time: the program itself and its tests.
            end: the time on the monotonic clock, in seconds, at which the job's time is over.

        Returns:
            The process, or None if the program failed; and the verdict on the program itself.
        """
        running = self._start(sources, source=program)
        deadline = min(time.monotonic() + self.limits.wall, end)
        try:
            said = running.channel.receive(deadline)
        except TimeoutError:
            self.nursery.end(running)
            return None, self._late(deadline, end)
        except GONE:
            return None, of_end(self.nursery.end(running))
        verdict = VERDICTS[said[0] % len(VERDICTS)] if said else Verdict.ERROR
        if verdict is Verdict.PASSED:
            return running, verdict
        self.nursery.end(running)
        return None, verdict

    def _test(self, source: str, program: Running, end: float) -> tuple[Verdict, Running | None]:
        """Run one test against the process of its program.

        Args:
            source: the test's source.
            program: the process that has executed the program.
            end: the time on the monotonic clock, in seconds, at which the job's time is over.

        Returns:
            The verdict; and the program's process, or None if that process was ended, because it exceeded a limit or
            was still answering the test.
        """
        exchange = Exchange(self._start(1, source=source, nonce=(nonce := secrets.token_hex(16))), program)
        deadline, verdict = min(time.monotonic() + self.limits.wall, end), None
        try:
            verdict = verdict_of(exchange.last_word(deadline), nonce)
        except TimeoutError:
            verdict = self._late(deadline, end)
        except GONE:
            pass
        status = self.nursery.end(exchange.test)
        if exchange.waited is program or exchange.depth:
            of_program = self.nursery.end(program)
            status = of_program if exchange.waited is program else status
            running = None
        else:
            running = program
        verdict = verdict or of_end(status)
        if verdict in (Verdict.CPU, Verdict.WALL) and not exchange.uses:
            self.endless[source] = verdict
        return verdict, running


class Exchange:
    """Passes on the messages between the process of a test and the process of its program.

    Attributes:
        test, program: the process of the test and the process of the program.
        waited: the process, `test` or `program`, whose next message is awaited.
        uses: whether the test uses anything of the program.
        depth: how many requests of the program, such as calls of a function that the test passed to it, the test has
            not answered yet.
    """

    def __init__(self, test: Running, program: Running) -> None:
        self.test = test
        self.program = program
        self.waited = test
        self.uses = True
        self.depth = 0

    def last_word(self, deadline: float) -> bytes:
        """Pass messages on until the test's process sends its verdict, and return that message.

        Args:
            deadline: the time on the monotonic clock, in seconds, by which the verdict must have arrived.

        Raises:
            TimeoutError: the verdict did not arrive in time; `waited` is the process that was computing.
            EOFError, OSError: the process in `waited` ended.
        """
        while True:
            said = self.waited.channel.receive(deadline)
            if self.waited is self.program:
                self.waited = self.test
                self.depth += said.startswith(ASKING)
                self.test.channel.send(said, deadline)
            elif said == USES_NOTHING:
                self.uses = False
            elif said[:1] == FOR_PROGRAM:
                self.waited = self.program
                self.uses = True
                self.depth -= self.depth > 0 and not said[1:].startswith(ASKING)
                self.program.channel.send(said[1:], deadline)
            else:
                return said


def verdict_of(said: bytes, nonce: str) -> Verdict:
    """Return the verdict that the last message of a test's process contains.

    Args:
        said: the message.
        nonce: the random secret that the process was given. If the message does not hold it, the executed test has
            written the message itself, and the verdict is ERROR.
    """
    given, place = said[1:-1], said[-1:]
    true = said[:1] == VERDICT and secrets.compare_digest(given, nonce.encode()) and place[0] < len(VERDICTS)
    return VERDICTS[place[0]] if true else Verdict.ERROR


def main(walls: str) -> None:
    """Run the judging process: isolate it, read limits and jobs from standard input, and write all verdicts to standard
    output as JSON.

    Args:
        walls: the kind of isolation: "bubblewrap", "namespaces" or "limits".
    """
    enclose(namespaces=walls == "namespaces")
    filtered = can_restrict()
    if not filtered and walls != "limits":
        raise RuntimeError("the kernel filters no system calls here")
    nursery = Nursery(filtered)
    asked = json.load(sys.stdin)
    found = Judge(nursery, Limits(**asked["limits"])).judge(asked["jobs"])
    nursery.close()
    print(json.dumps({"filtered": filtered, "verdicts": found}), flush=True)
