"""Ends what a process started once it is gone, however it went: its descendants, and the segments that they left.

Ray has means of its own for this, of a cluster's start (`RAY_process_group_cleanup_enabled`, a raylet that adopts
orphans), which a cluster that is joined may not have, and which do not reach what torchelastic starts in sessions of
their own. Nor do they end anything when the raylet itself is killed. So a small process beside the one that starts
others waits until that one is gone, or asks for the end. It is a child of neither that process nor the raylet. Linux
only.

What a process started is known by two marks, which the system hands down to its children, and they to theirs. A name
in the environment is one; a program that is started with another environment loses it. A resource limit is the other,
and stays with daemons, which have no parent and a session of their own.
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
"""In the environment of everything that a process with a reaper starts."""
MARKED_LIMIT = 10
"""RLIMIT_LOCKS of `setrlimit(2)`, which limits nothing since Linux 2.4.25: its soft value is the owner's number."""
SHOWN_AS = b"Max file locks"  # that limit in /proc/PID/limits; its soft value is the next word
SHARED_MEMORY = "/dev/shm/"
SEGMENT = re.compile(r"psm_[0-9a-f]+|torch_\d+_\d+_\d+|nccl-\w+|sem\.(mp|loky)-.+|.+-cpushm.*")
"""Names of segments that Python, torch, NCCL and vLLM make. Other files there are somebody's, and stay."""
TICK = 0.05  # seconds between looks at shared memory
NEW_SECONDS = 2.0  # after its name has appeared, what uses a segment has mapped it
START_SECONDS = 60.0
GRACE = 2.0  # seconds from SIGTERM to SIGKILL
KILL_SECONDS = 5.0  # from SIGKILL until a process counts as one that cannot be ended


class Reaper:
    """A reaper for this process. What this process starts from now on bears its marks.

    Args:
        grace: seconds that descendants have to end by themselves.
        folder: to be removed when they have ended.
        segments: look after shared memory, which takes some processor time. Without, the reaper sleeps until the end.

    Attributes:
        owner: a number that no other process of this machine has: the value of `OWNER_VARIABLE` and `MARKED_LIMIT`.

    Raises:
        HybridError: it does not start. Names the node, the reason and the way out.
    """

    def __init__(self, grace: float = GRACE, folder: str = "", *, segments: bool = True) -> None:
        # Not at the top: the process that cleans up needs nothing of the host.
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
        """End all descendants now; returns what was left of them: processes that were killed, segments removed."""
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.write(b"\n")  # a forked child may hold the pipe open, so that closing it is not seen
            self._process.stdin.flush()
        told = _line(self._process, seconds)
        return list(json.loads(told)) if told else []


