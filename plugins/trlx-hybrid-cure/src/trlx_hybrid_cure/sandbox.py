"""A sandbox for programs that a model wrote: it runs all programs with all tests, without network and within limits."""

from __future__ import annotations

import functools
import json
import logging
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from trlx_hybrid.errors import ConfigError, HybridError

from .verdict import Verdict
from .walls import NOBODY, bubblewrap

logger = logging.getLogger(__name__)

WALLS = ("bubblewrap", "namespaces", "limits")
START_SECONDS = 30.0  # for a process to start, on a machine that is busy
JUDGE = "import sys; sys.path.append(sys.argv[1]); from trlx_hybrid_cure.judge import main"
JUDGE += "; sys.path.pop(); main(sys.argv[2])"


class SandboxError(HybridError):
    """Programs cannot be run here, or the process that runs them failed. The message says why."""


class ProgramTests(NamedTuple):
    """A program and the tests that it is to be run with.

    Attributes:
        program: Python source.
        tests: Python sources, each executed with the program's names.
        trusted: how many of the first tests are known to be right. Where one of these exceeds a limit of time, the
            program is at fault and is not started again: all later tests get the same verdict, "cpu" or "wall".
    """

    program: str
    tests: Sequence[str]
    trusted: int = 0


@dataclass(frozen=True, kw_only=True)
class Sandbox:
    """Runs programs with their tests in isolated processes.

    A program has a process, and each of its tests has another, which the program cannot reach: a test asks for what it
    uses of the program, gets copies of plain values, and compares them itself. All tests of a program share the
    program's process; a test that ends it costs a new one. The processes can open no socket, change no file and start
    no process, and know nothing of this process's environment. Where this process is root, they run as nobody. They
    have Python's standard library.

    Attributes:
        seconds: CPU time of a program, and of each test of it.
        wall_seconds: wall time of a program, and of each test of it. More than `seconds`, for a busy machine.
        batch_seconds: wall time of all programs of a call. Each program has an equal share of it, and what the programs
            before it left of theirs. Tests that are not run to their end within it have the verdict "budget", and a
            warning counts them.
        memory_mib: address space of a process.
        workers: processes at once. By default, the cores that this process may use, shared with the other ranks of this
            machine.
        walls: "bubblewrap"; "namespaces" of the kernel, without network, and without files but those of Python and the
            system; or "limits", the limits of a process alone, which can read all files that its user can read. In all
            three, the kernel refuses system calls that neither computing nor reading needs. By default, the first that
            works here: `using`.
    """

    seconds: float = 1.0
    wall_seconds: float = 5.0
    batch_seconds: float = 120.0
    memory_mib: int = 512
    workers: int | None = None
    walls: str | None = None

    def __post_init__(self) -> None:
        if self.walls not in (None, *WALLS):
            raise ConfigError(f"Sandbox: walls must be one of {', '.join(WALLS)}, got {self.walls!r}.")
        for name in ("seconds", "wall_seconds", "batch_seconds", "memory_mib", "workers"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"Sandbox: {name} must be a positive number, got {value!r}.")

    @functools.cached_property
    def using(self) -> str:
        """The isolation that programs run behind, as in `walls`; found by trying it at the first use.

        Raises:
            SandboxError: no isolation works here, or not the one that was asked for.
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
        """Return the verdict on each test of each job, in the order of the jobs.

        Raises:
            SandboxError: programs cannot be run here, or a process that runs them ended or did not answer in time.
        """
        if not jobs:
            return []
        workers = min(self.workers or shared_cores(), len(jobs))
        limits = {"seconds": self.seconds, "wall": self.wall_seconds, "batch": self.batch_seconds}
        limits["memory"] = self.memory_mib << 20
        shares = [list(jobs[start::workers]) for start in range(workers)]
        with ThreadPoolExecutor(workers) as pool:
            done = list(pool.map(functools.partial(run_jobs, walls=self.using, limits=limits), shares))
        unfinished = sum(verdicts.count(Verdict.BUDGET) for of_worker in done for verdicts in of_worker)
        if unfinished:
            logger.warning(
                "%d of %d tests were not run to their end: the %g s of the batch were spent. They count as not passed. "
                "Where programs are slow rather than endless, raise batch_seconds.",
                unfinished,
                sum(len(job.tests) for job in jobs),
                self.batch_seconds,
            )
        return [done[place % workers][place // workers] for place in range(len(jobs))]


def shared_cores() -> int:
    """Return how many cores each rank of this machine has, at least one."""
    return max(len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", 1)), 1)


def run_jobs(jobs: Sequence[ProgramTests], walls: str, limits: dict[str, float]) -> list[list[Verdict]]:
    """Start one judging process, and return its verdicts on each job's tests.

    Args:
        jobs: programs with their tests, judged one after the other.
        walls: the isolation, as in `Sandbox`.
        limits: `seconds`, `wall`, `memory` and `batch`, as in `judge.Limits`.
    """
    return [[Verdict(verdict) for verdict in answer] for answer in answer_of_judge(jobs, walls, limits)["verdicts"]]


def answer_of_judge(jobs: Sequence[ProgramTests], walls: str, limits: dict[str, float]) -> Any:
    """Return the JSON that the process of `judge` writes for jobs: `verdicts`, and whether calls are `filtered`."""
    place = str(Path(__file__).resolve().parent.parent)
    command = [os.path.realpath(sys.executable), "-P", "-s", "-S", "-B", "-c", JUDGE, place, walls]
    given: dict[str, Any] = {"capture_output": True, "cwd": "/", "env": {"PYTHONHASHSEED": "0"}}  # no secrets in it
    if walls == "bubblewrap":
        command = [*bubblewrap(), *command]
        if os.getuid() == 0:  # root without the rights that it gives up could not end processes of nobody
            given |= {"user": NOBODY, "group": NOBODY, "extra_groups": []}
    asked = json.dumps({"limits": limits, "jobs": jobs})
    try:
        done = subprocess.run(
            command, input=asked.encode(), timeout=START_SECONDS + limits["batch"], check=True, **given
        )
        return json.loads(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or str(error).encode()
        reason = said.decode(errors="replace").strip().splitlines()[-1]
        raise SandboxError(f"The process that runs programs (walls={walls!r}) failed: {reason}") from error


@functools.cache
def missing(walls: str) -> str | None:
    """Return why an isolation of `Sandbox.walls` does not work here, or None. Runs a small program to find out."""
    limits = {"seconds": 1.0, "wall": START_SECONDS, "memory": 512 << 20, "batch": START_SECONDS}
    try:
        answer = answer_of_judge([ProgramTests("import string", ["string.digits"])], walls, limits)
    except SandboxError as error:
        return str(error)
    if walls == "limits" and not answer["filtered"]:
        logger.warning("The kernel filters no system calls here: behind walls='limits', programs may make any.")
    ((verdict,),) = answer["verdicts"]
    return None if verdict == Verdict.PASSED else f"a program that should pass: {verdict}"
