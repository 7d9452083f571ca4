"""Waiting for a CUDA device without waiting for ever."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

POLL = 2e-5
"""Seconds between two looks."""


def arrived(event: torch.cuda.Event, group: Any, seconds: float, progress: Callable[[], int] = lambda: 0) -> bool:
    """Wait for an event, as long as `progress` changes at least every so many seconds.

    Returns:
        False where it stood still. The group is aborted then, in a thread of its own: its kernels wait for a peer, and
        the abort may wait for them, while the caller has to say what is missing.
    """
    seen, ends = progress(), time.monotonic() + seconds
    while not event.query():  # type: ignore[no-untyped-call]
        if (now := progress()) != seen:
            seen, ends = now, time.monotonic() + seconds
        if time.monotonic() > ends:
            threading.Thread(target=_abort, args=(group,), name="reshard-abort", daemon=True).start()
            return False
        time.sleep(POLL)
    return True


def _abort(group: Any) -> None:
    with contextlib.suppress(Exception):
        dist.distributed_c10d._abort_process_group(group)  # type: ignore[attr-defined]
