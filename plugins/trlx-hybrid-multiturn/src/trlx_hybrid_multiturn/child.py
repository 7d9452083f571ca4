"""One process that calls tools, seen from the trainer: started, spoken to with deadlines, killed, closed."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from . import worker_process
from .worker_process import FUNCTIONS, receive, send

START_SECONDS = 60.0  # for the interpreter, and for the imports of a tool's module; no tool's deadline counts them
LONGEST_SECONDS = 1e6  # 11 days: beyond twice that no socket can wait
TERMINATE_SECONDS = 0.5
CRASH_SECONDS = 2.0  # between the end of a process's socket and its own end


class ChildLost(Exception):  # noqa: N818 - not a user's error: always turned into an outcome
    """The process has gone or does not answer; it must be killed. The text continues "tool 'name' ..."."""


class Child:
    """A worker process. For one thread at a time, except `interrupt`.

    It gets a process group of its own, so that killing it kills what its tool started, and the terminal's Ctrl-C goes
    to the trainer alone. Its prints go to the trainer's stderr.
    """

    def __init__(self) -> None:
        self._channel, self._other_end = socket.socketpair()
        self._process: subprocess.Popen[bytes] | None = None
        self._loaded: dict[int, None] = {}  # numbers of the functions it holds, in the order they came
        self._interrupted = False
        self._ended = False

    def start(self) -> None:
        """Start the process. The calling thread must outlive it: Linux kills a child with the thread that started it.

        Raises:
            ChildLost: it did not come up.
            OSError: the system gives no more processes.
        """
        with self._other_end as other_end:
            # -P keeps this package's folder from shadowing modules that a tool imports.
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(Path(worker_process.__file__)), str(other_end.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=2,
                pass_fds=(other_end.fileno(),),
                start_new_session=True,
            )
        until = time.monotonic() + START_SECONDS
        self._exchange(pickle.dumps(sys.path), until, f"did not get a process within {START_SECONDS:g} s")

    @property
    def started(self) -> bool:
        """Whether `start` was called."""
        return self._process is not None

    @property
    def usable(self) -> bool:
        """Whether it can take calls: not started yet, or running and connected."""
        return not (self._ended or self._interrupted) and (self._process is None or self._process.poll() is None)

    def load(self, number: int, function: bytes) -> str | None:
        """Give it a pickled function, unless it holds it.

        Returns:
            Why it cannot load it, continuing "tool 'name' ...", or None.

        Raises:
            ChildLost: it crashed, or the imports took longer than `START_SECONDS`.
        """
        if number in self._loaded:
            return None
        if len(self._loaded) >= FUNCTIONS:  # as the process does
            del self._loaded[next(iter(self._loaded))]
        until = time.monotonic() + START_SECONDS
        late = f"was not loaded in its process within {START_SECONDS:g} s"
        reply = pickle.loads(self._exchange(pickle.dumps(("load", number, function)), until, late))
        if reply[0] != "loaded":
            return str(reply[1])
        self._loaded[number] = None
        return None

    def call(self, call: bytes, deadline: float) -> bytearray:
        """Have a loaded function called.

        Args:
            call: pickled ("call", number, arguments).
            deadline: seconds, from here to the last byte of the answer.

        Returns:
            The pickled answer, see `worker_process`.

        Raises:
            ChildLost: it crashed, or the deadline passed.
        """
        until = time.monotonic() + min(deadline, LONGEST_SECONDS)
        return self._exchange(call, until, f"did not return within {deadline:g} s; its process was killed")

    def interrupt(self) -> None:
        """Make the thread that waits for it get `ChildLost` at once. From any thread."""
        self._interrupted = True
        with contextlib.suppress(OSError):  # no longer open, or not connected
            self._channel.shutdown(socket.SHUT_RDWR)

    def kill(self) -> None:
        """End it and what it started, now. Safe to call twice."""
        self._channel.close()
        self._other_end.close()
        ended, self._ended = self._ended, True
        if ended or self._process is None:
            return
        # What a crashed tool had started lives on in its group.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # in the kernel's hands: dies when a device answers
            self._process.wait(CRASH_SECONDS)

    def hang_up(self) -> None:
        """Tell an idle process to end, and return."""
        self._channel.close()

    def close(self, until: float) -> None:
        """Wait until `time.monotonic()` is `until` for a process that was told to end, then terminate, then kill it."""
        if self._process is not None and not self._ended:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(max(0.0, until - time.monotonic()))
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(TERMINATE_SECONDS)
        self.kill()

    def _exchange(self, message: bytes, until: float, late: str) -> bytearray:
        try:
            self._channel.settimeout(max(1e-3, until - time.monotonic()))
            send(self._channel, message)
            return receive(self._channel, until)
        except TimeoutError:
            # Without an end of the socket where something that the tool forked still holds it.
            dead = self._process is not None and self._process.poll() is not None
            raise ChildLost(self._how_it_ended() if dead else f"{late}.") from None
        except (EOFError, OSError):
            raise ChildLost(self._how_it_ended()) from None

    def _how_it_ended(self) -> str:
        if self._interrupted:
            return "was interrupted."
        assert self._process is not None
        try:
            code = self._process.wait(CRASH_SECONDS)
        except subprocess.TimeoutExpired:
            return "closed its process's connection to the trainer."
        if code >= 0:
            return f"ended its process: exit code {code}."
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        hint = " (as Linux does when memory runs out)" if -code == signal.SIGKILL else ""
        return f"crashed its process: {name}{hint}."
