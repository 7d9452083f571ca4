"""Ranks and nodes that are killed at random phases: the run ends in time and names the true victim, or recovers.

`make test` runs three seeds, on a stand-in for a trainer. `FAULT_SEEDS=50` adds GRPO with FSDP2 and a tensor-parallel
vLLM for the others, each phase at least five times.
"""

import json
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from launching import SCRIPTS, Segments, launch, leftovers, nothing_left
from test_launch_grpo import CONFIG

SEEDS = int(os.environ.get("FAULT_SEEDS", "3"))
CHEAP = 3  # seeds without GRPO
PHASES = ("rollout", "train", "saved", "start", "sync", "optimizer", "end")
KINDS = ("rank", "node", "recover")
ENDS_IN = 30.0
ROOMY = 100  # CPUs of nodes that only these tests' ranks fit on, so that nobody else's node is killed


class Killer(threading.Thread):
    """Waits until a rank enters a phase, and a little longer; then strikes."""

    def __init__(self, folder, phase, rank, pause, strike):
        super().__init__(daemon=True)
        self.mark, self.pause, self.strike = folder / f"{phase}.{rank}", pause, strike
        self.struck = None
        self.over = threading.Event()

    def run(self):
        while not self.over.wait(0.01):
            if self.mark.exists() and (text := self.mark.read_text()):
                time.sleep(self.pause)
                self.struck = time.monotonic()
                self.strike(json.loads(text)["pid"])
                return


@pytest.fixture(scope="module")
def roomy(session_cluster):
    """Brings the number of nodes that these tests' ranks fit on to two."""
    added = []

    def nodes():
        here = session_cluster.cluster.worker_nodes
        added.extend(
            session_cluster.add_node(num_cpus=ROOMY, num_gpus=0) for _ in range(2 - sum(node in here for node in added))
        )
        return [node for node in added if node in here]

    yield session_cluster, nodes
    for node in added:
        if node in session_cluster.cluster.worker_nodes:
            session_cluster.cluster.remove_node(node)


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    path = tmp_path_factory.mktemp("config") / "accelerate.yaml"
    path.write_text(json.dumps(CONFIG))
    return str(path)


@pytest.fixture
def run(roomy, capfd, config):
    def start(folder, script, **settings):
        arguments = [folder] if script == "phases.py" else [folder, "save=1", "pause=0.2"]
        settings |= {"nodes": 2, "cpus_per_process": ROOMY / 2 + 1, "config_file": config}
        return launch(capfd, folder, SCRIPTS / script, *arguments, **settings)

    return start


@pytest.fixture(scope="module")
def undisturbed():
    """What a run ends with that nobody disturbs, by script."""
    weight = torch.zeros(1)
    for step in range(4):  # as in phases.py, both ranks
        weight = weight - ((weight / 3 + step) + (weight / 3 + 1 + step))
    return {"phases.py": [weight.item()] * 2}


@pytest.fixture
def expected(undisturbed, roomy, run, tmp_path):
    def ending(script):
        if script not in undisturbed:
            roomy[1]()  # two nodes again
            folder = tmp_path / "undisturbed"
            folder.mkdir()
            assert run(folder, script).code == 0
            undisturbed[script] = result(folder)[0]
        return undisturbed[script]

    return ending


def result(folder):
    """What each rank ended with, and what it went on from."""
    reports = [json.loads((folder / f"report.{rank}").read_text()) for rank in range(2)]
    return [r.get("result", r.get("logs")) for r in reports], [r["resumed"] for r in reports]


@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_run_that_loses_a_rank_or_a_node_ends_in_time_and_says_which(
    roomy, run, expected, tmp_path, seed, record_property
):
    cluster, nodes = roomy
    draw = random.Random(seed)
    script = "phases.py" if seed < CHEAP else "launched_grpo.py"
    phase, kind, victim = PHASES[seed % len(PHASES)], KINDS[seed % len(KINDS)], draw.randrange(2)
    pause = draw.random() * (3.0 if phase == "start" and seed >= CHEAP else 0.2)  # building an engine takes a while
    segments, added = Segments(), nodes()

    def lose_node(pid):
        (lost,) = [n for n in added if n.all_processes["raylet"][0].process.pid == psutil.Process(pid).ppid()]
        cluster.cluster.remove_node(lost, allow_graceful=draw.random() < 0.5)

    strike = lose_node if kind == "node" else lambda pid: os.kill(pid, signal.SIGKILL)
    killer = Killer(tmp_path, phase, victim, pause, strike)
    killer.start()
    done = run(tmp_path, script, restarts=int(kind == "recover"))
    ended = time.monotonic()
    killer.over.set()
    killer.join(20)
    assert killer.struck is not None, done.err[-3000:]
    figures = {"script": script, "phase": phase, "kind": kind, "code": done.code, "seconds": ended - killer.struck}
    for name, value in figures.items():
        record_property(name, value)
    named = [line for line in done.err.splitlines() if "failed first" in line or "was lost" in line]
    whole = kind == "node" and phase == "end" and done.code == 0  # the ranks had ended before Ray let go of the node
    if whole:
        assert named == []
    elif kind == "node":
        assert "was lost, with rank" in named[0]
        assert f"with rank {victim}:" in named[0]
    else:
        assert named[0].startswith(f"Rank {victim} failed first"), done.err[-3000:]
        assert "ended without a Python error" in named[0]
    assert (done.code == 0) == (whole or kind == "recover"), done.err[-3000:]
    if kind != "recover":
        assert ended - killer.struck < ENDS_IN
    if done.code == 0:
        results, resumed = result(tmp_path)
        if kind == "recover" and phase in ("saved", "end"):
            assert all(resumed)
        assert results == expected(script)
    assert nothing_left(str(tmp_path), segments) == []


def test_a_rank_whose_warden_is_killed_is_not_left_alone(two_nodes, capfd, tmp_path):
    segments, deadline = Segments(), time.monotonic() + 60
    while len(two_nodes.nodes) > 1 + len(two_nodes.cluster.worker_nodes):  # Ray takes a while to see that one is gone
        assert time.monotonic() < deadline
        time.sleep(0.2)
    killer = Killer(tmp_path, "waiting", 0, 0.0, lambda pid: os.kill(warden_of(pid), signal.SIGKILL))
    killer.start()
    done = launch(capfd, tmp_path, SCRIPTS / "obedient.py", "wait", tmp_path)
    killer.over.set()
    killer.join(20)
    assert done.code == 1
    assert done.err.strip().endswith("Its node is gone, or the warden was killed.")
    for pid in (int(left.split()[0]) for left in leftovers(str(tmp_path))):
        os.kill(pid, signal.SIGKILL)  # the child that only a warden would have found
    assert nothing_left(str(tmp_path), segments) == []


def warden_of(pid):
    """The process with an open descriptor of this one."""
    for entry in Path("/proc").glob("[0-9]*/fdinfo/*"):
        try:
            if f"Pid:\t{pid}\n" in entry.read_text():
                return int(entry.parts[2])
        except OSError:
            continue
    raise AssertionError(f"nobody watches {pid}")
