"""Lines on stderr that name work which takes long, so that a run is not silent while it starts. Imports no torch."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

SECONDS = 1.5
"""The time after which work is named."""


@contextmanager
def named_when_long(work: str, while_it_lasts: str = "", rank: int | None = None) -> Iterator[None]:
    """A context for work that may take long. After `SECONDS` a line names it, and at its end another line says how long
    it took. Nothing is printed of shorter work, nor on other ranks than 0.

    Args:
        work: what is done, such as "importing TRL".
        while_it_lasts: what takes the time, and how to make it shorter.
        rank: this process's rank; None for the one that the launcher has set.
    """
    begun, named = time.monotonic(), threading.Event()

    def name() -> None:
        named.set()
        _say(f"{work} …" + (f" {while_it_lasts}" if while_it_lasts else ""))

    timer = threading.Timer(SECONDS, name)
    timer.daemon = True
    if (int(os.environ.get("RANK", "0")) if rank is None else rank) == 0:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
        if named.is_set():
            _say(f"{work} took {time.monotonic() - begun:.0f} s")


def _say(line: str) -> None:
    print(f"trlx_hybrid: {line}", file=sys.stderr, flush=True)
