"""Ray for the tests of this plugin: a simulated cluster of two nodes, and fresh ones for tests that break theirs.

Everything listens on loopback, has a token of its own, and lives in a temporary folder; nothing is written to the
user's home.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from trlx_hybrid_ray import token
from trlx_hybrid_ray.cluster import ADDRESS as RAY_ADDRESS
from trlx_hybrid_ray.cluster import NAMESPACE as RAY_NAMESPACE
from trlx_hybrid_ray.cluster import NO_IDLE_WORKERS, RAY_GAVE_UP, announce

# Ray gives way to all other processes of a machine, here to tests that wait for it.
os.environ.setdefault("RAY_worker_niceness", "0")

NAMESPACE = "tests"
GPUS = 16
CPUS = 32
LOOKS = {"RAY_health_check_period_ms": "500", "RAY_health_check_initial_delay_ms": "1000"}
"""A head takes a node for dead after five looks in vain: one at which nobody listens is found in 3 s, not in 15. One
that is slow to answer still has 10 s each time."""


@dataclass
class Simulated:
    """A running simulated cluster. This process is connected to it as a driver."""

    address: str
    token: Path
    cluster: Any

    @property
    def nodes(self) -> list[str]:
        """Ids of the nodes that were not removed, the head's first. Ray takes a killed one for alive a while longer."""
        head = self.cluster.head_node.node_id
        return sorted((node.node_id for node in self.cluster.list_all_nodes()), key=lambda n: (n != head, n))

    def add_node(self, **arguments: Any) -> Any:
        return self.cluster.add_node(
            **{"num_cpus": CPUS, "num_gpus": GPUS, "object_store_memory": 80 << 20, "node_ip_address": "127.0.0.1"}
            | {"dashboard_agent_listen_port": 0}  # any: two clusters cannot have the usual one
            | {"include_log_monitor": False, "no_monitor": True}  # of logs, which no driver reads here, and a scaler's
            | arguments
        )


@contextmanager
def simulated(*nodes: dict[str, Any], namespace: str = NAMESPACE) -> Iterator[Simulated]:
    """A cluster of one simulated node per argument: what `Cluster.add_node` takes, for what differs from the default.

    The first is the head. `remove_node` of `Simulated.cluster` kills one. A connection that this process has to another
    cluster is given up meanwhile, with all actors of this process there, and taken up again.
    """
    with without_connection():
        yield from _simulated(nodes, namespace)


@contextmanager
def without_connection() -> Iterator[None]:
    """Without this process's connection to a cluster, if it has one."""
    import ray

    if not ray.is_initialized():
        yield
        return
    context = ray.get_runtime_context()
    address, namespace = context.gcs_address, context.namespace
    ray.shutdown()
    try:
        yield
    finally:
        ray.init(address=address, namespace=namespace, log_to_driver=False, logging_level="error")


def _simulated(nodes: tuple[dict[str, Any], ...], namespace: str) -> Iterator[Simulated]:
    folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # sockets need a short path
    (folder / "ray").mkdir()
    settings = {"RAY_TMPDIR": str(folder)} | NO_IDLE_WORKERS | LOOKS
    before = {name: os.environ.get(name) for name in (*settings, RAY_ADDRESS, RAY_NAMESPACE)}
    os.environ |= settings
    secret = token.make(folder)
    try:
        with token.presented(secret, everywhere=False):
            import ray

            found = _begun(nodes, secret)
            try:
                ray.init(address=found.address, namespace=namespace, log_to_driver=False, logging_level="error")
                announce()
                yield found
            finally:
                ray.shutdown()
                found.cluster.shutdown()
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        shutil.rmtree(folder, ignore_errors=True)


def _begun(nodes: tuple[dict[str, Any], ...], secret: Path) -> Simulated:
    """The nodes of a cluster. A start that Ray gives up after 30 s, as on a busy host, is tried twice more."""
    from ray.cluster_utils import Cluster

    before = set(psutil.Process().children(recursive=True))
    for attempt in range(3):
        found = Simulated("", secret, Cluster(shutdown_at_exit=True))
        try:
            for number, arguments in enumerate(nodes):
                found.add_node(**({"include_dashboard": False} if not number else {}) | arguments)
        except Exception as error:
            found.cluster.shutdown()
            for process in set(psutil.Process().children(recursive=True)) - before:  # of a node that was not added
                process.kill()
            if RAY_GAVE_UP not in str(error) or attempt == 2:
                raise
        else:
            found.address = found.cluster.address
            return found
    raise AssertionError("unreachable")


@pytest.fixture(scope="session")
def session_cluster() -> Iterator[Simulated]:
    """Two nodes of 16 pretended GPUs each, shared by every test of a test process. Leave it as you found it."""
    with simulated({}, {}) as found:
        yield found


@pytest.fixture
def two_nodes(session_cluster: Simulated) -> Iterator[Simulated]:
    """`session_cluster`, with everything given back afterwards that a test reserved."""
    from ray.util import placement_group_table, remove_placement_group
    from ray.util.placement_group import PlacementGroup

    yield session_cluster
    import ray

    for group_id, group in placement_group_table().items():
        if group["state"] != "REMOVED":
            remove_placement_group(PlacementGroup(ray.PlacementGroupID.from_hex(group_id)))


@pytest.fixture
def fresh_cluster() -> Callable[..., Any]:
    """`simulated`, for tests that kill nodes or ask for other ones."""
    return simulated


@pytest.fixture(scope="session")
def disconnected() -> Callable[..., Any]:
    """`without_connection`, for tests that connect this process themselves."""
    return without_connection
