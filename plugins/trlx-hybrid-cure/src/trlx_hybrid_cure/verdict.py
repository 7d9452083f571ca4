"""The verdict on a program with a test, and the mapping from the end of a process to a verdict."""

from __future__ import annotations

import os
import signal
from enum import StrEnum


class Verdict(StrEnum):
    """The outcome of a program with a test.

    Attributes:
        FAILED: an assertion does not hold.
        ERROR: another exception, a text that is no Python, or an exit.
        CPU, WALL, MEMORY: more than allowed; of wall time, where it waits for something.
        FILES, PROCESSES, NETWORK: it would have changed a file, started a process, opened a socket.
        REFUSED: it would have sent a signal or called native code.
        CRASHED: a signal ended its process, as after a segmentation fault.
        BUDGET: not run to its end, because the time of the batch was spent.
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
    """Return the verdict on a program or a test that raised this error."""
    kinds = {AssertionError: Verdict.FAILED, MemoryError: Verdict.MEMORY}
    return next((verdict for kind, verdict in kinds.items() if isinstance(error, kind)), Verdict.ERROR)


def of_end(status: int) -> Verdict:
    """Return the verdict for the end of a process, from its wait status. It is never PASSED."""
    if os.WIFSIGNALED(status):
        return BY_SIGNAL.get(signal.Signals(os.WTERMSIG(status)), Verdict.CRASHED)
    place = os.WEXITSTATUS(status) - ENDED
    return VERDICTS[place] if 0 < place < len(VERDICTS) else Verdict.ERROR
