"""The process that judges programs by tests: it has other processes execute them, and executes nothing itself.

`sandbox` starts it with the standard library alone. It reads jobs, each a program with its tests, from its standard
input, and writes verdicts to its standard output. A program has a process of its own, and so has each of its tests. A
third process, which knows neither programs nor tests, forks them all. What a program and a test send to each other
passes through the judge. A program is given no test, and no way to give a verdict.
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

from . import system_calls
from .program import FOR_PROGRAM, USES_NOTHING, VERDICT, be_process
from .verdict import VERDICTS, Verdict, of_end
from .walls import enclose, end_with_parent
from .wire import Channel, dump

START, END = b"s", b"e"
ASKING = b'["ask"'
GONE = (EOFError, OSError)  # TimeoutError is one, too: it is caught before


@dataclass
class Limits:
    """The limits of the programs and tests that a judge has executed.

    Attributes:
        seconds: CPU time of a program, and of each test, in seconds.
        wall: wall time of a program, and of each test, in seconds.
        memory: address space of a process, in bytes.
        batch: wall time of all jobs, in seconds.
    """

    seconds: float
    wall: float
    memory: int
    batch: float


class Nursery:
    """Starts processes for programs and tests, by a helper process that was forked before any job was read.

    So they begin without any other program or test in their memory.

    Args:
        filtered: have the kernel refuse system calls to the processes.
    """

    def __init__(self, filtered: bool) -> None:
        self._ours, theirs = socket.socketpair()
        self._process = os.fork()
        if self._process == 0:
            self._ours.close()
            start_processes(theirs, filtered)
        theirs.close()

    def start(self, **asked: str | float) -> Running:
        """Start a process that executes a program or a test, and return it with the channel to it.

        Args:
            asked: what the process reads from the channel: the source, its limits, and for a test a nonce.
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
        """Kill a process, if it has not ended, and return its wait status."""
        os.close(running.channel.descriptor)
        self._ours.sendall(END + running.process.to_bytes(4, "little"))
        return self._answer()

    def close(self) -> None:
        """End the helper process that starts the others."""
        self._ours.close()
        os.waitpid(self._process, 0)

    def _answer(self) -> int:
        said = self._ours.recv(4, socket.MSG_WAITALL)
        if len(said) < 4:
            raise RuntimeError("the process that starts programs ended")
        return int.from_bytes(said, "little")


@dataclass
class Running:
    """A process that the `Nursery` started.

    Attributes:
        process: its process id.
        channel: this end of the stream of frames to it.
    """

    process: int
    channel: Channel


def start_processes(orders: socket.socket, filtered: bool) -> NoReturn:
    """Start and kill processes as the judge orders, until the judge is gone. The main loop of the nursery's helper.

    Args:
        orders: the socket to the judge: orders come in, process ids and wait statuses go out.
        filtered: have the kernel refuse system calls to the processes.
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
    """Judges jobs, each a program with its tests, one after the other and within the limits.

    Attributes:
        nursery: starts the processes of programs and tests.
        limits: the limits.
        endless: verdicts on tests that took too long and used nothing of the program, by their source. They would take
            too long with any other program, so they are not run again.
    """

    nursery: Nursery
    limits: Limits
    endless: dict[str, Verdict] = field(default_factory=dict)

    def judge(self, jobs: list[tuple[str, list[str], int]]) -> list[list[Verdict]]:
        """Return the verdict on each test of each job. Time that a job does not use goes to the jobs after it.

        Args:
            jobs: program, tests, and how many of the first tests are known to be right.
        """
        end, found = time.monotonic() + self.limits.batch, []
        for place, (program, tests, trusted) in enumerate(jobs):
            now = time.monotonic()
            found.append(self._verdicts(program, tests, trusted, now + (end - now) / (len(jobs) - place)))
        return found

    def _verdicts(self, program: str, tests: list[str], trusted: int, end: float) -> list[Verdict]:
        """Return the verdicts on a program with each of its tests.

        One process executes the program for all tests; where a test ended that process, a new one is started.

        Args:
            program: the program's source.
            tests: the tests' sources.
            trusted: how many of the first tests are known to be right. Where one of them takes too long, the program is
                at fault, and all tests after it get the same verdict without being run.
            end: when the time of the job is spent, on the monotonic clock.
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
        """Start a process that executes a program and then answers its tests.

        Args:
            program: the program's source.
            sources: how many sources the process has CPU time for, the program and its tests.
            end: when the time of the job is spent, on the monotonic clock.

        Returns:
            The process, or None where the program failed, and the verdict on the program itself.
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
        """Run one test against the program's process.

        Args:
            source: the test's source.
            program: the process that has executed the program.
            end: when the time of the job is spent, on the monotonic clock.

        Returns:
            The verdict, and the program's process; None where that ended, took too long, or still waits for the test.
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
    """The passing on of the messages that a test's process and a program's process send to each other.

    Attributes:
        test, program: the two processes.
        waited: the one of the two whose message is awaited.
        uses: whether the test uses anything of the program.
        depth: how many of the program's requests, such as calls of a test's function, the test has not answered yet.
    """

    def __init__(self, test: Running, program: Running) -> None:
        self.test = test
        self.program = program
        self.waited = test
        self.uses = True
        self.depth = 0

    def last_word(self, deadline: float) -> bytes:
        """Pass messages on until the test sends one that is not for the program, its verdict, and return that one.

        Args:
            deadline: until when, on the monotonic clock.

        Raises:
            TimeoutError, EOFError, OSError: the process in `waited` took too long or ended.
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
    """Return the verdict in the last message of a test's process.

    It is ERROR where the message does not hold the nonce, a secret of that process: the executed test wrote it.
    """
    given, place = said[1:-1], said[-1:]
    true = said[:1] == VERDICT and secrets.compare_digest(given, nonce.encode()) and place[0] < len(VERDICTS)
    return VERDICTS[place[0]] if true else Verdict.ERROR


def main(walls: str) -> None:
    """Isolate this process, read limits and jobs from standard input, and write the verdicts on each job.

    Args:
        walls: the isolation, as in `Sandbox.walls`.
    """
    enclose(namespaces=walls == "namespaces")
    filtered = system_calls.can_restrict()
    if not filtered and walls != "limits":
        raise RuntimeError("the kernel filters no system calls here")
    nursery = Nursery(filtered)
    asked = json.load(sys.stdin)
    found = Judge(nursery, Limits(**asked["limits"])).judge(asked["jobs"])
    nursery.close()
    print(json.dumps({"filtered": filtered, "verdicts": found}), flush=True)
