"""Waits with a limit: for a call that may never return, and for a port that may never answer. Imports no torch."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")

REACH_SECONDS = 5.0
BACKLOG = 1024  # connections that may wait: all ranks connect at once
BUSIEST = 8.0


def granted(seconds: float) -> float:
    """Return a time limit in seconds for the start of a process, adapted to this host's current load.

    A start takes longer on a busy host, which is no fault of the process. The limit grows with the last minute's load
    per core: it is `seconds` up to a load of 1, and at most eight times that.

    Args:
        seconds: the limit on an idle host.
    """
    load, _, _ = os.getloadavg()
    return seconds * min(max(load / (os.cpu_count() or 1), 1.0), BUSIEST)


def in_thread(work: Callable[[], T], name: str) -> Future[T]:
    """Start a call in its own daemon thread, and return a future of its result. Unlike the threads of
    `concurrent.futures`, this thread never keeps the process from ending.

    Wait for the future with `concurrent.futures.wait`. `Future.result(timeout)` raises a TimeoutError both when the
    time is over and when `work` has raised a TimeoutError, so the caller could not tell which.

    Args:
        work: a function without arguments.
        name: the thread's name, as stack dumps show it.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # raised in the thread that waits
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


def listen(address: str, port: int = 0) -> socket.socket:
    """Return a socket that listens on one address of this machine only. It reserves the port on which the rendezvous of
    a process group will listen later. Port 0 takes any free port.

    Raises:
        OSError: the address is not of this machine, or the port is taken.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family, backlog=BACKLOG)


def unreachable(address: str, port: int, seconds: float = REACH_SECONDS) -> str | None:
    """Try to connect to a port; return why that fails, or None where it succeeds. Call it before torch connects, which
    would try for minutes to reach a port whose packets a firewall drops.

    Args:
        seconds: the time limit.
    """
    try:
        socket.create_connection((address, port), timeout=seconds).close()
    except OSError as error:
        return str(error)
    return None
