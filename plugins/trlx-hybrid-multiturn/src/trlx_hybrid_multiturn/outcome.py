"""What became of one tool call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A tool call that is over: it returned (`value`), raised (`error`), or will never answer (`lost`).

    Attributes:
        value: what the tool returned; None where it did not return.
        error: what the tool raised, `SystemExit` and `KeyboardInterrupt` included. The model is shown its text.
        lost: why there is neither: a hang past its deadline, a crash of its process, a result that cannot be brought
            back. A sentence that names tool and cause.
        by_tool: whether the tool's own doing lost it: it took too long, or ended its process. The model, which may have
            written what was run, is shown that; else it ends the trajectory.
        seconds: wall time from the start of the call; 0 for a call that never started.
        cpu_seconds: processor time of the call: of its thread, or of its whole process. 0 where it was lost.
    """

    value: Any = None
    error: BaseException | None = None
    lost: str | None = None
    by_tool: bool = False
    seconds: float = 0.0
    cpu_seconds: float = 0.0
