"""The reaper: a small process that watches another process, the owner. When the owner is gone, the reaper ends the
owner's descendants and removes their shared memory.

Ray has means of its own for this, set when a cluster starts: `RAY_process_group_cleanup_enabled`, and a raylet that
adopts orphans. A cluster that is joined may not have them, they do not reach processes that torchelastic starts in
sessions of their own, and they end nothing when the raylet itself is killed. So the reaper waits beside the owner,
until the owner is gone or asks for the end. It is a child of neither the owner nor the raylet. Linux only.

The owner's descendants are known by two marks, which every process inherits from its parent. One is a variable in the
environment, which a program that is started with another environment loses. The other is a resource limit, which even
daemons keep, although they have another parent and a session of their own.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import resource
import secrets
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import psutil  # type: ignore[import-untyped]

OWNER_VARIABLE = "TRLX_HYBRID_OWNER"
"""The environment variable that marks the descendants of a process that has a reaper (the owner). Its value is the
number of the owner, `Reaper.owner`."""
MARKED_LIMIT = 10
"""The resource limit that marks descendants even where they lose the variable: RLIMIT_LOCKS of `setrlimit(2)`, which
has had no effect since Linux 2.4.25. Its soft value is the owner's number."""
SHOWN_AS = b"Max file locks"  # the name of that limit in /proc/PID/limits; its soft value is the next word
SHARED_MEMORY = "/dev/shm/"
SEGMENT = re.compile(r"psm_[0-9a-f]+|torch_\d+_\d+_\d+|nccl-\w+|sem\.(mp|loky)-.+|.+-cpushm.*")
"""A pattern of the names of shared-memory segments that Python, torch, NCCL and vLLM make. Other files in /dev/shm are
not removed."""
TICK = 0.05  # seconds between checks of shared memory
NEW_SECONDS = 2.0  # seconds after which the users of a new segment have mapped it
START_SECONDS = 60.0
GRACE = 2.0  # seconds from SIGTERM to SIGKILL
KILL_SECONDS = 5.0  # seconds from SIGKILL until a process counts as one that cannot be ended


