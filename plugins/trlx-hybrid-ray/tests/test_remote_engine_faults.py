"""kill -9 of engines' actors, or of vLLM's core in them, and trainers that stop: every request is answered, as ever.

`FAULT_SEEDS=50` runs as many seeds, each phase at least five times.
"""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from trlx_hybrid import HybridConfig
from trlx_hybrid.contract.types import Sampling
from trlx_hybrid.errors import EngineError

sys.path.insert(0, str(Path(__file__).parent))
from launching import Segments
from remote_training import (
    Trained,
    core_of,
    disturbed,
    gone,
    killed_in_mid_rollout,
    no_segments,
    pids,
    requests_of,
    tokens,
)

pytestmark = pytest.mark.slow
SEEDS = int(os.environ.get("FAULT_SEEDS", "4"))
PHASES = ("idle", "sync", "rollout", "both")
SAMPLING = Sampling(max_tokens=40, logprobs=0, extra={"ignore_eos": True})
REQUESTS = 24


class Rig:
    """Engines of a trainer that has trained, and what they sample while nobody dies."""

    def __init__(self, folder, **options):
        self.session = Trained(folder, HybridConfig(engine="remote", engine_options=options)).session
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

    def sample_and_die(self, victim="actor"):
        return killed_in_mid_rollout(self.engine, requests_of(REQUESTS), SAMPLING, victim)

    def whole(self):
        """Whether every engine that lives holds the policy's bits."""
        return self.session.weights.check(full=True) == len(self.session.policy.checkpoint_names())


@contextmanager
def rigged(folder, **options):
    """A rig. Nothing of its engines is left in the end, whoever died and was replaced."""
    rig = Rig(folder, **options)
    try:
        yield rig
    finally:
        left = pids(rig.engine)
        rig.session.close()
    gone(left)


@pytest.fixture(scope="module")
def segments(session_cluster):
    """Of shared memory: none is left when all engines are gone."""
    segments = Segments()
    yield
    no_segments(segments)


@pytest.fixture(scope="module")
def rig(segments, tmp_path_factory, request):
    """Of so many engines. Another one's engines end with those of this one: tests of each are run in a row."""
    with rigged(tmp_path_factory.mktemp("rig"), replicas=request.param, restarts=1000) as rig:
        yield rig


of_two = pytest.mark.parametrize("rig", [2], indirect=True, ids=["two"])
of_one = pytest.mark.parametrize("rig", [1], indirect=True, ids=["one"])


def test_where_nobody_may_be_replaced_the_error_names_the_engine_and_the_cause(segments, tmp_path):
    with rigged(tmp_path, restarts=0) as one, one.session.rollout_phase(training=False):
        processes = pids(one.engine)
        with pytest.raises(EngineError, match=r"No remote engine is left: engine 0 \(node .*\) died: .*[Dd]ied"):
            one.sample_and_die()
        gone(processes)


@of_two
def test_a_dead_engine_is_replaced_and_gets_the_weights_of_the_next_sync(rig):
    engine = rig.engine
    with rig.session.rollout_phase(training=False):
        first, second = engine.servers
        victims, _ = pids(engine)
        assert rig.sample_and_die() == rig.expected
        assert engine.servers == (second,)
    gone([victims])
    with rig.session.rollout_phase(training=False):
        assert len(engine.servers) == 2
        assert first not in engine.servers
        assert rig.whole()
        assert rig.sample() == rig.expected


@of_two
def test_an_engine_that_dies_during_a_sync_is_replaced_and_the_sync_repeated(rig, monkeypatch):
    weights, victim = rig.session.weights, pids(rig.engine)[1]
    load = weights._joined_sender

    def die_first():
        sender = load()
        if victim:
            os.kill(victim[0], signal.SIGKILL)
            victim.clear()
        return sender

    monkeypatch.setattr(weights, "_joined_sender", die_first)
    rig.session.weights_changed()
    with rig.session.rollout_phase(training=False):
        assert not victim
        assert len(rig.engine.servers) == 2
        assert rig.whole()


def kill(victims):
    for pid in victims:
        os.kill(pid, signal.SIGKILL)


@of_two
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


@of_one
@pytest.mark.parametrize("victim", ["actor", "engine core"])
def test_the_only_engine_dies_and_its_successor_gets_the_weights_at_once(rig, victim):
    with rig.session.rollout_phase(training=False):
        processes = pids(rig.engine)
        assert rig.sample_and_die(victim) == rig.expected
        gone(processes)
        assert rig.session.versions.engine_version == rig.session.versions.version


@of_one
def test_a_trainer_that_was_stopped_ends_no_engine_that_lives(rig, capfd):
    """Longer than an engine may be silent, while it samples and while it is asked whether it lives."""
    engine = rig.engine
    stop = ["sh", "-c", f"kill -STOP {os.getpid()}; sleep 30; kill -CONT {os.getpid()}"]
    with rig.session.rollout_phase(training=False):
        (server,) = engine.servers
        stopped = disturbed(engine, requests_of(REQUESTS), SAMPLING, lambda: subprocess.run(stop, check=True))
        assert stopped == rig.expected
    asking = subprocess.Popen(stop)
    for _ in range(1000):
        engine.restore()
        if asking.poll() is not None:
            break
        time.sleep(0.01)
    assert asking.wait() == 0
    assert engine.servers == (server,)
    assert " died: " not in capfd.readouterr().err
