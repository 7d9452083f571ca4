"""How processes of one run find each other: an address, a namespace and a token, handed down explicitly.

Ray's own search for a cluster looks through the process table and takes whichever it meets, and an actor's namespace is
anonymous unless it is said. A child process that is told neither looks into an empty namespace of somebody else's
cluster, and finds 0 actors (verl #1365). So both travel in the environment.
"""

from __future__ import annotations

import logging
import os
import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from trlx_hybrid.errors import listed

from .errors import ClusterError
from .internals import LOOPBACK_VARIABLE
from .token import MODE, PATH, TOKEN

if TYPE_CHECKING:
    from ray.actor import ActorHandle

ADDRESS, NAMESPACE = "RAY_ADDRESS", "TRLX_HYBRID_RAY_NAMESPACE"
POLL = 0.1
"""Seconds between two looks at what others bring about."""


def environment() -> dict[str, str]:
    """What a child of this process needs to join the same run, whether this is the driver, an actor or a task.

    The token is named by its path; it stands in the environment itself only where the user put it there.
    """
    import ray

    context = ray.get_runtime_context()
    inherited = (MODE, PATH, TOKEN, LOOPBACK_VARIABLE)
    return {ADDRESS: context.gcs_address, NAMESPACE: context.namespace} | {
        name: os.environ[name] for name in inherited if name in os.environ
    }


def announce() -> None:
    """Put `environment()` into this process's own, for children that others start. For actors, at their start."""
    os.environ.update(environment())


def rejoin() -> None:
    """Connect a child of a process that announced itself to the run; does nothing where it is connected.

    Raises:
        ClusterError: the parent announced nothing.
    """
    import ray

    if ray.is_initialized():
        return
    missing = [name for name in (ADDRESS, NAMESPACE) if not os.environ.get(name)]
    if missing:
        raise ClusterError(
            f"This process was told no {' and no '.join(missing)}, so it cannot know which run it belongs to. Call "
            "trlx_hybrid_ray.peers.announce() in the actor that starts it, or pass it peers.environment()."
        )
    ray.init(
        address=os.environ[ADDRESS], namespace=os.environ[NAMESPACE], log_to_driver=False, logging_level=logging.WARNING
    )


def find(name: str, *, namespace: str | None = None, deadline: float | None = 0.0) -> ActorHandle[Any]:
    """The actor of that name; by default in this run's namespace.

    Args:
        deadline: seconds to wait for it to appear; None waits for ever.

    Raises:
        ClusterError: there is none. Says which named actors there are, and in which namespaces.
    """
    import ray

    started = time.monotonic()
    while True:
        try:
            return ray.get_actor(name, namespace=namespace)
        except ValueError:
            if deadline is not None and time.monotonic() - started >= deadline:
                raise ClusterError(_not_found(name, namespace)) from None
        time.sleep(POLL)


def _not_found(name: str, namespace: str | None) -> str:
    import ray

    context = ray.get_runtime_context()
    asked = namespace if namespace is not None else context.namespace
    there: defaultdict[str, list[str]] = defaultdict(list)
    for actor in ray.util.list_named_actors(all_namespaces=True):
        there[actor["namespace"]].append(actor["name"])
    here = there.pop(asked, [])
    lines = [f"No actor {name!r} in namespace {asked!r} of the cluster at {context.gcs_address}."]
    lines.append(f"In it: {listed(sorted(here), 20)}." if here else "It has no named actors.")
    lines += [f"In namespace {other!r}: {listed(sorted(names), 20)}." for other, names in sorted(there.items())]
    if any(name in names for names in there.values()):
        lines.append("Ask with that namespace, or start both with the same one.")
    else:
        lines.append("An actor ends when the last handle to it is dropped: keep one, or give it lifetime='detached'.")
    return " ".join(lines)
