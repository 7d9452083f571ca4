"""A sandbox for programs that a model wrote: it runs each program with its unit tests in isolated processes, without
network, and within limits of time and memory."""

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
    """Raised where programs cannot be run on this machine, or where the process that runs them failed. The message says
    why."""


class ProgramTests(NamedTuple):
    """A program, and the unit tests to run it with.

    Attributes:
        program: Python source.
        tests: Python sources, one per test. A test is executed with the program's global names, and fails by raising.
        trusted: how many of the tests, from the first, are known to be right (ground truth). If one of these tests
            exceeds a time limit, the program is to blame: it is not started again, and all later tests get the same
            verdict as this test, `Verdict.CPU` or `Verdict.WALL`.
    """

    program: str
    tests: Sequence[str]
    trusted: int = 0


@dataclass(frozen=True, kw_only=True)
class Sandbox:
    """Runs programs with their tests in isolated processes.

    Each program runs in a process of its own, and each of its tests in another, whose memory the program cannot reach.
    A test calls the program's functions over a socket, gets copies of the results, and compares them in its own
    process. All tests of a program use the same process of the program; it is started again only if a test ended it.
    None of these processes can open a socket, change a file, start a process or see this process's environment
    variables. If this process is root, they run as the user nobody. They can import Python's standard library.

    Attributes:
        seconds: limit of CPU time for a program, and for each of its tests, in seconds.
        wall_seconds: limit of wall time for a program, and for each of its tests, in seconds. It is above `seconds`,
            because a busy machine takes longer.
        batch_seconds: limit of wall time for all programs of one call of `run`, in seconds. Each program has an equal
            share of it, and the time that earlier programs left over. A test that is not finished in this time gets the
            verdict `Verdict.BUDGET`; a warning says how many there are.
        memory_mib: limit of the address space of each process, in MiB.
        workers: how many programs are judged at the same time. By default, the number of cores that this process may
            use, divided by the number of ranks on this machine.
        walls: the kind of isolation. "bubblewrap" uses the command `bwrap`. "namespaces" uses the kernel's namespaces:
            no network, and no files but those of Python and the system. "limits" sets only the limits of a process,
            which can still read all files that its user can read. With all three, the kernel refuses system calls that
            are needed neither for computing nor for reading files. None takes the first kind that works on this
            machine; the property `using` says which one.
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
        """The kind of isolation in use: "bubblewrap", "namespaces" or "limits". Found at the first use, by running a
        small program.

        Raises:
            SandboxError: no kind works on this machine, or the one in `walls` does not.
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
        """Run programs with their tests, and return a list of verdicts per program, one per test, in the order of
        `jobs`.

        Args:
            jobs: the programs with their tests. They are judged by several processes at the same time.

        Raises:
            SandboxError: programs cannot be run on this machine, or a judging process ended or did not answer in time.
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
    """Return how many CPU cores this rank may use: those that this process may run on, divided by the number of ranks
    on this machine; at least 1."""
    return max(len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", 1)), 1)


def run_jobs(jobs: Sequence[ProgramTests], walls: str, limits: dict[str, float]) -> list[list[Verdict]]:
    """Start one judging process, let it run some programs, and return a list of verdicts per program, one per test.

    Args:
        jobs: the programs with their tests; they are judged one after the other.
        walls: the kind of isolation: "bubblewrap", "namespaces" or "limits".
        limits: "seconds" and "wall", the CPU time and the wall time of a program or test, in seconds; "memory", the
            address space of a process, in bytes; "batch", the wall time of all jobs together, in seconds.

    Raises:
        SandboxError: the process failed, or did not answer in time.
    """
    return [[Verdict(verdict) for verdict in answer] for answer in answer_of_judge(jobs, walls, limits)["verdicts"]]


def answer_of_judge(jobs: Sequence[ProgramTests], walls: str, limits: dict[str, float]) -> Any:
    """Start the judging process (the module `judge`), send it some jobs, and return its answer.

    Args:
        jobs: the programs with their tests.
        walls: the kind of isolation: "bubblewrap", "namespaces" or "limits".
        limits: "seconds" and "wall", the CPU time and the wall time of a program or test, in seconds; "memory", the
            address space of a process, in bytes; "batch", the wall time of all jobs together, in seconds.

    Returns:
        A dict: "verdicts", a list of verdicts (as texts) for each job, and "filtered", whether the kernel can filter
        the system calls of the programs.

    Raises:
        SandboxError: the process failed, or did not answer in time.
    """
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
    """Return why a kind of isolation does not work on this machine, or None if it works. Runs a small program to find
    out.

    Args:
        walls: "bubblewrap", "namespaces" or "limits".
    """
    limits = {"seconds": 1.0, "wall": START_SECONDS, "memory": 512 << 20, "batch": START_SECONDS}
    try:
        answer = answer_of_judge([ProgramTests("import string", ["string.digits"])], walls, limits)
    except SandboxError as error:
        return str(error)
    if walls == "limits" and not answer["filtered"]:
        logger.warning("The kernel filters no system calls here: behind walls='limits', programs may make any.")
    ((verdict,),) = answer["verdicts"]
    return None if verdict == Verdict.PASSED else f"a program that should pass: {verdict}"
