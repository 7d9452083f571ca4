"""Starts the ranks, and after a failure starts them again."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping

from ..errors import PlacementError
from .attempt import attempt
from .errors import LaunchError
from .job import Job
from .verdict import Verdict
from .watch import Say

PAUSE = 2.0  # seconds between two looks for places


def run(job: Job, shared: Mapping[str, str], folder: str | None, say: Say) -> int:
    """Run a job to its end; returns the exit code.

    Each start has new processes and a new rendezvous. From the second on, ranks find TRLX_HYBRID_RESUME=1 in their
    environment. A run that the user stopped is not started again, nor one whose script cannot be found.

    Raises:
        PlacementError: the places cannot be had at the first start.
        LaunchError: the ranks do not start, or what a failure took is not back in time.
    """
    run_id = secrets.token_hex(8)
    for start in range(job.restarts + 1):
        verdict = _attempt(job, shared, folder, run_id, start, say)
        if text := verdict.text():
            say(text)
        if verdict.exit_code == 0 or verdict.interrupted is not None:
            break
        if start < job.restarts:
            say(f"Starting again ({start + 1} of {job.restarts}), from the last checkpoint.")
        elif job.restarts:
            say(f"That was the last of {job.restarts} restarts.")
    return verdict.exit_code


def _attempt(job: Job, shared: Mapping[str, str], folder: str | None, run_id: str, start: int, say: Say) -> Verdict:
    """One start. After a failure Ray may need a moment to know what is free again, and a lost node to come back."""
    deadline = time.monotonic() + job.start_timeout
    while True:
        try:
            return attempt(job, shared, folder, run_id=run_id, start=start, say=say)
        except PlacementError as error:
            if start == 0:
                raise
            if time.monotonic() > deadline:
                raise LaunchError(f"It cannot be started again within {job.start_timeout:g} s: {error}") from error
        time.sleep(PAUSE)
