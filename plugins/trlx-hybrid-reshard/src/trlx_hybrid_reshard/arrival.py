"""Waiting for a CUDA device without waiting for ever, and leaving a group whose peers do not come."""

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


def arrived(event: torch.cuda.Event, seconds: float, progress: Callable[[], int] = lambda: 0) -> bool:
    """Wait for an event, as long as `progress` changes at least every so many seconds; False where it stood still."""
    seen, ends = progress(), time.monotonic() + seconds
    while not event.query():  # type: ignore[no-untyped-call]
        if (now := progress()) != seen:
            seen, ends = now, time.monotonic() + seconds
        if time.monotonic() > ends:
            return False
        time.sleep(POLL)
    return True


def abort(group: Any) -> None:
    """End a group's kernels, which wait for a peer on the device.

    In a thread of its own: this may wait for them, while the caller has to say what is missing. Destroy recordings of
    the group's operations first: NCCL waits until there are none (as vLLM's pynccl.py says, too).
    """

    def run() -> None:
        with contextlib.suppress(Exception):
            dist.distributed_c10d._abort_process_group(group)  # type: ignore[attr-defined]

    threading.Thread(target=run, name="reshard-abort", daemon=True).start()
