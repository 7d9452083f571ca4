"""Daemons that environments and rewards start in their actors: gone when the actor is, however it ended."""

import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from trlx_hybrid_ray.reaper import state
from trlx_hybrid_ray.remote import EnvironmentLostError, remote_environment, remote_reward

DAEMON = """
import os, time
if os.fork(): os._exit(0)
os.setsid()
if os.fork(): os._exit(0)
print(os.getpid(), flush=True)
os.close(1)
time.sleep(600)
"""
"""As `daemon(3)` makes one. Without an environment, it has nothing of what started it but resource limits."""
ENDS = ("SIGKILL", "os._exit", "deadline", "the run's end")


@pytest.fixture(scope="module", autouse=True)
def nodes(session_cluster):
    """Actors do not find test modules, so they get classes by value."""
    from ray import cloudpickle

    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield session_cluster
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


def started():
    """Process ids of daemons: one that keeps its parent's environment, and one that does not."""
    return [
        int(subprocess.run([sys.executable, "-c", DAEMON], stdout=subprocess.PIPE, check=True, **given).stdout)
        for given in ({}, {"env": {}, "start_new_session": True})
    ]


class Unruly:
    """An environment whose tools start daemons, and end its process or never return."""

    def daemons(self) -> list[int]:
        """Start daemons."""
        return started()

    def end(self, how: str) -> None:
        """
        End the process, or never return.

        Args:
            how: The way.
        """
        if how == "SIGKILL":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "os._exit":
            os._exit(0)
        threading.Event().wait()


@pytest.fixture(scope="module")
def environments(nodes):
    """One in each of four workers."""
    with remote_environment(Unruly, workers=len(ENDS), per_worker=1) as factory:
        yield factory, {how: factory() for how in ENDS}


def left(pids, seconds=30):
    """Those that do not end. The time is for the host: the reaper waits two seconds at most."""
    deadline = time.monotonic() + seconds
    while any(map(state, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    found = [pid for pid in pids if state(pid)]
    for pid in found:
        os.kill(pid, signal.SIGKILL)
    return found


@pytest.mark.parametrize("how", ENDS)
def test_no_daemon_of_an_environment_outlives_its_actor(environments, how):
    factory, made = environments
    environment = made[how]
    pids = environment.daemons()
    assert all(map(state, pids))
    if how == "the run's end":
        factory.close()
    else:
        if how == "deadline":  # so short that only this call misses it
            environment._handle = dataclasses.replace(environment._handle, deadline=0.1)
        with pytest.raises(EnvironmentLostError):
            environment.end(how)
    assert left(pids) == []


def test_no_daemon_of_a_reward_outlives_its_actor(nodes):
    with remote_reward(lambda prompts, **_: list(map(float, started())), name="daemons") as reward:
        pids = list(map(int, reward(prompts=["a", "b"])))
        assert all(map(state, pids))
    assert left(pids) == []