def _watching(arguments: list[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start `main`, and return its process once it watches.

    Raises:
        OSError, subprocess.SubprocessError: it does not start.
    """
    from trlx_hybrid.deadline import granted

    process = subprocess.Popen(
        [sys.executable, "-m", __name__, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    )
    process.wait(granted(START_SECONDS))  # it forks, and only then is it no child of ours
    if _line(process, granted(START_SECONDS)) != b"ready\n":
        raise OSError(f"it ended with exit code {process.returncode}, and did not say that it watches")
    return process


def _line(process: subprocess.Popen[bytes], seconds: float) -> bytes:
    """Return the next line that a process writes, and nothing where none comes in time."""
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], seconds)
    return process.stdout.readline() if ready else b""


def _mark(number: int | None) -> None:
    """Mark this process, and all that it starts from now on, with an owner's number; None takes the mark away."""
    _, most = resource.getrlimit(MARKED_LIMIT)
    with suppress(ValueError):  # a host that allows less: what is known by its environment or session is still found
        resource.setrlimit(MARKED_LIMIT, (most if number is None else number, most))


def descendants(owner: str, pid: int) -> list[psutil.Process]:
    """Processes that bear one of this owner's marks, or are in the process group or session of `pid`.

    Without `pid` itself (0: no such one), and without this process.
    """
    found = []
    for one in {*psutil.pids()} - {pid, os.getpid()}:
        with suppress(psutil.Error, OSError):  # gone, or somebody else's
            process = psutil.Process(one)
            mine = (pid > 0 and pid in (os.getpgid(one), os.getsid(one))) or _bears(one, owner.encode())
            if mine and state(one) is not None:
                found.append(process)
    return found


def _bears(pid: int, owner: bytes) -> bool:
    """Whether a process bears a mark of this owner. psutil takes far longer to read environments.

    Raises:
        OSError: it is gone, or somebody else's.
    """
    limits = Path(f"/proc/{pid}/limits").read_bytes()
    if limits.partition(SHOWN_AS)[2].split(None, 1)[:1] == [owner]:
        return True
    return OWNER_VARIABLE.encode() + b"=" + owner in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")


def state(pid: int) -> str | None:
    """As psutil has it, `psutil.STATUS_STOPPED` for one; None where the process has ended."""
    with suppress(psutil.Error):
        status = psutil.Process(pid).status()
        return None if status == psutil.STATUS_ZOMBIE else str(status)
    return None


def end(owner: str, pid: int, grace: float) -> list[int]:
    """SIGTERM for all descendants, SIGKILL for those that are left; returns the latter."""
    _signal(owner, pid, signal.SIGTERM, grace)
    killed: set[int] = set()
    deadline = time.monotonic() + KILL_SECONDS
    while time.monotonic() < deadline and (left := _signal(owner, pid, signal.SIGKILL, 0.5)):
        killed |= left
    return sorted(killed)


def _signal(owner: str, pid: int, which: signal.Signals, seconds: float) -> set[int]:
    """Send it to all descendants, and wait until there are none; returns those that it was sent to."""
    sent = set()
    for process in descendants(owner, pid):
        with suppress(psutil.Error):
            process.send_signal(which)  # not to another one that has its number by now
            sent.add(process.pid)
    deadline = time.monotonic() + seconds
    while descendants(owner, pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    return sent


# --- shared memory ----------------------------------------------------------------------------------------------------


class Segments:
    """Shared-memory segments that a process or its descendants were seen to map.

    A killed process leaves its segments, which keep their memory. Those without an owner that cleans up (Python's
    resource tracker, torch's manager) have to be removed by somebody, and afterwards nobody can tell whose they were.
    """

    def __init__(self, owner: str, pid: int) -> None:
        self._owner, self._pid = owner, pid
        self._seen: set[str] = set()
        self._since: dict[str, float] = {}  # when the name of a segment appeared
        self._created = _names_created(SHARED_MEMORY)

    def look(self) -> None:
        """Note who maps a segment whose name is new. Without one this reads no process: there may be thousands."""
        now = time.monotonic()
        with suppress(OSError):
            names = filter(SEGMENT.fullmatch, os.listdir(SHARED_MEMORY))
            self._since = {name: self._since.get(name, now) for name in names}
        new = {name for name, since in self._since.items() if now - since < NEW_SECONDS} - self._seen
        if new:
            for pid in [self._pid, *(process.pid for process in descendants(self._owner, self._pid))]:
                self._seen |= mapped(pid) & new

    def wait(self, others: list[int], seconds: float) -> bool:
        """Until one of these descriptors can be read (True), a name appears in shared memory, or the time is over."""
        ready, _, _ = select.select([*others, *self._created], [], [], seconds)
        for descriptor in set(ready) & set(self._created):
            os.read(descriptor, 1 << 16)
        return bool(set(ready) & set(others))

    def remove(self) -> list[str]:
        """Remove those that still have a name and that no process maps any more. Returns their names."""
        left = {name for name in self._seen if os.path.exists(SHARED_MEMORY + name)}
        for pid in psutil.pids() if left else ():
            left -= mapped(pid)
        for name in left:
            with suppress(OSError):
                os.unlink(SHARED_MEMORY + name)
        return sorted(left)


def _names_created(folder: str) -> list[int]:
    """A descriptor that can be read when a name has appeared there (inotify); none where the system has no more.

    A process may be killed within milliseconds of making a segment: who looks from time to time comes too late.
    """
    libc, create = ctypes.CDLL(None), 0x100
    descriptor = libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
    return [descriptor] if descriptor >= 0 and libc.inotify_add_watch(descriptor, folder.encode(), create) >= 0 else []


def mapped(pid: int) -> set[str]:
    """Names in /dev/shm that a process maps; nothing where it is gone or not ours.

    By device and inode: glibc maps a semaphore before it gives it its name (`sem_open`), and its maker's never shows.
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
    """Ray gives workers, and so what they start, a niceness of 15, which only root may take back."""
    with suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, 0)


def main(pid: int, owner: str, grace: float, folder: str, with_segments: bool) -> None:
    """Wait until the owner is gone or writes to us, then end what it started."""
    _mark(None)  # the owner may end all that bears its mark while we go on
    process = os.pidfd_open(pid)
    if os.fork():
        os._exit(0)
    os.setsid()
    for stop in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(stop, signal.SIG_IGN)
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 2)
    take_priority_back()  # or on a busy machine we would look too late
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
