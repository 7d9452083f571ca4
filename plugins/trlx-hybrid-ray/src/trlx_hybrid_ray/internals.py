"""Uses of Ray 2.60's undocumented interface, kept in this one file. `tests/test_cluster.py` fails when Ray changes
them."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

LOOPBACK_VARIABLE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Ray's variable that says whether a started cluster is reachable from other machines ("1") or from this machine only
("0"). It is named after the systems where "0" is the default, but Ray reads it on every system. To start a cluster with
the address 127.0.0.1 is not enough: Ray resolves it to the machine's outward address, and listens on all interfaces."""


PAUSE = 0.5  # seconds


def reread_environment() -> None:
    """Make Ray, where it is imported already, read authentication mode, token and `LOOPBACK_VARIABLE` from the
    environment again. Call it after these variables have changed."""
    if "ray" in sys.modules:
        from ray import _raylet
        from ray._private import ray_constants

        ray_constants.ENABLE_RAY_CLUSTER = os.environ.get(LOOPBACK_VARIABLE, "1") == "1"
        raylet: Any = _raylet  # its stubs leave both out
        raylet.Config.initialize("")
        raylet.AuthenticationTokenLoader.instance().reset_cache()


def authenticated() -> bool:
    """Return whether this process uses token authentication: it sends a token to Ray, and clusters that it starts
    require one."""
    from ray import _raylet

    raylet: Any = _raylet  # its stubs leave authentication out
    return bool(raylet.get_authentication_mode() == raylet.AuthenticationMode.TOKEN)


def discovered() -> str | None:
    """Return host:port of the Ray cluster that Ray finds on this machine; None where it finds none."""
    from ray._private.services import canonicalize_bootstrap_address

    try:
        return canonicalize_bootstrap_address("auto")
    except ConnectionError:
        return None


def free_resources() -> Mapping[str, Mapping[str, float]]:
    """Return the free resources of each node, as amounts by name (such as "GPU"), by the node's id. Resources that are
    used up are left out."""
    from ray._private.state import available_resources_per_node

    found: Callable[[], Mapping[str, Mapping[str, float]]] = available_resources_per_node
    return found()


class _Paused:
    """A subscriber of Ray's that waits after each answer without a message.

    Args:
        subscriber: Ray's own.
        stopped: set when Ray shuts down; ends the wait.
    """

    def __init__(self, subscriber: Any, stopped: threading.Event) -> None:
        self._subscriber, self._stopped = subscriber, stopped

    def poll(self) -> tuple[Any, Any]:
        """Return the next message and its key, or two times None."""
        found: tuple[Any, Any] = self._subscriber.poll()
        if found[1] is None:
            self._stopped.wait(PAUSE)
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._subscriber, name)


def pause_error_listener() -> None:
    """Let the thread that prints the cluster's errors in this driver pause between its questions. Where the head is
    gone, it asks again and again at once, which takes a whole core until Ray is shut down."""
    from ray._private.worker import global_worker

    worker: Any = global_worker
    worker.gcs_error_subscriber = _Paused(worker.gcs_error_subscriber, worker.threads_stopped)


def stop_where_raised() -> None:
    """Open Ray's debugger at the place where the current exception was raised. Call it in an `except` block; it returns
    when the user continues."""
    from ray.util import rpdb

    stop: Callable[[], None] = rpdb._post_mortem
    stop()


def node_address() -> str:
    """Return the IP address by which the cluster knows this process's node."""
    import ray

    found: Callable[[], str] = ray.util.get_node_ip_address
    return found()
