"""This process's connection to Ray: the one it has, or one that is made when the first remote part needs it."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from contextlib import ExitStack

from trlx_hybrid.errors import ConfigError

from .. import debugging
from ..cluster import ADDRESS, LOCAL, NAMESPACE, connect

HOOK = "PYTHONBREAKPOINT"
_lock = threading.Lock()
_made = ExitStack()


def connected() -> None:
    """Make sure that this process is connected. Says on standard error what it connected to.

    A rank of `trlx-hybrid launch` is connected already. Else `RAY_ADDRESS` names the cluster to join, as it does in a
    job of `ray job submit`. Where it is not set, a cluster is started on this machine, and ends with this process.

    Raises:
        ConfigError: several training processes would each start a cluster.
        ClusterError: no cluster answers, or none can be started.
    """
    import ray

    with _lock:
        debugging.check()
        if ray.is_initialized():
            return
        address = os.environ.get(ADDRESS) or LOCAL
        world = os.environ.get("WORLD_SIZE", "1")
        if address == LOCAL and world != "1":
            raise ConfigError(
                f"This is one of {world} training processes, and each would start a Ray cluster of its own. Start them "
                "with `trlx-hybrid launch`, or start one with `ray start --head` and set RAY_ADDRESS=auto."
            )
        before = os.environ.get(HOOK)
        dashboard = address == LOCAL and debugging.wanted() and not debugging.legacy()
        cluster = _made.enter_context(
            connect(address, namespace=os.environ.get(NAMESPACE), forward_logs=debugging.wanted(), dashboard=dashboard)
        )
        _keep_breakpoint(before)
        # After Ray's own handler was registered, so before it runs.
        atexit.register(_made.close)
    _say(str(cluster))
    if debugging.legacy():
        _say(f"debugger: {debugging.attach_command(cluster.address, cluster.token)}")


def disconnect() -> None:
    """Give up the connection that `connected` made, and with it every remote part; the process's end does it else."""
    with _lock:
        atexit.unregister(_made.close)
        _made.close()


def _keep_breakpoint(before: str | None) -> None:
    """Leave `breakpoint()` in the user's own script to pdb: Ray's, without debugpy, passes it over."""
    if before is None:
        os.environ.pop(HOOK, None)
    else:
        os.environ[HOOK] = before


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
