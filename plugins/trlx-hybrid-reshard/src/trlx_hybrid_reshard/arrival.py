"""Waiting for a CUDA device without waiting for ever."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

POLL = 2e-5
"""Seconds between two looks."""


def arrived(event: torch.cuda.Event, seconds: float, progress: Callable[[], int]) -> bool:
    """Wait for an event, as long as `progress` changes at least every so many seconds; False where it stood still."""
    seen, ends = progress(), time.monotonic() + seconds
    while not event.query():  # type: ignore[no-untyped-call]
        if (now := progress()) != seen:
            seen, ends = now, time.monotonic() + seconds
        if time.monotonic() > ends:
            return False
        time.sleep(POLL)
    return True
