"""What is used of Ray 2.60 beyond its documented interface. `tests/test_cluster.py` says when Ray changed it."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any, cast

LOOPBACK_VARIABLE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Ray's switch between nodes that other machines reach and nodes that only this one does. Named after the systems
where the latter is its default, read on every system. An address of 127.0.0.1 is not enough: Ray resolves it to the
machine's outward one, and listens everywhere."""


def reread_environment() -> None:
    """Make an imported Ray forget authentication mode, token and reach, and read them from the environment again."""
    if "ray" in sys.modules:
        from ray import _raylet
        from ray._private import ray_constants

        ray_constants.ENABLE_RAY_CLUSTER = os.environ.get(LOOPBACK_VARIABLE, "1") == "1"
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


def stop_where_raised() -> None:
    """In an `except`: Ray's debugger, where the exception was raised. It returns when somebody has continued."""
    from ray.util import rpdb

    rpdb._post_mortem()  # type: ignore[no-untyped-call]
