"""A process of the trainer's that runs a program of this package, and ends with all that it has started."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from trlx_hybrid.interprocess import process_tree

CRASH_SECONDS = 5.0  # between the end of a process's socket and its own end, with all that it started


class SupervisedProcess:
    """The trainer's handle of a process.

    Everything that it starts, daemons included, ends with the process, and the process ends with the trainer, however
    the trainer ends: see `trlx_hybrid.interprocess.process_tree`. The process has a session of its own, so that the
    terminal's Ctrl-C reaches only the trainer. Its prints go to the trainer's stderr.

    Args:
        program: the program, a Python file. Its arguments are the file descriptor of its end of the socket, the process
            id of the trainer, `words`, and the trainer's `sys.path` as JSON.
        words: further arguments.
        environment: environment variables, besides those of this process.

    Attributes:
        channel: the trainer's end of the socket.

    Raises:
        OSError: the system gives no more processes.
    """

    def __init__(self, program: Path, *words: str, environment: Mapping[str, str] | None = None) -> None:
        self.channel, other_end = socket.socketpair()
        self._killed = False
        with other_end:
            path = json.dumps([str(folder) for folder in sys.path])
            # -P keeps this package's folders from shadowing modules that the process imports.
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(program), str(other_end.fileno()), str(os.getpid()), *words, path],
                stdin=subprocess.DEVNULL,
                stdout=2,
                env={**os.environ, **(environment or {})},
                pass_fds=(other_end.fileno(),),
                start_new_session=True,
            )

    def readable(self, seconds: float) -> bool:
        """Return whether its socket has something to read, or has ended, within a number of seconds."""
        events = select.poll()
        events.register(self.channel, select.POLLIN)
        return bool(events.poll(seconds * 1000))

    def kill(self) -> None:
        """End the process, and all that it started, at once. A thread that reads its socket reads its end.

        Any thread may call this.
        """
        killed, self._killed = self._killed, True
        if not killed:
            process_tree.end(self._process)
        with contextlib.suppress(OSError):  # not connected any more
            self.channel.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Kill the process, and release its socket."""
        self.kill()
        self.channel.close()
        with contextlib.suppress(subprocess.TimeoutExpired):  # it waits in the kernel, and dies when a device answers
            self._process.wait(CRASH_SECONDS)

    def gone(self) -> str:
        """Return how the process ended, whose socket has ended, in words that follow its name; kill what is left."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(CRASH_SECONDS)
        ended = self.how_it_ended() or "closed its process's connection to the trainer."
        self.kill()
        return ended

    def how_it_ended(self) -> str | None:
        """Return how the process ended, in words that follow its name; None while it runs."""
        code = self._process.poll()
        if code is None or code >= 0:
            return None if code is None else f"ended its process: exit code {code}."
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        hint = " (as Linux does when memory runs out)" if -code == signal.SIGKILL else ""
        return f"crashed its process: {name}{hint}."
