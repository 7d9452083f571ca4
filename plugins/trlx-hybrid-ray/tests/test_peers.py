"""Processes of one run find each other: children of actors, named actors, and what is said where they do not."""

import subprocess
import sys

import pytest
from trlx_hybrid_ray import peers
from trlx_hybrid_ray.errors import ClusterError
from trlx_hybrid_ray.placing import reserved
from trlx_hybrid_ray.role import Role

CHILD = """
import ray
from trlx_hybrid_ray import peers
peers.rejoin()
print("found", ray.get(peers.find("worker-0").pid.remote()))
"""


@pytest.fixture
def kinds():
    """Actor classes: a worker, and a server that runs code in a process of its own, as vLLM's engine core does."""
    import ray

    @ray.remote
    class Worker:
        def pid(self):
            import os

            return os.getpid()

    @ray.remote
    class Server:
        def run(self, code, environment=None):
            done = subprocess.run(
                [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=environment, check=False
            )
            return done.stdout + done.stderr

        def announced(self):
            peers.announce()
            return peers.environment()

    return Worker, Server


def refusal(name):
    """What is said where an actor is not found, or nothing."""
    try:
        peers.find(name)
    except ClusterError as error:
        return str(error)
    return ""


def test_a_child_process_of_an_actor_finds_the_workers_on_its_gpu(two_nodes, kinds):
    """verl #1365, on a single GPU: the server's subprocess looked for the workers and found 0 actors."""
    import ray

    worker_kind, server_kind = kinds
    roles = [Role(name="worker", gpus=1), Role(name="server", gpus=1, cpus=0, colocate_with="worker")]
    with reserved(roles, show=None) as placed:
        (at,), (beside,) = placed.placement.of("worker"), placed.placement.of("server")
        worker = worker_kind.options(name="worker-0", **placed.options(at)).remote()
        server = server_kind.options(**placed.options(beside)).remote()
        said = ray.get(server.run.remote(CHILD), timeout=120)
        assert said.splitlines()[-1] == f"found {ray.get(worker.pid.remote())}"


def test_an_actor_may_announce_the_run_itself(two_nodes, kinds):
    import ray

    _, server_kind = kinds
    server = server_kind.options(num_cpus=0).remote()
    assert ray.get(server.announced.remote(), timeout=60) == peers.environment()
    code = "from trlx_hybrid_ray import peers; peers.rejoin(); import ray; print(ray.get_runtime_context().namespace)"
    assert ray.get(server.run.remote(code), timeout=120).splitlines()[-1] == "tests"


def test_a_child_that_was_told_nothing_says_so(two_nodes, monkeypatch):
    environment = {"PATH": "/usr/bin", "HOME": "/nonexistent"}
    code = "from trlx_hybrid_ray import peers; peers.rejoin()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert "told no RAY_ADDRESS and no TRLX_HYBRID_RAY_NAMESPACE" in done.stderr
    assert "peers.announce()" in done.stderr


def test_an_actor_that_is_not_found_is_told_apart_from_those_that_are(two_nodes, kinds):
    import ray

    worker_kind, _ = kinds
    here = worker_kind.options(name="reward", num_cpus=0).remote()
    there = worker_kind.options(name="worker-0", namespace="another", num_cpus=0).remote()
    ray.get([here.pid.remote(), there.pid.remote()], timeout=60)
    with pytest.raises(ClusterError) as caught:
        peers.find("worker-0")
    text = str(caught.value)
    assert f"No actor 'worker-0' in namespace 'tests' of the cluster at {two_nodes.address}. In it: reward." in text
    assert "In namespace 'another': worker-0. Ask with that namespace" in text
    assert ray.get(peers.find("worker-0", namespace="another").pid.remote()) == ray.get(there.pid.remote())


def test_an_actor_whose_last_handle_was_dropped_is_explained(two_nodes, kinds):
    """What lay behind verl #1365: the group held no reference to its workers, so they ended before they were asked."""
    import ray

    worker_kind, _ = kinds
    worker = worker_kind.options(name="dropped", num_cpus=0).remote()
    ray.get(worker.pid.remote(), timeout=60)
    del worker
    said = next(filter(None, (refusal("dropped") for _ in range(300))), "found to the end")
    assert "when the last handle to it is dropped" in said


def test_an_actor_that_is_still_starting_is_waited_for(two_nodes, kinds):
    import threading

    worker_kind, _ = kinds
    made = []
    timer = threading.Timer(0.5, lambda: made.append(worker_kind.options(name="late", num_cpus=0).remote()))
    timer.start()
    assert peers.find("late", deadline=60) is not None
    timer.join()