class Reaper:
    """The reaper: a helper process that ends all processes which this process (the owner) starts from now on. It does
    so when the owner is gone or calls `finish`.

    Args:
        grace: seconds that descendants have to end by themselves.
        folder: a folder to remove when the descendants have ended; "" for none.
        segments: whether to remove shared-memory segments that the descendants leave. Watching them takes some
            processor time; without it, the reaper sleeps until the end.

    Attributes:
        owner: a random number, as text, by which the owner's descendants are recognised. They inherit it as the value
            of an environment variable (`OWNER_VARIABLE`) and of a resource limit (`MARKED_LIMIT`).

    Raises:
        HybridError: the reaper does not start; the message names the node, the reason and the way out.
    """

    def __init__(self, grace: float = GRACE, folder: str = "", *, segments: bool = True) -> None:
        # Not at the top: the reaper's own process needs nothing of the host package.
        from trlx_hybrid.errors import HybridError

        self.owner = str(1 + secrets.randbits(62))
        _mark(int(self.owner))
        environment = {name: value for name, value in os.environ.items() if name != OWNER_VARIABLE}
        os.environ[OWNER_VARIABLE] = self.owner
        try:
            self._process = _watching(
                [str(os.getpid()), self.owner, str(grace), folder, str(int(segments))], environment
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise HybridError(
                f"On node {os.uname().nodename} the process that ends what an actor has started cannot start, and "
                f"without it the actor does not: {type(error).__name__}: {error}. Let the node have room for more "
                f"processes (`ulimit -u`, a container's limit of pids) and memory, and see that {sys.executable} runs."
            ) from error

    def finish(self, seconds: float = 30.0) -> list[str]:
        """End all descendants now, and wait up to `seconds` for that. Returns a description of each process that had to
        be killed and each shared-memory segment that was removed."""
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.write(b"\n")  # a forked child may hold the pipe open, so that closing it is not seen
            self._process.stdin.flush()
        told = _line(self._process, seconds)
        return list(json.loads(told)) if told else []


def _watching(arguments: list[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start the reaper, a process that runs `main`: it watches another process, the owner, and ends the owner's
    descendants when the owner is gone. Return the started process once the reaper has said that it watches.

    Args:
        arguments: the arguments of `main`, as text.
        environment: the environment of the process, without the variable that marks the owner's descendants.

    Raises:
        OSError, subprocess.SubprocessError: the process does not start.
    """
    from trlx_hybrid.interprocess.deadline import granted

    process = subprocess.Popen(
        [sys.executable, "-m", __name__, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    )
    process.wait(granted(START_SECONDS))  # it forks, and its child is then no child of this process
    if _line(process, granted(START_SECONDS)) != b"ready\n":
        raise OSError(f"it ended with exit code {process.returncode}, and did not say that it watches")
    return process


def _line(process: subprocess.Popen[bytes], seconds: float) -> bytes:
    """Return the next line that the reaper's process writes, or b"" where none comes within `seconds`."""
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], seconds)
    return process.stdout.readline() if ready else b""


def _mark(number: int | None) -> None:
    """Mark this process, and all that it starts from now on, as an owner's: set `MARKED_LIMIT`, a resource limit that
    child processes inherit and nobody else uses, to the owner's number. None removes the mark."""
    _, most = resource.getrlimit(MARKED_LIMIT)
    with suppress(ValueError):  # the host allows less; processes are still found by their environment or session
        resource.setrlimit(MARKED_LIMIT, (most if number is None else number, most))


def descendants(owner: str, pid: int) -> list[psutil.Process]:
    """Return the processes that an owner has started, directly or not: those that bear the owner's mark (in an
    environment variable or a resource limit), or are in the process group or session of `pid`. The list contains
    neither `pid` itself nor this process.

    Args:
        owner: the owner's number, `Reaper.owner`; "" for none.
        pid: the id of a process; 0 for none.
    """
    found = []
    for one in {*psutil.pids()} - {pid, os.getpid()}:
        with suppress(psutil.Error, OSError):  # gone, or another user's
            process = psutil.Process(one)
            mine = (pid > 0 and pid in (os.getpgid(one), os.getsid(one))) or _bears(one, owner.encode())
            if mine and state(one) is not None:
                found.append(process)
    return found


def _bears(pid: int, owner: bytes) -> bool:
    """Return whether a process bears a mark of this owner: the environment variable or the resource limit. It reads
    /proc, which is far faster than psutil's reading of environments.

    Raises:
        OSError: the process is gone, or another user's.
    """
    limits = Path(f"/proc/{pid}/limits").read_bytes()
    if limits.partition(SHOWN_AS)[2].split(None, 1)[:1] == [owner]:
        return True
    return OWNER_VARIABLE.encode() + b"=" + owner in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")


def state(pid: int) -> str | None:
    """Return a process's status as psutil names it, such as `psutil.STATUS_STOPPED`; None where the process has
    ended."""
    with suppress(psutil.Error):
        status = psutil.Process(pid).status()
        return None if status == psutil.STATUS_ZOMBIE else str(status)
    return None


def end(owner: str, pid: int, grace: float) -> list[int]:
    """Send SIGTERM to all processes that an owner (a process that a reaper watches) has started, and SIGKILL to those
    that are left after `grace` seconds. Returns the ids of the processes that got SIGKILL.

    Args:
        owner: the owner's number, `Reaper.owner`; "" for none.
        pid: the id of a process; processes in its group or session are ended, too. 0 for none.
        grace: seconds between the two signals.
    """
    _signal(owner, pid, signal.SIGTERM, grace)
    killed: set[int] = set()
    deadline = time.monotonic() + KILL_SECONDS
    while time.monotonic() < deadline and (left := _signal(owner, pid, signal.SIGKILL, 0.5)):
        killed |= left
    return sorted(killed)


def _signal(owner: str, pid: int, which: signal.Signals, seconds: float) -> set[int]:
    """Send a signal to all processes that an owner (a process that a reaper watches) has started, and wait for at most
    `seconds` until all have ended. Returns the ids of the processes that got the signal, whether they have ended or
    not.

    Args:
        owner: the owner's number, `Reaper.owner`, with which its descendants are marked; "" for none.
        pid: the id of a process; processes in its group or session get the signal, too. 0 for none.
        which: the signal.
        seconds: the time to wait.
    """
    sent = set()
    for process in descendants(owner, pid):
        with suppress(psutil.Error):
            process.send_signal(which)  # psutil sends nothing to another process that has got this number
            sent.add(process.pid)
    deadline = time.monotonic() + seconds
    while descendants(owner, pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    return sent


# --- shared memory ----------------------------------------------------------------------------------------------------


class Segments:
    """The record of shared-memory segments that a process or its descendants were seen to map, so that they can be
    removed after the processes.

    A killed process leaves its segments, which keep their memory. Segments that neither Python's resource tracker nor
    torch's manager cleans up have to be removed, and their creator cannot be found out afterwards.

    Args:
        owner: the number that marks the process's descendants, `Reaper.owner`; "" for none.
        pid: the id of the process.
    """

    def __init__(self, owner: str, pid: int) -> None:
        self._owner, self._pid = owner, pid
        self._seen: set[str] = set()
        self._since: dict[str, float] = {}  # when the name of a segment appeared
        self._created = _names_created(SHARED_MEMORY)

    def look(self) -> None:
        """Record the new shared-memory segments in /dev/shm that the process or a descendant maps, so that `remove` can
        remove them later.

        Call it often: a process that ends between two calls may leave a segment that no call has seen. A call is cheap
        if no new name has appeared in /dev/shm: then it inspects no processes.
        """
        now = time.monotonic()
        with suppress(OSError):
            names = filter(SEGMENT.fullmatch, os.listdir(SHARED_MEMORY))
            self._since = {name: self._since.get(name, now) for name in names}
        new = {name for name, since in self._since.items() if now - since < NEW_SECONDS} - self._seen
        if new:
            for pid in [self._pid, *(process.pid for process in descendants(self._owner, self._pid))]:
                self._seen |= mapped(pid) & new

    def wait(self, others: list[int], seconds: float) -> bool:
        """Wait until one of the file descriptors `others` can be read, a name appears in /dev/shm, or `seconds` have
        passed. Returns whether one of `others` can be read."""
        ready, _, _ = select.select([*others, *self._created], [], [], seconds)
        for descriptor in set(ready) & set(self._created):
            os.read(descriptor, 1 << 16)
        return bool(set(ready) & set(others))

    def remove(self) -> list[str]:
        """Remove the recorded segments that still have a name and that no process maps any more. Returns the names of
        the removed segments."""
        left = {name for name in self._seen if os.path.exists(SHARED_MEMORY + name)}
        for pid in psutil.pids() if left else ():
            left -= mapped(pid)
        for name in left:
            with suppress(OSError):
                os.unlink(SHARED_MEMORY + name)
        return sorted(left)


def _names_created(folder: str) -> list[int]:
    """Return a list of one file descriptor that can be read when a name has appeared in a folder (inotify). The list is
    empty where the system gives no more such descriptors.

    A process may be killed within milliseconds of making a segment: looking from time to time would miss it.
    """
    libc, create = ctypes.CDLL(None), 0x100
    descriptor = libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
    return [descriptor] if descriptor >= 0 and libc.inotify_add_watch(descriptor, folder.encode(), create) >= 0 else []


def mapped(pid: int) -> set[str]:
    """Return the names of the files in /dev/shm that a process maps; none where the process is gone or another user's.

    It compares device and inode: glibc maps a semaphore before it gives the semaphore its name (`sem_open`), so the
    name never shows in the maps of the process that made it.
    """
    found = set()
    with suppress(OSError):
        device = os.stat(SHARED_MEMORY).st_dev
        here = f"{os.major(device):02x}:{os.minor(device):02x}".encode()
        for line in Path(f"/proc/{pid}/maps").read_bytes().splitlines():
            if SHARED_MEMORY.encode() in line:
                _, _, _, where, inode, _ = line.split(None, 5)
                found |= {int(inode)} if where == here else set()
    if not found:
        return set()
    with os.scandir(SHARED_MEMORY) as entries:
        return {entry.name for entry in entries if entry.inode() in found}


def take_priority_back() -> None:
    """Set this process's niceness to 0 where that is allowed. Ray gives its workers, and so their children, a niceness
    of 15, and only root may lower it."""
    with suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, 0)


def main(pid: int, owner: str, grace: float, folder: str, with_segments: bool) -> None:
    """Run as the reaper: wait until the owner is gone or writes to this process's standard input, then end the owner's
    descendants. Write a JSON list of texts to standard output: each process that had to be killed, and each
    shared-memory segment that was removed.

    Args:
        pid: the owner's process id.
        owner: the owner's number.
        grace: seconds that descendants have to end by themselves.
        folder: a folder to remove when the descendants have ended; "" for none.
        with_segments: whether to remove shared-memory segments that the descendants leave.
    """
    _mark(None)  # the owner may end all processes with its mark, and this one must go on
    process = os.pidfd_open(pid)
    if os.fork():
        os._exit(0)
    os.setsid()
    for stop in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(stop, signal.SIG_IGN)
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 2)
    take_priority_back()  # otherwise it would check too late on a busy machine
    segments, rest = Segments(owner, pid) if with_segments else None, 0.0
    os.write(1, b"ready\n")
    if segments is None:
        select.select([process, 0], [], [])
    else:
        while not (select.select([process, 0], [], [], rest)[0] or segments.wait([process, 0], TICK)):
            began = time.process_time()
            segments.look()
            rest = 5 * (time.process_time() - began)  # at most a sixth of a core
        segments.look()
    left = [f"process {one}" for one in end(owner, pid, grace)]
    left += [f"{SHARED_MEMORY}{name}" for name in (segments.remove() if segments else ())]
    if folder:
        shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):  # nobody reads it where the owner is gone
        os.write(1, json.dumps(left).encode() + b"\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], float(sys.argv[3]), sys.argv[4], bool(int(sys.argv[5])))
