"""The host memory that is free for this process, also within a container."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil  # type: ignore[import-untyped]

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")
FILES = {
    "": ("memory.max", "memory.current", "inactive_file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
"""Names of the files with a group's limit and with what it uses, and of the entry of `memory.stat` that can be freed at
any time, by the controllers of a line of `/proc/self/cgroup`: "" for version 2, and "memory" for version 1. Source: the
Linux kernel's `Documentation/admin-guide/cgroup-v2.rst` and `cgroup-v1/memory.rst`."""


def free_bytes() -> int:
    """Return the bytes of host memory that this process may still take: what the host has, and at most what the limits
    of its cgroups leave. A process that takes more is killed, without an error."""
    return min([int(psutil.virtual_memory().available), *_left_by_limits()])


def _left_by_limits() -> Iterator[int]:
    """Yield what the limit of each of this process's cgroups leaves, from its own group to the root."""
    lines = []
    with suppress(OSError):
        lines = OWN_CGROUPS.read_text().splitlines()
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers not in FILES:
            continue
        limit, used, entry = FILES[controllers]
        group = Path(path.lstrip("/"))
        for folder in (CGROUPS / controllers / part for part in (group, *group.parents)):
            with suppress(OSError, ValueError):  # no such file in the root, or "max"
                stat = dict(text.split() for text in (folder / "memory.stat").read_text().splitlines())
                held = int((folder / used).read_text()) - int(stat.get(entry, 0))
                yield max(0, int((folder / limit).read_text()) - held)
