"""What a user of Ray can meet. Each message names the culprit and the way out."""

from __future__ import annotations

from trlx_hybrid.errors import TROUBLESHOOTING, HybridError


class ClusterError(HybridError):
    """A cluster does not start, cannot be joined, or does not know who is asked for."""


class PlacementError(HybridError):
    """What was asked for cannot be had; the message ends with a table of what was asked, what is free and who holds
    the rest."""


class LaunchError(HybridError):
    """The ranks could not be started. Names the ranks, their nodes and the way out."""


class ScriptError(LaunchError):
    """A node has no such script, or no such folder: to try again cannot help."""


def brief(error: BaseException) -> str:
    """A Ray error in one line: the exception that was raised over there where there is one, not its traceback."""
    cause = getattr(error, "cause", None) or error
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith(f"See {TROUBLESHOOTING}")] or ["no message"]
    # A traceback ends with what was raised, and notes; other messages begin with what happened.
    line = lines[-1] if "Traceback" in str(cause) else lines[0]
    return f"{type(cause).__name__}: {line}"
