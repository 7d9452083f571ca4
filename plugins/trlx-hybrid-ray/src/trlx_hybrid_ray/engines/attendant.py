"""A small process beside each engine's actor: when the actor is gone, so is everything that it left.

An actor that is killed cleans nothing up: vLLM's engine core does not notice that its parent died and keeps its GPU,
and shared-memory segments keep their names. The attendant is a child of neither the actor nor the raylet, and outlives
both. Standard library only.
"""

from __future__ import annotations

import os
import secrets
import select
import signal
import subprocess
import sys

from ..launch import leftovers

TICK = 0.1  # seconds between looks at shared memory
GRACE = 1.0  # seconds that what a dead actor started has to end by itself
START_SECONDS = 60.0


def attend() -> None:
    """Start one for this process. What this process starts from now on has its mark in the environment.

    Raises:
        OSError, subprocess.SubprocessError: it does not start.
    """
    seat = f"engine-{secrets.token_hex(8)}"
    environment = {name: value for name, value in os.environ.items() if name != leftovers.SEAT_VARIABLE}
    os.environ[leftovers.SEAT_VARIABLE] = seat
    subprocess.run(
        [sys.executable, "-m", "trlx_hybrid_ray.engines.attendant", str(os.getpid()), seat],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        env=environment,
        check=True,
        timeout=START_SECONDS,
    )


def main(pid: int, seat: str) -> None:
    """Watch a process; return when nothing of it is left."""
    actor = os.pidfd_open(pid)
    if os.fork():
        os._exit(0)
    os.setsid()
    for stop in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(stop, signal.SIG_IGN)
    silence = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(silence, stream)
    segments = leftovers.Segments()
    while not select.select([actor], [], [], TICK)[0]:
        segments.look(pid, seat)
    leftovers.end(pid, seat, GRACE)
    segments.remove()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
