"""The Ray actor that a rank lives in: it runs the script in its own process, as `__main__`."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

from ..cluster import announce
from .blame import is_consequence
from .errors import RankStartError
from .leftovers import SEAT_VARIABLE
from .script import run_as_main
from .warden import WardenOrder

LONGEST = 64_000  # characters of a traceback that travel; the whole of it is in the output


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What a rank has to do.

    Attributes:
        rank: which one it is.
        environment: variables to set before anything else; a value of None unsets one.
        folder: working folder, or None to stay in the one that Ray made for the job.
        script: path as typed, relative to it.
        arguments: of the script.
        host, port, secret: where the launcher listens, and how to prove that we are its.
    """

    rank: int
    environment: Mapping[str, str | None]
    folder: str | None
    script: str
    arguments: tuple[str, ...]
    host: str
    port: int
    secret: str


class Rank:
    """One process of the run. Methods run in the main thread of a Ray worker, where signal handlers can be set."""

    def pid(self) -> int:
        """This process, once it is there."""
        return os.getpid()

    def run(self, order: Order) -> NoReturn:
        """Run the script, then end this process as Python would: threads are waited for, exit handlers run.

        How it went is told through the warden, for the process may not live to return it.

        Raises:
            RankStartError: the script is not here, or the launcher cannot be reached from here.
        """
        import ray

        for name, value in order.environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        announce()
        _enter(order)
        report = _with_warden(order)

        def failed(error: BaseException) -> None:
            if os.environ.get("RAY_DEBUG_POST_MORTEM") == "1":
                ray.util.rpdb._post_mortem()  # type: ignore[no-untyped-call]
            _tell(
                report, "failed", error=_one_line(error), traceback=_traceback(error), lost_peer=is_consequence(error)
            )

        code = run_as_main(order.script, order.arguments, failed)
        _tell(report, "finished", code=code)
        ray.actor.exit_actor()  # type: ignore[no-untyped-call]
        raise AssertionError  # not reached: the line above raised


def _enter(order: Order) -> None:
    here = f"Rank {order.rank} on node {os.uname().nodename}"
    if order.folder is not None:
        try:
            os.chdir(order.folder)
        except OSError as error:
            raise RankStartError(
                f"{here} has no folder {order.folder} ({error.strerror}). Start from a folder that all nodes share, or "
                "let Ray send it: ray job submit --working-dir . -- trlx-hybrid launch …"
            ) from error
    if not os.path.isfile(order.script):
        raise RankStartError(
            f"{here} finds no script {order.script} in {os.getcwd()}. Put it on a file system that all nodes share, or "
            "let Ray send it: ray job submit --working-dir . -- trlx-hybrid launch …"
        )


def _with_warden(order: Order) -> int:
    """Hand standard output and error to a warden; returns a descriptor for notes to it."""
    ends = [os.pipe() for _ in range(3)]
    (out, _), (err, _), (control, _) = ends
    warden = WardenOrder(
        host=order.host,
        port=order.port,
        secret=order.secret,
        seat=os.environ[SEAT_VARIABLE],
        pid=os.getpid(),
        raylet=os.getppid(),
        out=out,
        err=err,
        control=control,
    )
    if os.getpid() != os.getpgrp():
        os.setsid()  # forked children stay in it, by which the warden knows them when we are gone
    # Whatever bears the seat's variable is ended with us. The warden must not be.
    environment = {name: value for name, value in os.environ.items() if name != SEAT_VARIABLE}
    started = subprocess.run(
        [sys.executable, "-m", "trlx_hybrid_ray.launch.warden"],
        input=warden.as_line(),
        stdout=subprocess.PIPE,
        pass_fds=(out, err, control),
        env=environment,
        check=False,
        timeout=60,
    )
    answer = started.stdout.decode().strip()
    if answer != "ready":
        raise RankStartError(
            f"Rank {order.rank} on node {os.uname().nodename} cannot reach the launcher: "
            f"{answer or f'its warden ended with code {started.returncode}'}. Ranks connect to the machine that "
            "trlx-hybrid launch runs on: run it on a node of the cluster, and let no firewall stand in between."
        )
    for (read, write), descriptor in zip(ends[:2], (1, 2), strict=True):
        os.close(read)
        os.dup2(write, descriptor)
        os.close(write)
    sys.stdout, sys.stderr = _stream(1), _stream(2)
    os.close(control)
    return ends[2][1]


def _stream(descriptor: int) -> io.TextIOWrapper:
    """Every line leaves at once, as under `python -u`."""
    raw = open(descriptor, "wb", buffering=0, closefd=False)  # noqa: SIM115
    return io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", write_through=True)


def _tell(control: int, event: str, **fields: object) -> None:
    line = json.dumps({"event": event, "time": time.time(), **fields}).encode() + b"\n"
    while line:
        line = line[os.write(control, line) :]


def _one_line(error: BaseException) -> str:
    return "".join(traceback.format_exception_only(error)).strip()[:LONGEST]


def _traceback(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))[-LONGEST:]
