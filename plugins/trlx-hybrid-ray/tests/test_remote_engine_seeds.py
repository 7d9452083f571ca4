"""kill -9 of engines' actors, or of vLLM's core in them, at random moments: every request is answered, and as ever.

`FAULT_SEEDS=50` runs as many seeds, each phase at least five times.
"""

import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
from trlx_hybrid import HybridConfig
from trlx_hybrid.types import Sampling

sys.path.insert(0, str(Path(__file__).parent))
from launching import Segments, nothing_left
from remote_training import Trained, core_of, gone, pids, requests_of, tokens

pytestmark = pytest.mark.slow
SEEDS = int(os.environ.get("FAULT_SEEDS", "4"))
PHASES = ("idle", "sync", "rollout", "both")
SAMPLING = Sampling(max_tokens=40, logprobs=0, extra={"ignore_eos": True})
REQUESTS = 24


class Rig:
    """Two engines of a trainer that has trained, and what they sample while nobody dies."""

    def __init__(self, folder):
        config = HybridConfig(engine="remote", engine_options={"replicas": 2, "restarts": 1000})
        self.session = Trained(folder, config).session
        self.engine = self.session.live_engine
        for _ in range(2):  # the first time is slower
            began = time.monotonic()
            self.session.weights_changed()
            with self.session.rollout_phase(training=False):
                synced = time.monotonic()
                self.expected = self.sample()
                self.seconds = {"sync": synced - began, "rollout": time.monotonic() - synced}

    def sample(self):
        return tokens(self.engine.generate(requests_of(REQUESTS), SAMPLING))

    def whole(self):
        """Whether every engine that lives holds the policy's bits."""
        return self.session.weights.check(full=True) == len(self.session.policy.checkpoint_names())


@pytest.fixture(scope="module")
def rig(session_cluster, tmp_path_factory):
    segments, folder = Segments(), tmp_path_factory.mktemp("engines")
    rig = Rig(folder)
    yield rig
    left = pids(rig.engine)
    rig.session.close()
    gone(left)
    assert nothing_left(str(folder), segments) == []


def kill(victims):
    for pid in victims:
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_nothing_is_lost_whenever_an_engine_dies(rig, capfd, seed, record_property):
    draw, phase = random.Random(seed), PHASES[seed % len(PHASES)]
    groups = pids(rig.engine)
    chosen = groups if phase == "both" else [draw.choice(groups)]
    victims = [core_of(group) if draw.random() < 0.5 else group[0] for group in chosen]
    pause = draw.random() * rig.seconds["sync" if phase == "sync" else "rollout"]
    began = time.monotonic()
    rig.session.weights_changed()
    strike = threading.Timer(pause, kill, [victims])
    if phase == "idle":
        kill(victims)
        time.sleep(pause)
    if phase == "sync":
        strike.start()
    with rig.session.rollout_phase(training=False):
        if phase in ("rollout", "both"):
            strike.start()
        assert rig.sample() == rig.expected
        if phase != "idle":
            strike.join()
    record_property("phase", phase)
    record_property("seconds", time.monotonic() - began)
    with rig.session.rollout_phase(training=False):
        assert len(rig.engine.servers) == 2
        assert rig.whole()
        assert rig.sample() == rig.expected
    gone(chosen)  # only now: one that died with nothing to do is noticed when the next rollout begins
    said = capfd.readouterr().err
    assert said.count(" died: ") == len(chosen), said
    for group in chosen:
        assert f" {group[0]}) died: " in said
