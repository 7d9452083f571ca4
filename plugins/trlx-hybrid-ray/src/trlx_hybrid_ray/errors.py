"""Errors that users of the Ray integration can meet. Each message names the cause and the way out."""

from __future__ import annotations

import asyncio
import functools

from trlx_hybrid.errors import TROUBLESHOOTING, HybridError


class ClusterError(HybridError):
    """An error of a cluster that does not start, cannot be joined, or does not answer."""


class PlacementError(HybridError):
    """The error raised where requested resources are not available. The message ends with a table of the cluster's
    nodes: free resources, and who holds the rest."""


class LaunchError(HybridError):
    """The error raised where `trlx-hybrid launch` could not start the ranks. The message names the nodes, the reason
    and the way out."""


class ScriptError(LaunchError):
    """The error raised where a node lacks the script or its folder. Unlike after other launch errors, the launch is not
    tried again."""


class DispatchError(HybridError, ValueError):
    """The error for a batch that cannot be split into a part for each worker of a worker group, or for workers' results
    that cannot be joined. The message names the place in the nested data, such as `the batch['prompts']`."""


class WorkerError(HybridError):
    """The error for an exception that a worker (an actor of a worker group or of a pool) raised. `__cause__` is the
    worker's exception if it could be pickled.

    Attributes:
        rank: the worker's rank.
        method: the called method's name.
        node: the node on which the worker runs, as text.
        traceback: the traceback in the worker's process, as text.
    """

    def __init__(self, message: str, *, rank: int, method: str, node: str, traceback: str = "") -> None:
        super().__init__(message)
        self.rank, self.method, self.node, self.traceback = rank, method, node, traceback

    def __reduce__(self) -> tuple[object, ...]:  # a worker may itself call a group, and fail with it
        given = {name: getattr(self, name) for name in ("rank", "method", "node")}
        return functools.partial(type(self), str(self), **given), (), vars(self)


class WorkerDiedError(WorkerError):
    """The error for a worker (an actor of a worker group or of a pool) whose process or node is gone. A worker group
    cannot be called any more after it."""


class DeadlineError(WorkerError, TimeoutError):
    """The error for a worker that did not answer in time. A worker of a worker group may still be at work, so
    `Future.result` can be called again."""


class EnvironmentLostError(asyncio.CancelledError):
    """The error for an environment that will not answer any more, because its worker (the actor that holds it) died or
    a call of it never returned. The message names the environment's class, the method and the reason.

    It is no subclass of `Exception`: a tool loop would show an `Exception` to the model as the tool's error, and
    continue with an environment that is gone. This package's rollout `multi_turn` ends the trajectory, masks it in the
    loss and counts it in a metric. TRL's own loop cannot leave a trajectory out, so there the error ends the run. The
    base class is `CancelledError`, because an event loop survives a cancellation, but no other exception outside of
    `Exception`.
    """


def brief(error: BaseException) -> str:
    """Return a Ray error in one line, for messages. Where an exception in a remote process caused it, the line shows
    that exception, without its traceback."""
    cause = getattr(error, "cause", None) or error
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith(f"See {TROUBLESHOOTING}")] or ["no message"]
    # A traceback ends with the exception and its notes; other messages begin with what happened.
    line = lines[-1] if "Traceback" in str(cause) else lines[0]
    return f"{type(cause).__name__}: {line}"
