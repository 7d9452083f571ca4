"""Calls in the trainer's thread, and how to tell that one belongs there."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

from .outcome import Outcome

BOUND_TO_A_THREAD = (  # what libraries raise in a thread that is not theirs
    "only works in main thread",  # signal.signal, and so every timeout by signal.alarm
    "can only be used in that same thread",  # sqlite3
    "no current event loop in thread",  # asyncio.get_event_loop
    "cannot switch to a different thread",  # greenlet, under Playwright's synchronous interface
    "main thread is not in main loop",  # tkinter
)


def call_here(function: Callable[[], Any], done: Callable[[Outcome], None]) -> Callable[[str], None]:
    """A call in this very thread. SystemExit and KeyboardInterrupt are the user's: they go through."""
    started, cpu = time.perf_counter(), time.thread_time()
    value, raised = None, None
    try:
        value = function()
    except Exception as error:
        raised = error
    seconds, used = time.perf_counter() - started, time.thread_time() - cpu
    done(Outcome(value=value, error=raised, seconds=seconds, cpu_seconds=used))
    return lambda reason: None


def bound_to_a_thread(error: BaseException | None) -> str | None:
    """What an exception, or one that led to it, says where it was raised for being in the wrong thread."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        with contextlib.suppress(Exception):  # its text is anybody's code
            text = str(error)
            if any(words in text for words in BOUND_TO_A_THREAD):
                return f"{type(error).__name__}: {text.rstrip('.')}."
        error = error.__cause__ or error.__context__
    return None
