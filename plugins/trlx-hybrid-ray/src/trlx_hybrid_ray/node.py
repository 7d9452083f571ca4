"""The actor of one node of a launch, which runs `accelerate launch` there and reports on it.

    trlx-hybrid launch ──calls──▶ NodeActor ──starts──▶ accelerate launch ──starts──▶ the ranks
                                      └──starts──▶ reaper, which ends processes that are left, whoever was killed

The ranks' output goes to files, by torchelastic's own redirection. So the training goes on while the launcher is
suspended or its terminal blocks, and the last line of a killed process is not lost. The disk space of lines is freed
after they were forwarded to the launcher.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
from trlx_hybrid.interprocess.deadline import listen, unreachable

from .cluster import environment
from .errors import LaunchError, ScriptError
from .reaper import OWNER_VARIABLE, Reaper, end, state, take_priority_back

TICK = 0.1  # seconds between two checks of files and processes
CHUNK = 1 << 20  # bytes of one file in one report
STOPPED_SECONDS = 15.0  # seconds that a process may be stopped (SIGSTOP, Ctrl-Z) before that counts as a failure
WARN_SECONDS = 5.0
PORTS = range(20_000, 32_000)
"""The ports from which the port of torch's rendezvous store is chosen. They are below those that the system assigns by
itself, so that only a program that asks for such a port by number can take it."""
WORKER_VARIABLES = ("OMP_NUM_THREADS", "PYTHONBREAKPOINT", "RAY_JOB_ID", "RAY_RAYLET_PID", "RAY_CLIENT_MODE")
"""The environment variables that Ray changes for its workers. A rank is no Ray worker, so it gets the values that Ray
itself was started with on the node."""
EVENTS_VARIABLE = "TRLX_HYBRID_LAUNCH_EVENTS"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReport:
    """The events on a node since its previous report, as `NodeActor.poll` returns them to the launcher.

    Attributes:
        number: the report's number, counted per node.
        clock: the node's time, in seconds since the epoch.
        output: what was printed, as (rank, whether it is standard error, bytes) in order; rank None is accelerate
            itself.
        started: process ids of the ranks that have started, by rank.
        ended: (rank, exit code or minus the signal's number, time) of ranks whose process has ended; rank None is
            accelerate itself, where a signal ended it.
        code: the exit code of `accelerate launch`, once it has ended and all output has been reported.
        stopped: (description, pid, seconds for which it has been stopped) of processes that a signal such as SIGSTOP
            has stopped.
    """

    number: int
    clock: float
    output: Sequence[tuple[int | None, bool, bytes]] = ()
    started: Mapping[int, int]
    ended: Sequence[tuple[int | None, int, float]] = ()
    code: int | None = None
    stopped: Sequence[tuple[str, int, float]] = ()

    @property
    def empty(self) -> bool:
        """True where nothing happened since the previous report."""
        return not (self.output or self.started or self.ended or self.stopped) and self.code is None


class NodeActor:
    """The Ray actor that runs `accelerate launch` on one node for the launcher. It serves several calls at a time:
    `poll` waits while other methods run."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="trlx-hybrid-launch-"))
        self._reaper = Reaper(folder=str(self._folder))
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._report = NodeReport(number=0, clock=0.0, started={})
        self._offsets: dict[Path, int] = {}
        self._pids: dict[str, int] = {}  # processes that are checked for having been stopped
        self._stopped: dict[int, float] = {}
        self._ended: set[int | None] = set()
        self._raylet = int(os.environ.get("RAY_RAYLET_PID", os.getppid()))
        self._looked = time.monotonic()
        self._listener: socket.socket | None = None
        self._first_rank = 0
        self._alone = False

    def pid(self) -> int:
        """Return the id of the actor's process. The launcher waits for the answer to know that the actor has
        started."""
        return os.getpid()

    def free_port(self, address: str) -> int:
        """Return a port on this node for torch's rendezvous store. The actor listens on it until the ranks start, so
        that other nodes can try to reach it.

        Args:
            address: the IP address of this node that the other nodes use.

        Raises:
            LaunchError: no port can be opened at this address.
        """
        for port in random.sample(PORTS, 100):
            try:
                self._listener = listen(address, port)
                return port
            except OSError as error:
                why = error
        raise LaunchError(
            f"Node {socket.gethostname()} cannot listen at {address}, the address that Ray has for it: {why}. Start "
            "Ray there with --node-ip-address."
        )

    def reach(self, address: str, port: int) -> str | None:
        """Try to connect to a port of another node. Returns why that fails, or None where it works."""
        return unreachable(address, port)

    def start(
        self,
        arguments: Sequence[str],
        *,
        script: str,
        config: str,
        variables: Mapping[str, str],
        folder: str | None,
        gpus: Sequence[str],
        first_rank: int,
        alone: bool,
    ) -> None:
        """Start `accelerate launch` on this node, and return without waiting for its ranks.

        Args:
            arguments: accelerate's options, the script, and the script's arguments.
            script: the script's path as typed, relative to the folder.
            config: the text of accelerate's config file.
            variables: environment variables for the ranks, from the launcher.
            folder: the working folder; None to stay in the folder that Ray made for the job.
            gpus: ids of the GPUs for this node's ranks, for `CUDA_VISIBLE_DEVICES`.
            first_rank: the first rank on this node.
            alone: whether the run has a single rank, which accelerate starts without torchelastic.

        Raises:
            ScriptError: the folder or the script is not on this node.
        """
        _check_script(folder, script)
        if self._listener is not None:
            self._listener.close()
        config_file = self._folder / "accelerate.yaml"
        config_file.write_text(config)
        self._first_rank, self._alone = first_rank, alone
        told = _node_environment(self._raylet) | dict(variables) | environment()
        told |= {
            OWNER_VARIABLE: self._reaper.owner,
            "CUDA_VISIBLE_DEVICES": ",".join(gpus),
            "PYTHONUNBUFFERED": "1",  # a rank's lines reach the file as soon as they are printed
            "PET_REDIRECTS": "3",  # torchelastic: standard output and error of each rank to files
            EVENTS_VARIABLE: str(self._folder / "events"),
        }
        own = ["--config_file", str(config_file), "--log_dir", str(self._folder / "ranks")]
        with open(self._folder / "stdout.log", "wb") as out, open(self._folder / "stderr.log", "wb") as err:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, *own, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                cwd=folder,
                env=told,
                start_new_session=True,
            )
        self._pids = {"accelerate launch": self._process.pid, "the raylet of the node": self._raylet}

    def poll(self, seen: int, seconds: float, *, output: bool = True) -> NodeReport:
        """Return what has happened on the node since the last report, after waiting up to `seconds` for something to
        happen. Even an empty report shows that the node lives.

        Args:
            seen: the number of the last report that reached the launcher. If the actor has made a later report, which
                was lost on the way, it returns that report again.
            output: whether to include what ranks printed; False while the launcher cannot take more of it.
        """
        with self._lock:
            if self._report.number > seen:
                return self._report
            until = time.monotonic() + seconds
            while (report := self._look(seen + 1, output)).empty and time.monotonic() < until:
                time.sleep(TICK)
            self._report = report
            return report

    def signal(self, which: int) -> None:
        """Send the signal `which` to `accelerate launch`, which passes it on to its ranks."""
        if self._process is not None and self._process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, which)

    def kill(self) -> None:
        """Kill all processes that this actor started, at once. `poll` can still report what those processes have
        printed."""
        end(self._reaper.owner, 0, 0.0)

    def finish(self) -> list[str]:
        """End the processes that are left of the launch on this node, after giving them a moment to end by themselves,
        and remove the actor's temporary folder. Returns a description of each process that had to be killed and each
        shared-memory segment that was removed."""
        return self._reaper.finish()

    # --- what happens -------------------------------------------------------------------------------------------------

    def _look(self, number: int, output: bool) -> NodeReport:
        over = self._process is not None and self._process.poll() is not None
        started, ended = self._events()
        pieces = list(self._output()) if output else []
        return NodeReport(
            number=number,
            clock=time.time(),
            output=pieces,
            started=started,
            ended=ended,
            code=self._process.returncode if over and output and not pieces and self._process else None,
            stopped=list(self._stopping()),
        )

    def _events(self) -> tuple[dict[int, int], list[tuple[int | None, int, float]]]:
        """Read the lines that `accelerate_launch` has added to its file of events since the last call. Returns the
        process ids of ranks that have started, by rank, and (rank, exit code or minus the signal's number, time) of
        ranks that have ended."""
        path = self._folder / "events"
        started, ended = {}, []
        for line in self._new(path).splitlines() if path.exists() else ():
            event = json.loads(line)
            rank = event["rank"]
            if "pid" in event:
                started[rank] = self._pids[f"rank {rank}"] = event["pid"]
            elif rank not in self._ended:  # torchelastic's own report of the same end comes later
                self._ended.add(rank)
                self._pids.pop(f"rank {rank}", None)
                ended.append((rank, event["code"], event["time"]))
        return started, ended

    def _output(self) -> Iterator[tuple[int | None, bool, bytes]]:
        # torchelastic: LOG_DIR/run id/attempt_0/local rank/stdout.log
        ranks = sorted(self._folder.glob("ranks/*/attempt_*/*/std*.log"))
        for path in [self._folder / "stdout.log", self._folder / "stderr.log", *ranks]:
            if path.exists() and (data := self._new(path)):
                alone = self._first_rank if self._alone and not ranks else None
                rank = alone if path.parent == self._folder else self._first_rank + int(path.parent.name)
                yield rank, path.name == "stderr.log", data

    def _new(self, path: Path) -> bytes:
        """Return the bytes that were added to a file since the last call, at most `CHUNK`, and free the disk space of
        what has been read so far. From the file of events only complete lines are returned."""
        offset = self._offsets.get(path, 0)
        with open(path, "r+b", buffering=0) as file:
            file.seek(offset)
            data = file.read(CHUNK)
            if path.name == "events":
                data = data[: data.rfind(b"\n") + 1]
            self._offsets[path] = offset + len(data)
            if data:
                _give_back(file.fileno(), offset + len(data))
        return data

    def _stopping(self) -> Iterator[tuple[str, int, float]]:
        """Yield the processes of this node that are stopped (by SIGSTOP, say) for `WARN_SECONDS`, and once more at
        `STOPPED_SECONDS`, after which the run fails. Each is (description, process id, seconds for which it is
        stopped). Time in which this actor was stopped itself does not count, so that a pause of the whole node is not
        reported."""
        passed, self._looked = min(time.monotonic() - self._looked, 1.0), time.monotonic()
        for what, pid in self._pids.items():
            before = self._stopped.get(pid, 0.0)
            now = self._stopped[pid] = before + passed if state(pid) == psutil.STATUS_STOPPED else 0.0
            if before < WARN_SECONDS <= now or before < STOPPED_SECONDS <= now:
                yield what, pid, now


