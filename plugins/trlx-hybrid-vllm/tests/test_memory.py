"""The ledger against the process: what it says of each owner, and what the operating system sees come and go."""

import json
import os
from pathlib import Path

import pytest
from trlx_hybrid.testing.processes import Script

SCRIPT = Path(__file__).parent / "scripts" / "memory_edges.py"
MIB = 1 << 20
EDGES = [  # of one cycle, in this order
    "leave optimizer",
    "leave gradients",
    "wake weights",
    "leave policy",
    "wake kv_cache",
    "sleep",
    "return policy",
    "return gradients",
    "return optimizer",
]
COMES, GOES = 1, -1
MOVES = {  # who comes or goes at each
    "alias": {
        "leave optimizer": (GOES, {"optimizer"}),
        "leave gradients": (GOES, {"gradients"}),
        "wake kv_cache": (COMES, {"KV cache"}),
        "sleep": (GOES, {"KV cache"}),
        "return gradients": (COMES, {"gradients"}),
        "return optimizer": (COMES, {"optimizer"}),
    },
    "gather": {
        "leave optimizer": (GOES, {"optimizer"}),
        "leave gradients": (GOES, {"gradients"}),
        "wake weights": (COMES, {"engine weights"}),
        "leave policy": (GOES, {"policy"}),
        "wake kv_cache": (COMES, {"KV cache"}),
        "sleep": (GOES, {"KV cache", "engine weights"}),
        "return policy": (COMES, {"policy"}),
        "return gradients": (COMES, {"gradients"}),
        "return optimizer": (COMES, {"optimizer"}),
    },
}


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    out = tmp_path_factory.mktemp("memory") / "edges.json"
    done = Script(SCRIPT, out, environment=os.environ | {"OMP_NUM_THREADS": "1"}).wait(600)
    assert done.returncode == 0, done.stderr[-4000:]
    report = json.loads(out.read_text())
    for path in MOVES:
        assert report[path]["path"] == path
        assert len(report[path]["edges"]) == len(EDGES)
    return report


def edges(measured, path):
    return zip(EDGES, measured[path]["edges"], strict=True)


def changes(edge, minimum=MIB):
    ledger = {owner: edge["after"]["ledger"][owner] - n for owner, n in edge["before"]["ledger"].items()}
    return {owner: n for owner, n in ledger.items() if abs(n) >= minimum}


@pytest.mark.parametrize("path", MOVES)
def test_the_ledger_is_a_walk_over_the_storages(measured, path):
    for name, edge in edges(measured, path):
        for side in ("before", "after"):
            assert edge[side]["ledger"] == edge[side]["walk"], (name, side)


@pytest.mark.parametrize("path", MOVES)
def test_each_edge_moves_its_owners_and_no_others(measured, path):
    for name, edge in edges(measured, path):
        sign, owners = MOVES[path].get(name, (0, set()))
        moved = changes(edge)
        assert set(moved) == owners, name
        assert all(n * sign >= 256 * MIB for n in moved.values()), name


@pytest.mark.parametrize("path", MOVES)
def test_the_process_grows_and_shrinks_by_what_the_ledger_says(measured, path):
    for name, edge in edges(measured, path):
        said = sum(changes(edge, minimum=0).values())
        seen = edge["after"]["rss"] - edge["before"]["rss"]
        assert edge["after"]["arena"] == edge["before"]["arena"], name  # it grew in an earlier cycle
        assert abs(seen - said) <= max(0.1 * abs(said), 2 * MIB), (name, seen, said)


@pytest.mark.parametrize("path", MOVES)
def test_nothing_is_hidden_beside_the_owners(measured, path):
    """All that the process holds beyond what it held before the model is in the ledger, or in the arena it reports."""
    for name, edge in edges(measured, path):
        for side in ("before", "after"):
            said = sum(edge[side]["ledger"].values()) + edge[side]["arena"]
            seen = edge[side]["rss"] - measured[path]["baseline"]
            assert abs(seen - said) <= 0.1 * said, (name, side, seen, said)


@pytest.mark.parametrize("path", MOVES)
def test_owners_take_turns(measured, path):
    """While the engine samples, the trainer holds no state; while the trainer works, the engine holds no KV cache."""
    found = dict(edges(measured, path))
    sampling, training = found["wake kv_cache"]["after"]["ledger"], found["return optimizer"]["after"]["ledger"]
    assert sampling["optimizer"] == sampling["gradients"] == training["KV cache"] == 0
    assert training["optimizer"] > 512 * MIB
    assert min(sampling["KV cache"], training["policy"], training["gradients"]) > 256 * MIB
    whole = sampling["engine weights"] + sampling["policy"]
    assert whole == pytest.approx(training["policy"], rel=0.01)  # one set of weights, under each path


@pytest.mark.parametrize("path", MOVES)
def test_a_frozen_heap_stays_frozen_through_sleep_and_wake_up(measured, path):
    """As vLLM leaves it: a full collection over a trainer's heap takes half a second."""
    assert measured[path]["frozen"] > 100_000


def test_the_measurement_itself_stays_small(measured):
    assert measured["peak"] < 4096 * MIB
