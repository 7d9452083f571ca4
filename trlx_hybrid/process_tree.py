"""Process trees: a process and all its descendants are ended together, whatever their group, session or parent.

On Linux, a process that loses its parent becomes a child of its nearest ancestor that asked for it
(`PR_SET_CHILD_SUBREAPER`, see `prctl(2)`). The supervisor here asks for it, so that daemons, which leave their group
and session and have no parent, stay below it. It is a separate process, since the descendants of a killed subreaper go
to another one. On other systems there is no supervisor, and only the process's group is ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from pathlib import Path

WATCHED = {signal.SIGCHLD, signal.SIGCONT, signal.SIGTERM}
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 1, 4, 36


def supervise(parent: int, closing: int) -> None:
    """Fork: return in the child, while this process stays as its supervisor and never returns.

    The supervisor ends when the child ends, with the same exit code or signal; when `end` asks it to; or when the
    process that started it has died. Before it ends, it kills all its descendants. Call this in a process with one
    thread only.

    Args:
        parent: id of the process that started this one.
        closing: a file descriptor that only the child keeps open.
    """
    if sys.platform != "linux":
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    # Sent when the thread that started this process ends, too. It also wakes a supervisor that its child has stopped.
    prctl(PR_SET_PDEATHSIG, signal.SIGCONT)
    supervisor = os.getpid()
    child = os.fork()
    if child:
        os.close(closing)
        _end_like(_status_of(child, parent))
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setsid()  # a signal to the child's group does not reach the supervisor
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    if os.getppid() != supervisor:  # the supervisor died before the call of prctl
        os._exit(1)


def end(process: subprocess.Popen[bytes]) -> None:
    """Make a process that called `supervise` end, with all its descendants. Does not wait for that."""
    if sys.platform == "linux":
        process.terminate()
        process.send_signal(signal.SIGCONT)  # the child may have stopped the supervisor
        return
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _status_of(child: int, parent: int) -> int:
    """Wait until there is a reason to end, kill all descendants of this process, and return the child's wait status."""
    status, told = None, False
    while status is None and not told and os.getppid() == parent:
        told = signal.sigwait(WATCHED) == signal.SIGTERM
        status = _reap(child)
    while True:
        for process in _descendants():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        try:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
        except ChildProcessError:  # no child is left, and so no descendant
            return status or 0
        found = _reap(child)
        status = found if status is None else status


def _reap(child: int) -> int | None:
    """Take the wait statuses of children that have ended; return the status of `child`, if it is among them."""
    status = None
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == child:
                status = ended[1]
    return status


def _descendants() -> list[int]:
    """Return the process ids of all descendants of this process. More may be started meanwhile."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):  # the process has ended
                # The command in parentheses may hold any characters; the state and the parent follow it.
                fields = (folder / "stat").read_bytes().rpartition(b")")[2].split()
                children.setdefault(int(fields[1]), []).append(int(folder.name))
    found = [os.getpid()]
    for process in found:
        found += children.get(process, [])
    return found[1:]


def _end_like(status: int) -> None:
    """End this process in the way in which the process with this wait status has ended."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0)  # the child has dumped core already, where that is wanted
        with contextlib.suppress(OSError):  # SIGKILL has no other handler
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status))
