"""Calls in the trainer's thread, and how to tell that one belongs there."""

from __future__ import annotations

import contextlib
import time
import traceback
from collections.abc import Callable
from typing import Any

from .outcome import Outcome

BOUND_TO_A_THREAD = (  # what libraries raise in a thread that is not theirs
    ("signal", "only works in main thread"),  # signal.signal, and so every timeout by signal.alarm
    ("asyncio", "only works in main thread"),  # loop.add_signal_handler
    ("asyncio", "no current event loop in thread"),  # asyncio.get_event_loop
    ("sqlite3", "can only be used in that same thread"),
    ("greenlet", "cannot switch to a different thread"),  # under Playwright's synchronous interface
    ("tkinter", "main thread is not in main loop"),
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
    """What a library says that raised this, or what led to it, for being in the wrong thread.

    It must have come through files only, or through where the tool was typed in: other code without a file is what the
    tool executes, as code that the model wrote, and the error is that code's.
    """
    seen: set[int] = set()
    own = next((file for module, file in _frames(error) if module != __package__), "")
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        frames = _frames(error)
        library = type(error).__module__  # of what is raised in C, without a frame
        if library == "builtins" and frames:
            library = frames[-1][0]
        executed = any(file.startswith("<") and not file.startswith("<frozen ") for _, file in frames if file != own)
        with contextlib.suppress(Exception):  # its text is anybody's code
            text = str(error)
            if not executed and any(library == by and words in text for by, words in BOUND_TO_A_THREAD):
                return f"{type(error).__name__}: {text.rstrip('.')}."
        error = error.__cause__ or error.__context__
    return None


def _frames(error: BaseException | None) -> list[tuple[str, str]]:
    """Package and file of each frame that it came through; the one that raised it is the last."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__ if error is not None else None)]
    return [(str(frame.f_globals.get("__name__")).partition(".")[0], frame.f_code.co_filename) for frame in frames]
