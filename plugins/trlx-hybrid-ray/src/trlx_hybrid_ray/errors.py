"""Errors that users of the Ray integration can meet. Each message names the cause and the way out."""

from __future__ import annotations

from trlx_hybrid.errors import TROUBLESHOOTING, HybridError


class ClusterError(HybridError):
    """An error of a cluster that does not start, cannot be joined, or does not answer."""


class PlacementError(HybridError):
    """An error of resources that are not available. The message ends with a table of the request, the free resources
    and the holders of the rest."""


class LaunchError(HybridError):
    """An error of ranks that could not be started. Names the ranks, their nodes and the way out."""


class ScriptError(LaunchError):
    """An error of a node without the script or its folder. Another attempt cannot help."""


def brief(error: BaseException) -> str:
    """Return a Ray error in one line. Where a remote exception caused it, that is the exception without its
    traceback."""
    cause = getattr(error, "cause", None) or error
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith(f"See {TROUBLESHOOTING}")] or ["no message"]
    # A traceback ends with the exception and its notes; other messages begin with what happened.
    line = lines[-1] if "Traceback" in str(cause) else lines[0]
    return f"{type(cause).__name__}: {line}"
