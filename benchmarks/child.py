"""A child process of a benchmark: it is given JSON as its only argument, and answers with JSON on a line of stdout."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

ANSWER, PROGRESS = "answer of this child: ", "progress of this child: "
"""Prefixes of the lines in which a child answers, and in which it says what it has reached."""

LAST_LINES = 12
"""The number of different last lines that are kept of a child that failed."""


class ChildError(RuntimeError):
    """A child that gave no answer.

    Attributes:
        ended: how it ended.
        timed_out: whether it took too long.
        after: the progress that it told last.
        last_lines: the last lines that it printed.
    """

    def __init__(self, ended: str, timed_out: bool, after: str, last_lines: list[str]) -> None:
        super().__init__(f"{ended} after {after}; {' | '.join(last_lines)}")
        self.ended, self.timed_out, self.after, self.last_lines = ended, timed_out, after, last_lines


def ask(
    module: str, given: Mapping[str, Any], seconds: float, reached: Callable[[str], None] = lambda stage: None
) -> dict[str, Any]:
    """Run a module in a process of its own, and return its answer.

    Args:
        module: its name.
        given: its argument.
        seconds: after so many seconds the child, and what it has started, are killed.
        reached: called with each progress that the child tells.

    Raises:
        ChildError: the child gave no answer.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", module, json.dumps(given)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # so that none of its helpers outlives it and keeps the pipe open
    )
    expired = threading.Event()

    def end_all() -> None:
        with suppress(ProcessLookupError):  # no process of its session is left
            os.killpg(process.pid, signal.SIGKILL)

    def expire() -> None:
        expired.set()
        end_all()

    timer = threading.Timer(seconds, expire)
    timer.start()
    stage, tail = "nothing yet", deque[str](maxlen=LAST_LINES)
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if line.startswith(ANSWER):
                return dict(json.loads(line.removeprefix(ANSWER)))
            if line.startswith(PROGRESS):
                stage = line.removeprefix(PROGRESS).strip()
                reached(stage)
            elif line.strip() and line.strip()[-300:] not in tail:
                tail.append(line.strip()[-300:])
        code = process.wait()
    finally:
        timer.cancel()
        end_all()
        process.wait()
        process.stdout.close()
    timed_out = expired.is_set()
    raise ChildError(f"no answer within {seconds:g} s" if timed_out else f"exit code {code}", timed_out, stage, [*tail])


def answer(found: Mapping[str, Any]) -> None:
    """Print the child's answer."""
    print(f"\n{ANSWER}{json.dumps(found)}", flush=True)


def progress(stage: str) -> None:
    """Print what the child has reached."""
    print(f"\n{PROGRESS}{stage}", file=sys.stderr, flush=True)
