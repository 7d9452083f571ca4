"""What a trajectory can wait for. A trajectory is a coroutine; the loop that drives it grants its waits.

There is no asyncio here: its loop would have to run in the trainer's thread, where a notebook already runs one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Coroutine, Generator
from typing import Any

from trlx_hybrid.types import Completion, Request

from .outcome import Outcome

Trajectory = Coroutine["Sampling | Call", Any, None]
"""Runs one episode to its end; what it makes is kept by whoever started it."""


class OutOfTimeError(Exception):
    """Raised in a trajectory whose time is over, wherever it waits."""


class Sampling:
    """One request to the engine; awaiting it gives the Completion."""

    def __init__(self, request: Request) -> None:
        self.request = request

    def __await__(self) -> Generator[Sampling, Completion, Completion]:
        return (yield self)


class Call:
    """One call that runs elsewhere; awaiting it gives its Outcome.

    Args:
        start: begins the call, given whom to tell its outcome, from any thread; returns how to abandon it, which takes
            a reason that continues "tool 'name' ...".
        name: what is called, for messages.

    Attributes:
        expires: `time.monotonic()` at which the loop stops waiting by itself: a last resort for whatever should have
            reported by then and did not.
    """

    def __init__(self, name: str, start: Callable[[Callable[[Outcome], None]], Callable[[str], None]]) -> None:
        self.name = name
        self.start = start
        self.expires = math.inf

    def __await__(self) -> Generator[Call, Outcome, Outcome]:
        return (yield self)
