"""The uses of Ray 2.60 beyond its documented interface. `tests/test_cluster.py` fails when Ray changes them."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any, cast

LOOPBACK_VARIABLE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Ray's variable that chooses between nodes that other machines can reach and nodes that only this machine can reach.
Its name has the systems where the latter is the default, but Ray reads it on every system. An address of 127.0.0.1 is
not enough: Ray resolves it to the machine's outward address, and listens on all interfaces."""


def reread_environment() -> None:
    """Make an imported Ray read authentication mode, token and `LOOPBACK_VARIABLE` from the environment again."""
    if "ray" in sys.modules:
        from ray import _raylet
        from ray._private import ray_constants

        ray_constants.ENABLE_RAY_CLUSTER = os.environ.get(LOOPBACK_VARIABLE, "1") == "1"
        raylet: Any = _raylet  # its stubs leave both out
        raylet.Config.initialize("")
        raylet.AuthenticationTokenLoader.instance().reset_cache()


def authenticated() -> bool:
    """Return whether this process authenticates with a token, and the clusters that it starts require one."""
    from ray import _raylet

    raylet: Any = _raylet  # its stubs leave authentication out
    return bool(raylet.get_authentication_mode() == raylet.AuthenticationMode.TOKEN)


def discovered() -> str | None:
    """Return host:port of the cluster that Ray finds on this machine, or None."""
    from ray._private.services import canonicalize_bootstrap_address

    try:
        return canonicalize_bootstrap_address("auto")
    except ConnectionError:
        return None


def free_resources() -> Mapping[str, Mapping[str, float]]:
    """Return the free resources by node id and name. Resources that are used up are left out."""
    from ray._private.state import available_resources_per_node

    return cast("Mapping[str, Mapping[str, float]]", available_resources_per_node())  # type: ignore[no-untyped-call]


def stop_where_raised() -> None:
    """Open Ray's debugger, from an `except` block, where the exception was raised. Returns when the user continues."""
    from ray.util import rpdb

    rpdb._post_mortem()  # type: ignore[no-untyped-call]
