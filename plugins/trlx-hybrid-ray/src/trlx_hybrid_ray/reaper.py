"""Ends what a process started once it is gone, however it went: its descendants, and the segments that they left.

Ray has means of its own for this, of a cluster's start (`RAY_process_group_cleanup_enabled`, a raylet that adopts
orphans), which a cluster that is joined may not have, and which do not reach what torchelastic starts in sessions of
their own. Nor do they end anything when the raylet itself is killed. So a small process beside the one that starts
others waits until that one is gone, or asks for the end. It is a child of neither that process nor the raylet. Linux
only, standard library only: it costs 12 MB.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

OWNER_VARIABLE = "TRLX_HYBRID_OWNER"
"""In the environment of everything that a process with a reaper starts."""
SHARED_MEMORY = "/dev/shm/"
SEGMENT = re.compile(r"psm_[0-9a-f]+|torch_\d+_\d+_\d+|nccl-\w+|sem\.(mp|loky)-.+|.+-cpushm.*")
"""Names of segments that Python, torch, NCCL and vLLM make. Other files there are somebody's, and stay."""
TICK = 0.1  # seconds between looks at shared memory
START_SECONDS = 60.0
GRACE = 2.0  # seconds from SIGTERM to SIGKILL
KILL_SECONDS = 5.0  # from SIGKILL until a process counts as one that cannot be ended


class Reaper:
    """A reaper for this process. What this process starts from now on is known by its environment.

    Args:
        grace: seconds that descendants have to end by themselves.
        folder: to be removed when they have ended.

    Attributes:
        owner: what `OWNER_VARIABLE` is set to; no other process of this machine has the same.

    Raises:
        OSError, subprocess.SubprocessError: it does not start.
    """

    def __init__(self, grace: float = GRACE, folder: str = "") -> None:
        self.owner = secrets.token_hex(8)
        environment = {name: value for name, value in os.environ.items() if name != OWNER_VARIABLE}
        os.environ[OWNER_VARIABLE] = self.owner
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(os.getpid()), self.owner, str(grace), folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )
        self._process.wait(START_SECONDS)  # it forks, and only then is it no child of ours
        if self._read(START_SECONDS) != b"ready\n":
            raise OSError("the process that cleans up did not start")

    def finish(self, seconds: float = 30.0) -> list[str]:
        """End all descendants now; returns what was left of them: processes that were killed, segments removed."""
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.write(b"\n")  # a forked child may hold the pipe open, so that closing it is not seen
            self._process.stdin.flush()
        told = self._read(seconds)
        return list(json.loads(told)) if told else []

    def _read(self, seconds: float) -> bytes:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], seconds)
        return self._process.stdout.readline() if ready else b""


def descendants(owner: str, pid: int = 0) -> Iterator[int]:
    """Processes that bear this owner's name in their environment, or are in the process group or session of `pid`.

    A forked child that starts no program has the environment that its parent was started with, which may not name the
    owner yet. It stays in the parent's group or session, unless it leaves both.
    """
    for entry in os.listdir("/proc"):
        if entry.isdecimal() and int(entry) not in (pid, os.getpid()) and _descends(int(entry), owner, pid):
            yield int(entry)


def state(pid: int) -> str:
    """As `ps` shows it: R, S, D, T where it was stopped by a signal; empty where it does not run."""
    fields = _status(pid)
    return fields[0] if fields and fields[0] != "Z" else ""


def children(pid: int) -> list[int]:
    """Processes that this one has started and that nobody has waited for."""
    return [int(e) for e in os.listdir("/proc") if e.isdecimal() and _status(int(e))[1:2] == [str(pid)]]


def environment(pid: int) -> dict[str, str]:
    """What a process was started with; empty where it is gone or not ours."""
    pairs = _read(f"/proc/{pid}/environ").decode(errors="surrogateescape").split("\0")
    return dict(pair.split("=", 1) for pair in pairs if "=" in pair)


