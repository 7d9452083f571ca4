"""The actor around a server, without vLLM: how it ends."""

import subprocess
import sys
import time
from types import SimpleNamespace

import psutil
import pytest
from trlx_hybrid_ray.actors import Pickled
from trlx_hybrid_ray.engines.actor import EngineActor
from trlx_hybrid_ray.engines.options import RemoteOptions
from trlx_hybrid_ray.engines.pool import CLOSE_SECONDS, EnginePool

CORE = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up", flush=True)
time.sleep(600)
"""


class HangingServer:
    """As vLLM's on a GPU while the trainer holds the other end of a communicator: the end of its core never comes."""

    async def start(self):
        self.core = subprocess.Popen([sys.executable, "-c", CORE], stdout=subprocess.PIPE)
        self.core.stdout.readline()

    async def call(self, method):
        return self.core.pid

    def close(self):
        self.core.terminate()
        self.core.wait()


class Plan:
    def server(self, gpus):
        return HangingServer()


@pytest.fixture
def actor(session_cluster):
    import ray
    from ray import cloudpickle

    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    actor = ray.remote(num_cpus=0.1)(EngineActor).remote(Pickled.of(Plan(), "A plan", ""))
    ray.get(actor.ready.remote(), timeout=60)
    yield actor
    ray.kill(actor)
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


def test_an_engine_whose_end_hangs_is_gone_when_close_returns(actor):
    import ray

    core = psutil.Process(ray.get(actor.call.remote("pid"), timeout=60))
    began = time.monotonic()
    ray.get(actor.close.remote(), timeout=60)
    assert time.monotonic() - began < CLOSE_SECONDS, "the trainer would not have waited for it"
    assert not core.is_running() or core.status() == psutil.STATUS_ZOMBIE


class IdleServer:
    async def start(self):
        pass

    async def check(self):
        return "alive"

    def close(self):
        pass


class IdlePlan:
    gpus, ranks = 0, 1

    def server(self, gpus):
        return IdleServer()


def test_1100_ranks_that_wait_do_not_hold_up_the_look_for_dead_engines(session_cluster):
    import ray
    from ray import cloudpickle

    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    ranks = SimpleNamespace(rank=0, world=1100, gather=lambda value: [value], by_first=lambda work: work())
    pool = EnginePool(IdlePlan(), RemoteOptions(replicas=1, gpus=0, cpus=0.1), ranks, {})
    try:
        pool.restore()
        (engine,) = (replica.handle for replica in pool.replicas.values())
        waiting = [engine.collect.remote(f"rank {rank}", 30.0) for rank in range(ranks.world)]
        check = engine.call.remote("check")
        assert ray.wait([check, *waiting], num_returns=1)[0] == [check], "a rank's wait had to end first"
    finally:
        pool.close()
        cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