def _check_script(folder: str | None, script: str) -> None:
    here = f"Node {socket.gethostname()}"
    way_out = (
        "Put it on a file system that all nodes share, or let Ray send it: ray job submit --working-dir . -- "
        "trlx-hybrid launch …"
    )
    if folder is not None and not os.path.isdir(folder):
        raise ScriptError(f"{here} has no folder {folder}. {way_out}")
    folder = folder or os.getcwd()
    if not os.path.isfile(os.path.join(folder, script)):
        raise ScriptError(f"{here} finds no script {script} in {folder}. {way_out}")


def _node_environment(raylet: int) -> dict[str, str]:
    """Return this process's environment with Ray's changes for its workers undone, for the ranks.

    Args:
        raylet: the id of the node's raylet process, whose environment has the original values.
    """
    node = _environment(raylet)
    told = {name: value for name, value in os.environ.items() if name not in WORKER_VARIABLES}
    return told | {name: node[name] for name in WORKER_VARIABLES if name in node}


def _environment(pid: int) -> dict[str, str]:
    """Return the environment variables that a process was started with; empty where the process is gone or another
    user's."""
    with suppress(psutil.Error):
        return dict(psutil.Process(pid).environ())
    return {}


def _give_back(descriptor: int, size: int) -> None:
    """Free the disk space of the first `size` bytes of a file that another process still writes to. Where the file
    system cannot do so, nothing happens.

    Args:
        descriptor: the file's descriptor, open for writing.
        size: the number of bytes.
    """
    with suppress(OSError, AttributeError):
        keep_size_punch_hole = 1 | 2
        ctypes.CDLL(None).fallocate(descriptor, keep_size_punch_hole, ctypes.c_long(0), ctypes.c_long(size))


