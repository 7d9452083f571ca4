"""Runs programs that a model wrote: all against all tests, without network, within limits."""

from __future__ import annotations

import functools
import json
import logging
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from trlx_hybrid.errors import ConfigError, HybridError

from .runner import Verdict

logger = logging.getLogger(__name__)

WALLS = ("bubblewrap", "namespaces", "limits")
START_SECONDS = 30.0  # for a process to start, on a machine that is busy
BUBBLEWRAP = "--unshare-ipc --unshare-net --unshare-pid --die-with-parent --as-pid-1 --ro-bind / / --dev /dev"


class SandboxError(HybridError):
    """Programs cannot be run here, or what runs them ended. Says why."""


class ProgramTests(NamedTuple):
    """A program and the tests that it is to be run with.

    Attributes:
        program: Python source.
        tests: Python sources, each executed with the program's names.
        trusted: how many of the first tests are above doubt. Where one of these takes more time than allowed, the
            program is at fault and is not started again: all later tests have that verdict.
    """

    program: str
    tests: Sequence[str]
    trusted: int = 0


@dataclass(frozen=True, kw_only=True)
class Sandbox:
    """Runs programs with their tests in processes that are walled off.

    All tests of a program run in one process, each with a copy of its global names; one that ends the process costs a
    new one. The processes can open no socket, change no file and start no process, and know nothing of this one's
    environment. As root, programs run as nobody. They have Python's standard library and can read what nobody, or this
    user, can read.

    Attributes:
        seconds: CPU time of a program, and of each test of it.
        wall_seconds: wall time of the same. More than `seconds`, for a machine that is busy.
        memory_mib: address space of a process.
        workers: processes at once; the cores that this process may use, shared with the other ranks of this machine, by
            default.
        walls: "bubblewrap"; "namespaces" of the kernel, without network, with read-only mounts; or "limits", those of
            the process and what Python reports of itself, which native code gets past. The first that works here by
            default: `using`.
    """

    seconds: float = 1.0
    wall_seconds: float = 5.0
    memory_mib: int = 512
    workers: int | None = None
    walls: str | None = None

    def __post_init__(self) -> None:
        if self.walls not in (None, *WALLS):
            raise ConfigError(f"Sandbox: walls must be one of {', '.join(WALLS)}, got {self.walls!r}.")
        for name in ("seconds", "wall_seconds", "memory_mib", "workers"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"Sandbox: {name} must be a positive number, got {value!r}.")

    @functools.cached_property
    def using(self) -> str:
        """The walls that programs run behind, tried once.

        Raises:
            SandboxError: none of them work here, or not the ones that were asked for.
        """
        reasons: list[str] = []
        for walls in (self.walls,) if self.walls else WALLS:
            reason = missing(walls)
            if reason is None:
                level = logging.WARNING if walls == "limits" and not self.walls else logging.INFO
                logger.log(level, "Programs run behind walls=%r. %s", walls, " ".join(reasons))
                return walls
            reasons.append(f"Not {walls}: {reason}.")
        told = " ".join(reasons)
        raise SandboxError(f"Programs cannot be run here. {told} Install bubblewrap, or choose other `walls`.")

    def run(self, jobs: Sequence[ProgramTests]) -> list[list[Verdict]]:
        """The verdict on each test of each job, in their order.

        Raises:
            SandboxError: programs cannot be run here, or a process that runs them ended or did not answer in time.
        """
        if not jobs:
            return []
        workers = min(self.workers or shared_cores(), len(jobs))
        limits = {"seconds": self.seconds, "wall": self.wall_seconds, "memory": self.memory_mib << 20}
        shares = [list(jobs[start::workers]) for start in range(workers)]
        with ThreadPoolExecutor(workers) as pool:
            done = list(pool.map(functools.partial(run_jobs, walls=self.using, limits=limits), shares))
        return [done[place % workers][place // workers] for place in range(len(jobs))]


def shared_cores() -> int:
    """Cores for each rank of this machine, at least one."""
    return max(len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", 1)), 1)


def run_jobs(jobs: Sequence[ProgramTests], walls: str, limits: dict[str, float]) -> list[list[Verdict]]:
    """What one process makes of its jobs, one after the other."""
    command = [sys.executable, "-P", "-s", "-S", "-B", str(Path(__file__).with_name("runner.py"))]
    if walls == "bubblewrap":
        command = [shutil.which("bwrap") or "bwrap", *BUBBLEWRAP.split(), "--", *command]
    asked = json.dumps({"namespaces": walls == "namespaces", "limits": limits, "jobs": jobs})
    # Each wait in there has a deadline: at worst, every test needs a process of its own, and takes all its time.
    seconds = START_SECONDS + limits["wall"] * sum(2 * len(job.tests) for job in jobs)
    given: dict[str, Any] = {"capture_output": True, "cwd": "/", "env": {"PYTHONHASHSEED": "0"}}  # of which no secret
    try:
        done = subprocess.run(command, input=asked.encode(), timeout=seconds, check=True, **given)
        return [[Verdict(verdict) for verdict in answer] for answer in json.loads(done.stdout)]
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or str(error).encode()
        reason = said.decode(errors="replace").strip().splitlines()[-1]
        raise SandboxError(f"The process that runs programs (walls={walls!r}) failed: {reason}") from error


@functools.cache
def missing(walls: str) -> str | None:
    """Why these walls do not work here, or None. Tries them."""
    if walls == "bubblewrap" and os.getuid() == 0:  # it gives up what it takes to end a process that became nobody
        return "it serves users other than root"
    limits = {"seconds": 1.0, "wall": START_SECONDS, "memory": float(512 << 20)}
    try:
        answer = run_jobs([ProgramTests("import string", ["string.digits"])], walls, limits)
    except SandboxError as error:
        return str(error)
    return None if answer == [[Verdict.PASSED]] else f"a program that should pass: {answer[0][0]}"
