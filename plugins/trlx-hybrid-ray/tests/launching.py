"""Launch a script from a test, on a cluster that the test process is connected to."""

import io
import json
import os
import sys
import threading
import time
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import psutil
from trlx_hybrid.testing.processes import start_ranks, wait_all
from trlx_hybrid_ray.launch import Job, accelerate_arguments
from trlx_hybrid_ray.launch import launch as run
from trlx_hybrid_ray.reaper import SHARED_MEMORY, mapped

from tests.support.fsdp import FSDP2

SCRIPTS = Path(__file__).parent / "scripts"
OBEDIENT = str(SCRIPTS / "obedient.py")
TESTED_BY = "TESTED_BY"  # a variable for all that this process starts: other tests may run on this machine
os.environ[TESTED_BY] = str(os.getpid())


@dataclass
class Launched:
    """How a launch ended: exit code, what it printed, and when, by `time.monotonic`."""

    code: int
    out: str
    err: str
    ended: float

    def lines(self, rank):
        """What a rank printed, whatever node it was on."""
        parts = [line.partition(f"rank {rank}] ") for line in self.out.splitlines()]
        return [text for before, found, text in parts if found and before in ("[", f"[node {rank} ")]


def shells_environment():
    """That of a user who knows nothing of this process's cluster. What Ray starts does not give way to other tests."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return inherited | {"RAY_worker_niceness": "0"}


class Captured(ExitStack):
    """As a context, takes what is written to Python's streams: pytest's `capfd` is for single tests only."""

    def __enter__(self):
        self._streams = [io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2)]
        for redirect, stream in zip((redirect_stdout, redirect_stderr), self._streams):
            self.enter_context(redirect(stream))
        return super().__enter__()

    def readouterr(self):
        """What has been written since the last time, as pytest's does."""
        found = [stream.buffer.getvalue().decode() for stream in self._streams]
        for stream in self._streams:
            stream.buffer.seek(0)
            stream.buffer.truncate()
        return found


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
    code = run(job, *accelerate_arguments(job), ray.get_runtime_context().gcs_address)
    ended = time.monotonic()
    out, err = capfd.readouterr()
    sys.stdout.write(out)  # for whoever reads about a failed test
    sys.stderr.write(err)
    return Launched(code, out, err, ended)


def reports(folder):
    """What each of two ranks wrote."""
    return [json.loads((folder / f"report.{rank}").read_text()) for rank in range(2)]


def without_ray(script, folder, *arguments):
    """The reports of two ranks with FSDP2 on this machine, with the variables that accelerate's launcher sets."""
    ranks = start_ranks(script, folder, *arguments, count=2, environment=os.environ | FSDP2)
    for done in wait_all(ranks, 500):
        assert done.returncode == 0, done.stderr[-4000:]
    return reports(folder)


def leftovers(tag):
    """Processes that mention `tag` in their command line or environment; not this one."""
    found = []
    for process in psutil.process_iter():
        try:
            line = " ".join(process.cmdline())
            mine = tag in line or process.environ().get("LEFT_BY") == tag
            if mine and process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(f"{process.pid} {line}")
        except psutil.Error:
            continue
    return found


class Segments(threading.Thread):
    """Watches shared memory from now on: what is new there is ours unless a process of others was seen to map it.

    Another test's segment can outlive its process: one that was killed leaves it to a tracker, which ends later.
    """

    def __init__(self):
        super().__init__(name="watches shared memory", daemon=True)
        self.before, self.seen, self.over = self.names(), {True: set(), False: set()}, threading.Event()
        self.start()

    @staticmethod
    def names():
        """Of files, but for Ray's object stores, which come and go with nodes; folders are what other tests stage."""
        with os.scandir(SHARED_MEMORY) as found:
            return {each.name for each in found if not each.name.startswith("plasma") and not each.is_dir()}

    def run(self):
        pause = 0.05
        while not self.over.wait(pause):
            began = time.thread_time()  # by the clock, looks of a busy machine would be seconds apart
            self.look()
            pause = max(0.05, 5 * (time.thread_time() - began))

    def look(self):
        new = self.names().difference(self.before, *self.seen.values())
        psutil.process_iter.cache_clear()  # a number that another process has by now has no parents there
        for process in psutil.process_iter() if new else ():
            if (names := mapped(process.pid) & new) and (whose := ours(process)) is not None:
                self.seen[whose] |= names

    def left(self):
        self.look()  # on a busy machine the last look may be seconds ago
        return self.names() - self.before - (self.seen[False] - self.seen[True])


def ours(process):
    """Whether this process started another one, or any that this descends from; None where it has ended."""
    try:
        return any(
            each.pid == os.getpid() or each.environ().get(TESTED_BY) == str(os.getpid())
            for each in (process, *process.parents())
        )
    except psutil.NoSuchProcess:
        return None
    except psutil.AccessDenied:
        return False


def nothing_left(tag, segments, seconds=30):
    """Wait for processes and segments of a test to be gone; returns what is still there."""
    deadline = time.monotonic() + seconds
    while (left := [*leftovers(tag), *segments.left()]) and time.monotonic() < deadline:
        time.sleep(0.2)
    segments.over.set()
    return left
