"""What a rank can leave behind on a node: processes that it started, and shared-memory segments. Linux only.

A killed process cleans nothing up. Its children live on, and a POSIX segment keeps its name and its memory. vLLM's own
CPU worker uses one name in every job of a machine, so that one which stays makes every later engine fail with errno 17.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

SEAT_VARIABLE = "TRLX_HYBRID_SEAT"
"""Set for a rank when its process starts, and so for everything that it starts with exec."""
SEGMENTS = "/dev/shm/"
REST = 20  # a look through all processes is followed by a rest of this many times its length
SETTLED = 2e9  # nanoseconds after which what uses a new segment has mapped it


def processes() -> Iterable[int]:
    """Ids of all processes of this machine."""
    return (int(name) for name in os.listdir("/proc") if name.isdecimal())


def belonging_to(rank: int, seat: str) -> list[int]:
    """Processes that descend from a rank, also when their parents are gone; not the rank itself.

    A forked child stays in the process group or session that the rank leads; one that left both has, unless somebody
    took it away, the rank's environment. Ray's workers are left out: those that a script asked for are Ray's to end.
    """
    marker = f"{SEAT_VARIABLE}={seat}".encode()
    return [
        pid
        for pid in processes()
        if pid not in (rank, os.getpid())
        and (rank in _groups(pid) or marker in _read(f"/proc/{pid}/environ").split(b"\0"))
        and not _read(f"/proc/{pid}/cmdline").startswith(b"ray::")
    ]


def end(rank: int, seat: str, grace: float) -> list[int]:
    """Wait `grace` seconds for a dead rank's descendants to end, then kill them. Returns those killed."""
    deadline = time.monotonic() + grace
    while (left := belonging_to(rank, seat)) and time.monotonic() < deadline:
        time.sleep(0.05)
    for pid in left:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return left


@dataclass(slots=True)
class Segments:
    """Shared-memory segments that a rank or its descendants were seen to map.

    Attributes:
        seen: names under /dev/shm.
    """

    seen: set[str] = field(default_factory=set)
    _changed: int = -1
    _next: float = 0.0

    def look(self, rank: int, seat: str) -> None:
        """Note what they map now. Costs one `stat` while no segment comes or goes on this machine, little otherwise."""
        with suppress(OSError):
            changed = os.stat(SEGMENTS).st_mtime_ns
            if changed == self._changed:
                return
            self.seen |= mapped(rank)
            began = time.monotonic()
            if began >= self._next:
                for pid in belonging_to(rank, seat):
                    self.seen |= mapped(pid)
                self._next = time.monotonic() + REST * (time.monotonic() - began)
                if time.time_ns() - changed > SETTLED:
                    self._changed = changed

    def remove(self) -> list[str]:
        """Remove those that still have a name and that no process maps any more. Returns their names."""
        left = {name for name in self.seen if os.path.exists(SEGMENTS + name)}
        for pid in processes() if left else ():
            left -= mapped(pid)
        for name in left:
            with suppress(OSError):  # another rank's warden was faster, or it is another user's
                os.unlink(SEGMENTS + name)
        return sorted(left)


def mapped(pid: int) -> set[str]:
    """Names under /dev/shm that a process maps; nothing where it is gone or not ours."""
    names = set()
    for line in _read(f"/proc/{pid}/maps").splitlines():
        _, found, name = line.partition(SEGMENTS.encode())
        if found and not name.endswith(b" (deleted)"):
            names.add(os.fsdecode(name))
    return names


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    return bool(_groups(pid))


def _groups(pid: int) -> tuple[int, ...]:
    """Process group and session; empty where it does not run."""
    # pid (name) state parent group session ...; the name may contain anything, parentheses too
    fields = _read(f"/proc/{pid}/stat").rpartition(b")")[2].split()
    return (int(fields[2]), int(fields[3])) if fields and fields[0] != b"Z" else ()


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError:
        return b""