# --- the process that is `accelerate launch` --------------------------------------------------------------------------


def accelerate_launch() -> int:
    """Run the command `accelerate launch` in this process, and return its exit code. Threads write to a file, named by
    the variable `TRLX_HYBRID_LAUNCH_EVENTS`, when a rank starts and how it ends, for the node's actor.

    torchelastic notices a rank's end, too, but reports it only when it has ended the other ranks, which may take 30 s.
    """
    from accelerate.commands.launch import main
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    file = os.open(os.environ.pop(EVENTS_VARIABLE), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def note(**event: Any) -> None:
        os.write(file, json.dumps(event).encode() + b"\n")

    def watch() -> None:
        """Find the ranks among this process's children, by the environment variables that accelerate gives to ranks.
        Record each rank's start, and start a thread that waits for its end."""
        known, expected = set[int](), 1
        while len(known) < expected:
            for pid in {child.pid for child in psutil.Process().children()} - known:
                variables = _environment(pid)
                if "ACCELERATE_MIXED_PRECISION" in variables:
                    known.add(pid)
                    expected, rank = int(variables.get("LOCAL_WORLD_SIZE", 1)), int(variables.get("RANK", 0))
                    note(rank=rank, pid=pid)
                    threading.Thread(target=wait_for, args=(rank, pid), daemon=True).start()
            time.sleep(TICK)

    def wait_for(rank: int, pid: int) -> None:
        with suppress(ChildProcessError, AttributeError):  # torchelastic may be faster: noted below
            ended: Any = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
            code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
            note(rank=rank, code=code, time=time.time())

    threading.Thread(target=watch, daemon=True).start()
    try:
        main()
    except ChildFailedError as error:
        for rank, failure in error.failures.items():
            note(rank=rank, code=failure.exitcode, time=failure.timestamp)
        return 1
    except SignalException as error:
        note(rank=None, code=-error.sigval, time=time.time())
        return 128 + error.sigval
    except subprocess.CalledProcessError as error:  # of a single process, started without torchelastic
        note(rank=0, code=error.returncode, time=time.time())
        return 1
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background processes ignore SIGINT
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # a raylet blocks SIGINT, and its children inherit that
    take_priority_back()
    sys.exit(accelerate_launch())
