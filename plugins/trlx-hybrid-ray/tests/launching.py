"""Launch a script from a test, on a cluster that the test process is connected to."""

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
from trlx_hybrid_ray.launch import Job, accelerate_arguments
from trlx_hybrid_ray.launch import launch as run
from trlx_hybrid_ray.reaper import SHARED_MEMORY

SCRIPTS = Path(__file__).parent / "scripts"
OBEDIENT = str(SCRIPTS / "obedient.py")


@dataclass
class Launched:
    """How a launch ended: exit code, what it printed, how long it took."""

    code: int
    out: str
    err: str
    seconds: float

    def lines(self, rank):
        """What a rank printed, whatever node it was on."""
        parts = [line.partition(f"rank {rank}] ") for line in self.out.splitlines()]
        return [text for before, found, text in parts if found and before in ("[", f"[node {rank} ")]


def launch(capfd, folder, script, *arguments, **settings):
    """As `trlx-hybrid launch` would, from its options on. `settings` are those of `Job`."""
    import ray

    job = Job(
        script=str(script),
        arguments=tuple(map(str, arguments)),
        folder=str(folder),
        **{"processes_per_node": 1, "gpus": False} | settings,
    )
    capfd.readouterr()
    started = time.monotonic()
    code = run(job, *accelerate_arguments(job), ray.get_runtime_context().gcs_address)
    out, err = capfd.readouterr()
    sys.stdout.write(out)  # for whoever reads about a failed test
    sys.stderr.write(err)
    return Launched(code, out, err, time.monotonic() - started)


def leftovers(tag):
    """Processes that mention `tag` in their command line or environment, and reapers; not this one."""
    found = []
    for process in psutil.process_iter():
        try:
            line = " ".join(process.cmdline())
            mine = tag in line or "trlx-hybrid-launch-" in line or f"LEFT_BY={tag}" in _environment(process)
            if mine and process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(f"{process.pid} {line}")
        except psutil.Error:
            continue
    return found


def segments():
    """Names in shared memory, but those of Ray's object stores, which come and go with nodes."""
    return {name for name in os.listdir(SHARED_MEMORY) if not name.startswith("plasma")}


def nothing_left(tag, before, seconds=10):
    """Wait for processes and segments of a launch to be gone; returns what is still there."""
    deadline = time.monotonic() + seconds
    while (left := [*leftovers(tag), *(segments() - before)]) and time.monotonic() < deadline:
        time.sleep(0.2)
    return left


def _environment(process):
    return " ".join(f"{name}={value}" for name, value in process.environ().items())
