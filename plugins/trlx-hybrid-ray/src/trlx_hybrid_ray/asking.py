"""Calls of Ray at a run's end, when the cluster that they go to may be ending as well.

Ray's client waits for 60 s for a head that is gone and then ends its own process, whatever that has left to say. A
batch system that sends SIGTERM to all processes of a job brings that about.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from .internals import head_address, head_ended

LOOK = 0.1  # seconds
_silent: set[str] = set()
"""Addresses of heads that have let a call wait in vain: the next one need not."""


def ask(work: Callable[[], Any], seconds: float = 8.0) -> None:
    """Do it, and wait until it is done, until the head of a cluster of our own has ended, or for so many seconds.

    Raises:
        Exception: what `work` raised.
    """
    head = head_address()
    if head in _silent or head_ended():
        return
    raised: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:  # handed to the thread that waits
            raised.append(error)

    thread = threading.Thread(target=run, name="asks Ray", daemon=True)
    thread.start()
    end = time.monotonic() + seconds
    while thread.is_alive() and not head_ended() and time.monotonic() < end:
        thread.join(LOOK)
    if thread.is_alive():
        _silent.add(head)
    if raised:
        raise raised[0]
