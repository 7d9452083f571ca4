"""Functions that end a process together with all its descendants, whatever their group, session or parent.

On Linux, a process that loses its parent becomes a child of its nearest ancestor that is a subreaper
(`PR_SET_CHILD_SUBREAPER`, see `prctl(2)`). Here a supervisor process makes itself a subreaper. So daemons, which leave
their group and session and have no parent, remain descendants of the supervisor. The supervisor is a separate process,
because it must outlive the process that it supervises: when a subreaper is killed, its descendants go to another
ancestor. On other systems there is no supervisor, and only the process's group is ended.
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
    """Fork this process: the call returns in the child only, while this process becomes its supervisor and never
    returns. Does nothing on systems other than Linux.

    The supervisor ends when the child ends, with the same exit code or signal; when another process calls `end` for it;
    or when the process that started it has died. Before it ends, it kills all its descendants. Call this in a process
    with one thread only.

    Args:
        parent: id of the process that started this one.
        closing: a file descriptor that the supervisor closes, so that only the child keeps it open.
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
    """Ask a process that has called `supervise` to end, with all its descendants, and return without waiting."""
    if sys.platform == "linux":
        process.terminate()
        process.send_signal(signal.SIGCONT)  # the child may have stopped the supervisor
        return
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _status_of(child: int, parent: int) -> int:
    """Wait, in the supervisor, until the child ends, a SIGTERM arrives or the parent has died; then kill all
    descendants of this process, and return the child's wait status.

    Args:
        child: process id of the supervised child.
        parent: id of the process that started the supervisor.
    """
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
    """Collect the wait statuses of children that have ended, so that none stays a zombie. Return the status of `child`
    if it is among them, else None."""
    status = None
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == child:
                status = ended[1]
    return status


def _descendants() -> list[int]:
    """Return the process ids of all descendants of this process; those that start during the call may be missing."""
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
    """End this process with the exit code or the signal that a wait status has."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0)  # the child has dumped core already, where that is wanted
        with contextlib.suppress(OSError):  # SIGKILL has no other handler
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status))
