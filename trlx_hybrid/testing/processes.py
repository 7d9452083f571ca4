"""Processes for tests that start with the training stack already imported, because they are forked from one process
that has imported it.

Without them, a rank of a test spends about ten seconds of CPU time on imports, and often less than a second on the test
itself.
"""

from __future__ import annotations

import atexit
import json
import multiprocessing
import os
import random
import runpy
import socket
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing import forkserver
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

from ..memory.heap import freeze_imports

PORTS = range(20000, 32000)
_born: dict[str, str] = {}  # variables of the process with the imports


class Script:
    """A running script, as if started by `python SCRIPT ARGUMENTS`, in a process that is forked from one that has
    imported the training stack (`stack.py`).

    Args:
        script: path of the script.
        arguments: its command-line arguments, converted to strings.
        environment: its environment variables; by default those of this process.
    """

    def __init__(self, script: Path | str, *arguments: object, environment: Mapping[str, str] | None = None) -> None:
        context = multiprocessing.get_context("forkserver")
        if not _born:
            context.set_forkserver_preload(["trlx_hybrid.testing.preloaded"])
            _born.update(os.environ)
            forkserver.ensure_running()
        variables = dict(os.environ if environment is None else environment)
        self._folder = tempfile.TemporaryDirectory(prefix="trlx-hybrid-")
        self._outputs = [Path(self._folder.name) / name for name in ("stdout", "stderr")]
        self._command = [str(script), *map(str, arguments)]
        gone = set(_born) - set(variables)
        self._process = context.Process(target=_run, args=(self._command, variables, gone, self._outputs))
        self._process.start()

    def wait(self, timeout: float) -> CompletedProcess[str]:
        """Wait until the script has ended, and return its exit code, stdout and stderr. A script that takes too long is
        killed.

        Args:
            timeout: how long to wait, in seconds.

        Raises:
            TimeoutError: the script took too long; the message has the end of its stderr.
        """
        self._process.join(timeout)
        late = self._process.exitcode is None
        self.kill()
        with self._folder:
            stdout, stderr = (path.read_text() if path.exists() else "" for path in self._outputs)
        if late:
            raise TimeoutError(f"The script was still running after {timeout:g} s. Its stderr ends:\n{stderr[-3000:]}")
        return CompletedProcess(self._command, self._process.exitcode or 0, stdout, stderr)

    def kill(self) -> None:
        """Kill the script's process, if it still runs."""
        self._process.kill()
        self._process.join()


def start_ranks(
    script: Path | str, *arguments: object, count: int, environment: Mapping[str, str] | None = None
) -> list[Script]:
    """Start a script once per rank, with the environment variables that torchrun would set (`RANK`, `WORLD_SIZE` and so
    on).

    Args:
        script: path of the script.
        arguments: its command-line arguments, the same for every rank.
        count: the number of ranks.
        environment: further environment variables; by default those of this process.

    Returns:
        The running scripts, rank 0 first.
    """
    common = dict(os.environ if environment is None else environment)
    common |= {"OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = ({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)} for rank in range(count))
    return [Script(script, *arguments, environment=common | rank) for rank in ranks]


def wait_all(scripts: list[Script], timeout: float) -> list[CompletedProcess[str]]:
    """Wait until all scripts have ended, and return their results in the same order. If one takes too long, all are
    killed.

    Args:
        scripts: the running scripts.
        timeout: how long to wait for each, in seconds.

    Raises:
        TimeoutError: a script took too long; the message has the end of its stderr.
    """
    ends, late = [], None
    for script in scripts:
        try:
            ends.append(script.wait(timeout if late is None else 0.0))
        except TimeoutError as error:
            late = late or error
    if late is not None:
        raise late
    return ends


def rank_reports(
    script: Path | str,
    folder: Path,
    *arguments: object,
    count: int,
    environment: Mapping[str, str] | None = None,
    timeout: float = 400.0,
) -> list[Any]:
    """Run a script on several ranks, and return what each rank has written to `FOLDER/rank<rank>.json`, rank 0 first.

    Args:
        script: path of the script, which is called as `SCRIPT FOLDER ARGUMENTS`.
        folder: the folder for the results.
        arguments: further command-line arguments.
        count: the number of ranks.
        environment: environment variables; by default those of this process.
        timeout: how long to wait for each rank, in seconds.

    Raises:
        AssertionError: a rank's exit code is not 0; the message has the end of its stderr.
        TimeoutError: a rank took too long.
    """
    ends = wait_all(start_ranks(script, folder, *arguments, count=count, environment=environment), timeout)
    if any(end.returncode for end in ends):
        raise AssertionError("\n".join(f"exit code {end.returncode}\n{end.stderr[-3000:]}" for end in ends))
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(count)]


def free_port() -> int:
    """Return a TCP port of this machine on which nothing listens.

    The port lies outside the range from which Linux assigns ports to other programs, since it may take seconds until a
    rank listens on it.

    Raises:
        OSError: none of 100 ports that were tried is free.
    """
    for port in random.SystemRandom().sample(PORTS, 100):  # not the global generator, which tests may seed
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            return port
    raise OSError(f"none of 100 ports from {PORTS.start} to {PORTS.stop - 1} is free")


def _run(command: list[str], environment: dict[str, str], gone: set[str], outputs: list[Path]) -> None:
    """Run a script in this process, which was forked from one that has imported the stack, and set its environment
    first.

    Args:
        command: path of the script and its arguments.
        environment: environment variables to set.
        gone: names of environment variables to remove.
        outputs: files for stdout and stderr.
    """
    for number, path in enumerate(outputs, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    for name in gone:
        os.environ.pop(name, None)
    os.environ.update(environment)
    sys.argv = command
    sys.path[:0] = [str(Path(command[0]).parent), *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    freeze_imports()
    try:
        runpy.run_path(command[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