def end(owner: str, pid: int, grace: float) -> list[int]:
    """SIGTERM for all descendants, SIGKILL for those that are left; returns the latter."""
    _signal(owner, pid, signal.SIGTERM)
    _wait(owner, pid, grace)
    killed: set[int] = set()
    deadline = time.monotonic() + KILL_SECONDS
    while time.monotonic() < deadline and (left := _signal(owner, pid, signal.SIGKILL)):
        killed |= left
        _wait(owner, pid, 0.5)
    return sorted(killed)


def _signal(owner: str, pid: int, which: signal.Signals) -> set[int]:
    sent = set()
    for one in list(descendants(owner, pid)):
        with suppress(OSError):
            process = os.pidfd_open(one)
            try:
                if _descends(one, owner, pid):  # the number may be another process's by now
                    signal.pidfd_send_signal(process, which)
                    sent.add(one)
            finally:
                os.close(process)
    return sent


def _wait(owner: str, pid: int, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while any(descendants(owner, pid)) and time.monotonic() < deadline:
        time.sleep(0.05)


def _descends(one: int, owner: str, pid: int) -> bool:
    fields = _status(one)
    if not fields or fields[0] == "Z":
        return False
    marker = f"{OWNER_VARIABLE}={owner}".encode()
    return (pid > 0 and str(pid) in fields[2:4]) or marker in _read(f"/proc/{one}/environ").split(b"\0")


def _status(pid: int) -> list[str]:
    # pid (name) state parent group session ...; the name may contain anything, parentheses too
    return _read(f"/proc/{pid}/stat").rpartition(b")")[2].decode().split()


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError:
        return b""


# --- shared memory ----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Segments:
    """Shared-memory segments that descendants of a process were seen to map.

    A killed process leaves its segments, which keep their memory. Those without an owner that cleans up (Python's
    resource tracker, torch's manager) have to be removed by somebody, and afterwards nobody can tell whose they were.

    Attributes:
        seen: names under /dev/shm.
    """

    owner: str
    pid: int
    seen: set[str]
    _changed: int = -1

    def look(self) -> None:
        """Note what they map now. Costs one `stat` while no file comes or goes there."""
        with suppress(OSError):
            changed = os.stat(SHARED_MEMORY).st_mtime_ns
            if changed != self._changed:
                for one in [self.pid, *descendants(self.owner, self.pid)]:
                    self.seen |= {name for name in mapped(one) if SEGMENT.fullmatch(name)}
                if time.time_ns() - changed > 2e9:  # by then what uses a new one has mapped it
                    self._changed = changed

    def remove(self) -> list[str]:
        """Remove those that still have a name and that no process maps any more. Returns their names."""
        left = {name for name in self.seen if os.path.exists(SHARED_MEMORY + name)}
        for entry in os.listdir("/proc") if left else ():
            if entry.isdecimal():
                left -= mapped(int(entry))
        for name in left:
            with suppress(OSError):
                os.unlink(SHARED_MEMORY + name)
        return sorted(left)


def mapped(pid: int) -> set[str]:
    """Names below /dev/shm that a process maps; nothing where it is gone or not ours."""
    names = set()
    for line in _read(f"/proc/{pid}/maps").splitlines():
        _, found, name = line.partition(SHARED_MEMORY.encode())
        if found and not name.endswith(b" (deleted)"):
            names.add(os.fsdecode(name))
    return names


def main(pid: int, owner: str, grace: float, folder: str) -> None:
    """Wait until the owner is gone or writes to us, then end what it started."""
    process = os.pidfd_open(pid)
    if os.fork():
        os._exit(0)
    os.setsid()
    for stop in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(stop, signal.SIG_IGN)
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 2)
    os.write(1, b"ready\n")
    segments = Segments(owner, pid, set())
    while not select.select([process, 0], [], [], TICK)[0]:
        segments.look()
    segments.look()
    left = [f"process {one}" for one in end(owner, pid, grace)]
    left += [f"{SHARED_MEMORY}{name}" for name in segments.remove()]
    if folder:
        shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):  # nobody reads it where the owner is gone
        os.write(1, json.dumps(left).encode() + b"\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], float(sys.argv[3]), sys.argv[4])
