"""Errors that users of the Ray integration can meet. Each message names the cause and the way out."""

from __future__ import annotations

from trlx_hybrid.errors import TROUBLESHOOTING, HybridError


class ClusterError(HybridError):
    """An error of a cluster that does not start, cannot be joined, or does not answer."""


class PlacementError(HybridError):
    """The error raised where requested resources are not available. The message ends with a table of the cluster's
    nodes: free resources, and who holds the rest."""


class LaunchError(HybridError):
    """The error raised where `trlx-hybrid launch` could not start the ranks. Names the ranks, their nodes and the way
    out."""


class ScriptError(LaunchError):
    """The error raised where a node lacks the script or its folder. Unlike after other launch errors, the launch is not
    tried again."""


def brief(error: BaseException) -> str:
    """Return a Ray error in one line, for messages. Where an exception in a remote process caused it, the line shows
    that exception, without its traceback."""
    cause = getattr(error, "cause", None) or error
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith(f"See {TROUBLESHOOTING}")] or ["no message"]
    # A traceback ends with the exception and its notes; other messages begin with what happened.
    line = lines[-1] if "Traceback" in str(cause) else lines[0]
    return f"{type(cause).__name__}: {line}"
