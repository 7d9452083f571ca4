"""Processes and nodes that are killed or stopped at random moments: the run ends in time, names the true victim and
leaves nothing, or recovers.

`make test` runs some seeds, on a stand-in for a trainer, and `make test-slow` the others until each signal has struck
each kind of process. `FAULT_SEEDS=50` adds GRPO with FSDP2 and a tensor-parallel vLLM, each phase at least five times.
"""

import contextlib
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
from launching import OBEDIENT, SCRIPTS, Segments, launch, nothing_left
from trlx_hybrid_ray.placement import alive_nodes

from tests.support.fsdp import FSDP2_FILE

SEEDS = int(os.environ.get("FAULT_SEEDS", "3"))
CHEAP = 15  # seeds without GRPO
PHASES = ("rollout", "train", "saved", "start", "sync", "optimizer", "end")
FAULTS = (
    ("rank", signal.SIGKILL),
    ("raylet", signal.SIGKILL),
    ("recover", signal.SIGKILL),
    ("accelerate", signal.SIGKILL),
    ("actor", signal.SIGKILL),
    ("rank", signal.SIGTERM),
    ("accelerate", signal.SIGTERM),
    ("rank", signal.SIGSTOP),
    ("actor", signal.SIGTERM),
    ("raylet", signal.SIGTERM),
    ("actor", signal.SIGSTOP),
    ("accelerate", signal.SIGSTOP),
    ("raylet", signal.SIGSTOP),
)
"""Who gets which signal. 13 of them and 7 phases, so that 91 seeds meet all pairs."""
ENDS_IN = 30.0  # seconds from the signal to the end
ROOMY = 100  # CPUs of nodes that only these tests' ranks fit on, so that nobody else's node is killed


class Striker(threading.Thread):
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


def lineage(pid):
    """The processes that a rank descends from: accelerate, the node's actor, the raylet."""
    rank = psutil.Process(pid)
    accelerate = rank.parent()
    actor = accelerate.parent()
    return {"rank": rank, "accelerate": accelerate, "actor": actor, "raylet": actor.parent()}


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
    deadline = time.monotonic() + 60
    while {node.id for node in alive_nodes()} - set(session_cluster.nodes) and time.monotonic() < deadline:
        time.sleep(0.2)  # or the next test's ranks are put on one that is about to go


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    path = tmp_path_factory.mktemp("config") / "accelerate.yaml"
    path.write_text(json.dumps(FSDP2_FILE))
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


SEEN = [pytest.param(seed, marks=pytest.mark.slow if seed >= SEEDS else ()) for seed in range(max(SEEDS, len(FAULTS)))]


@pytest.mark.parametrize("seed", SEEN)
def test_a_run_that_loses_a_process_or_a_node_ends_in_time_and_says_which(
    roomy, run, expected, tmp_path, seed, record_property
):
    cluster, nodes = roomy
    draw = random.Random(seed)
    script = "phases.py" if seed < CHEAP else "launched_grpo.py"
    phase, (kind, which), victim = PHASES[seed % len(PHASES)], FAULTS[seed % len(FAULTS)], draw.randrange(2)
    pause = draw.random() * (3.0 if phase == "start" and seed >= CHEAP else 0.2)  # building an engine takes a while
    segments, added = Segments(), nodes()
    stopped = []

    def strike(pid):
        processes = lineage(pid)
        struck = processes["rank" if kind == "recover" else kind]
        if kind == "raylet" and which != signal.SIGSTOP:
            (lost,) = [n for n in added if n.all_processes["raylet"][0].process.pid == struck.pid]
            cluster.cluster.remove_node(lost, allow_graceful=which == signal.SIGTERM)
        else:
            struck.send_signal(which)
            if which == signal.SIGSTOP and kind == "raylet":
                stopped.append((struck, [n for n in added if n.all_processes["raylet"][0].process.pid == struck.pid]))

    striker = Striker(tmp_path, phase, victim, pause, strike)
    striker.start()
    try:
        done = run(tmp_path, script, restarts=int(kind == "recover"))
    finally:
        striker.over.set()
        striker.join(20)
        for process, lost in stopped:  # or it stays in the cluster for a minute, and nobody may ask it
            process.kill()
            cluster.cluster.remove_node(lost[0], allow_graceful=False)
    assert striker.struck is not None, done.err[-3000:]
    seconds = time.monotonic() - striker.struck
    figures = {"script": script, "phase": phase, "fault": f"{which.name} {kind}", "code": done.code, "seconds": seconds}
    for name, value in figures.items():
        record_property(name, value)
    print(f"seed {seed}: {figures}")
    named = [line for line in done.err.splitlines() if "failed first" in line or "was lost, with" in line]
    # All had ended before the signal came; or the ranks, which need no raylet, while it stood still.
    whole = done.code == 0 and (phase == "end" or (kind, which) == ("raylet", signal.SIGSTOP)) and kind != "recover"
    if whole:
        assert named == []
    elif kind in ("rank", "recover"):
        assert named[0].startswith(f"Rank {victim} failed first"), done.err[-3000:]
        assert {"SIGSTOP": "has been stopped"}.get(which.name, f"ended by {which.name}") in named[0]
    else:
        assert named[0].startswith("Node 127.0.0.1 ("), done.err[-3000:]
        assert f"was lost, with rank {victim}:" in named[0] or "failed first: " in named[0]
    assert (done.code == 0) == (whole or kind == "recover"), done.err[-3000:]
    if kind != "recover":
        assert seconds < ENDS_IN
    if done.code == 0:
        results, resumed = result(tmp_path)
        if kind == "recover" and phase in ("saved", "end"):
            assert all(resumed)
        assert results == expected(script)
    assert nothing_left(str(tmp_path), segments) == []


def test_a_node_that_is_lost_while_its_ranks_start_is_made_up_for_by_a_restart(roomy, capfd, tmp_path):
    cluster, nodes = roomy
    added, over, segments = nodes(), threading.Event(), Segments()
    spare = cluster.add_node(num_cpus=ROOMY, num_gpus=0)
    before = {process.pid for process in psutil.Process().children(recursive=True)}

    def lose():
        while not over.wait(0.01):
            for process in psutil.Process().children(recursive=True):
                if process.pid not in before and (raylet := _node_actors_parent(process)) is not None:
                    (lost,) = [n for n in [*added, spare] if n.all_processes["raylet"][0].process.pid == raylet]
                    cluster.cluster.remove_node(lost, allow_graceful=False)
                    return

    striker = threading.Thread(target=lose, daemon=True)
    striker.start()
    try:
        done = launch(
            capfd, tmp_path, OBEDIENT, "together", tmp_path, nodes=2, cpus_per_process=ROOMY / 2 + 1, restarts=2
        )
    finally:
        over.set()
        striker.join(20)
        if spare in cluster.cluster.worker_nodes:
            cluster.cluster.remove_node(spare)
    assert done.code == 0, done.err[-3000:]
    assert "Starting again (1 of 2)" in done.err
    assert nothing_left(str(tmp_path), segments) == []


def _node_actors_parent(process):
    """Whose child it is, where it is a node's actor; processes come and go meanwhile."""
    with contextlib.suppress(psutil.Error):
        if "NodeActor" in " ".join(process.cmdline()):
            return process.ppid()
    return None
