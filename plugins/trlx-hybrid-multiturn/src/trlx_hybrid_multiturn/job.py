"""One tool call on its way through a pool of workers."""

from __future__ import annotations

import contextvars
import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from trlx_hybrid.errors import HybridError

from .outcome import Outcome

logger = logging.getLogger(__name__)


class WorkerError(HybridError):
    """Tools cannot be run: too many of them hang, the pool is closed, or a function cannot leave its process."""


class Job:
    """A function to call, and whom to tell. Made by `Workers.submit`.

    Args:
        function: a synchronous callable.
        arguments: its keyword arguments.
        done: takes the outcome, once, in whatever thread knows it first.
        deadline: seconds the call may take from its start; `math.inf` for no limit.
        name: what messages call the tool.

    Attributes:
        context: copy of the submitter's context variables, as `asyncio.to_thread` makes it.
        taken: `time.monotonic()` when a worker took the job; None while it waits.
    """

    __slots__ = ("_done", "_lock", "_settled", "arguments", "context", "deadline", "function", "name", "taken")

    def __init__(
        self,
        function: Callable[..., Any],
        arguments: Mapping[str, Any],
        done: Callable[[Outcome], None],
        deadline: float,
        name: str,
    ) -> None:
        self.function = function
        self.arguments = arguments
        self.deadline = deadline
        self.name = name
        self.context = contextvars.copy_context()
        self.taken: float | None = None
        self._done = done
        self._settled = False
        self._lock = threading.Lock()

    @property
    def settled(self) -> bool:
        """Whether its outcome is known and told."""
        return self._settled

    @property
    def expires(self) -> float:
        """`time.monotonic()` at which its deadline passes. Only for a job that was taken."""
        assert self.taken is not None
        return self.taken + self.deadline

    def seconds(self, now: float | None = None) -> float:
        """Wall time since a worker took it; 0 while it waits."""
        return 0.0 if self.taken is None else (time.monotonic() if now is None else now) - self.taken

    def settle(self, outcome: Outcome) -> None:
        """Tell the outcome. The first one counts, later ones are dropped."""
        with self._lock:
            if self._settled:
                return
            self._settled = True
        try:
            self._done(outcome)
        except Exception:  # this is a worker's thread: there is no caller to raise to, and the worker must live on
            logger.exception("The receiver of the outcome of tool %r failed.", self.name)

    def lose(self, reason: str, *, by_tool: bool = False) -> None:
        """Settle as lost. `reason` continues a sentence that begins with the tool."""
        self.settle(Outcome(lost=f"tool {self.name!r} {reason}", by_tool=by_tool, seconds=self.seconds()))
