"""Waits that end: for a call that may never return, and for a port that may never answer. Imports no torch."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")

REACH_SECONDS = 5.0
BACKLOG = 1024  # connections that may wait: all ranks of a run come at once
BUSIEST = 8.0


def granted(seconds: float) -> float:
    """Return the seconds that the start of a process may take on this host as it is now.

    A start takes as long as the host is busy, which is no fault of what is started. The measure is the load of the last
    minute for each core: `seconds` up to a load of 1, eight times as long at most.
    """
    load, _, _ = os.getloadavg()
    return seconds * min(max(load / (os.cpu_count() or 1), 1.0), BUSIEST)


def in_thread(work: Callable[[], T], name: str) -> Future[T]:
    """Start a call in a thread of its own. It never keeps the process, as those of `concurrent.futures` do at exit.

    Wait for it by `concurrent.futures.wait`: by `Future.result`, a TimeoutError of `work` looks like one of the wait.

    Args:
        name: of the thread, for whoever looks at stacks.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # handed to whoever waits
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


def listen(address: str, port: int = 0) -> socket.socket:
    """A socket that listens on this address and no other, as the rendezvous of a process group will; 0: on any port.

    Raises:
        OSError: the address is not of this machine, or the port is taken.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family, backlog=BACKLOG)


def unreachable(address: str, port: int, seconds: float = REACH_SECONDS) -> str | None:
    """Why nobody takes a connection to this port, or None. Torch would try a port that a firewall drops for minutes."""
    try:
        socket.create_connection((address, port), timeout=seconds).close()
    except OSError as error:
        return str(error)
    return None
