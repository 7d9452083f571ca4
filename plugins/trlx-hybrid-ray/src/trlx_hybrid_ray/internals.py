"""What is used of Ray 2.60 beyond its documented interface. `tests/test_cluster.py` says when Ray changed it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

LOOPBACK_VARIABLE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Ray's switch between nodes that other machines reach and nodes that only this one does. Named after the systems
where the latter is its default, read on every system."""


@contextmanager
def reachable(everywhere: bool) -> Iterator[None]:
    """Within the context, clusters that this process starts listen on every interface, or on loopback only.

    An address of 127.0.0.1 is not enough: Ray resolves it to the machine's outward one, and listens everywhere.
    """
    before = os.environ.get(LOOPBACK_VARIABLE)
    os.environ[LOOPBACK_VARIABLE] = "1" if everywhere else "0"
    _reread_reach()
    try:
        yield
    finally:
        if before is None:
            del os.environ[LOOPBACK_VARIABLE]
        else:
            os.environ[LOOPBACK_VARIABLE] = before
        _reread_reach()


def _reread_reach() -> None:
    if "ray" in sys.modules:  # it read the variable when it was imported
        from ray._private import ray_constants

        ray_constants.ENABLE_RAY_CLUSTER = os.environ.get(LOOPBACK_VARIABLE, "1") == "1"


@contextmanager
def apart() -> Iterator[None]:
    """Within the context, the processes of a cluster that this process starts get a session of their own.

    Ray leaves them in the driver's process group and only blocks SIGINT. What ends a whole group with SIGTERM, as
    `timeout` and batch systems do, would take the cluster away while the driver needs it to end what it started.
    """
    from ray._private import services

    before: Any = services.ConsolePopen

    def started(*arguments: Any, **options: Any) -> Any:
        return before(*arguments, start_new_session=True, **options)

    services.ConsolePopen = started  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        services.ConsolePopen = before  # type: ignore[misc]


def head_ended() -> bool:
    """Whether this process had started a cluster whose head has ended by itself. To ask it for anything is to wait for
    60 s, and to be ended by Ray's client then."""
    worker = sys.modules.get("ray._private.worker")
    node: Any = getattr(worker, "_global_node", None)
    return node is not None and any(kind == "gcs_server" for kind, _ in node.dead_processes())


def head_address() -> str:
    """host:port of the cluster that this process is connected to, known without asking; empty without one."""
    worker: Any = sys.modules.get("ray._private.worker")
    client = getattr(worker.global_worker, "gcs_client", None) if worker is not None else None
    return str(client.address) if client is not None else ""


def reread_authentication() -> None:
    """Make an imported Ray forget mode and token, and read them from the environment again."""
    if "ray" in sys.modules:
        from ray import _raylet

        raylet: Any = _raylet  # its stubs leave both out
        raylet.Config.initialize("")
        raylet.AuthenticationTokenLoader.instance().reset_cache()


def authenticated() -> bool:
    """Whether this process shows a token, and the clusters that it starts demand one."""
    from ray import _raylet

    raylet: Any = _raylet  # its stubs leave authentication out
    return bool(raylet.get_authentication_mode() == raylet.AuthenticationMode.TOKEN)


def discovered() -> str | None:
    """host:port of a cluster on this machine, however Ray finds it, or None."""
    from ray._private.services import canonicalize_bootstrap_address

    try:
        return canonicalize_bootstrap_address("auto")
    except ConnectionError:
        return None


def free_resources() -> Mapping[str, Mapping[str, float]]:
    """By node id and resource. What is used up is left out."""
    from ray._private.state import available_resources_per_node

    return cast("Mapping[str, Mapping[str, float]]", available_resources_per_node())  # type: ignore[no-untyped-call]
