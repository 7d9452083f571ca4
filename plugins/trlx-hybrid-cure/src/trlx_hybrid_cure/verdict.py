"""The verdicts on running a program with a test, and functions that derive a verdict from an exception or from the way
in which a process ended."""

from __future__ import annotations

import os
import signal
from enum import StrEnum


class Verdict(StrEnum):
    """The outcome of running a program with a test.

    Attributes:
        PASSED: the test ran to its end without raising.
        FAILED: an assertion does not hold.
        ERROR: the code raised another exception, is not valid Python, or exited.
        CPU, WALL, MEMORY: the code exceeded the limit of CPU time, wall time or memory. Code that waits for something
            exceeds wall time alone.
        FILES, PROCESSES, NETWORK: the code tried to change a file, to start a process, or to open a socket.
        REFUSED: the code tried to send a signal or to call native code.
        CRASHED: a signal ended the process that executed the code, as after a segmentation fault.
        BUDGET: the test was not run to its end, because the time of the whole batch had passed.
    """

    PASSED = "passed"
    FAILED = "failed"
    ERROR = "error"
    CPU = "cpu"
    WALL = "wall"
    MEMORY = "memory"
    FILES = "files"
    PROCESSES = "processes"
    NETWORK = "network"
    REFUSED = "refused"
    CRASHED = "crashed"
    BUDGET = "budget"


VERDICTS = list(Verdict)
ENDED = 64  # the exit status of a process that the audit hook ended, plus the verdict's place
BY_SIGNAL = {signal.SIGPROF: Verdict.CPU, signal.SIGXCPU: Verdict.CPU, signal.SIGXFSZ: Verdict.FILES}


def of_error(error: BaseException) -> Verdict:
    """Return the verdict on a program or test that raised an exception: FAILED for an AssertionError, MEMORY for a
    MemoryError, else ERROR."""
    kinds = {AssertionError: Verdict.FAILED, MemoryError: Verdict.MEMORY}
    return next((verdict for kind, verdict in kinds.items() if isinstance(error, kind)), Verdict.ERROR)


def of_end(status: int) -> Verdict:
    """Return the verdict on a program or test whose process ended before it reported a verdict.

    Args:
        status: the process's wait status, as `os.waitpid` returns it.

    Returns:
        The verdict; never PASSED.
    """
    if os.WIFSIGNALED(status):
        return BY_SIGNAL.get(signal.Signals(os.WTERMSIG(status)), Verdict.CRASHED)
    place = os.WEXITSTATUS(status) - ENDED
    return VERDICTS[place] if 0 < place < len(VERDICTS) else Verdict.ERROR
