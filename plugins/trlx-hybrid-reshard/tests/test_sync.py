"""The weight sync on FSDP2 and plain models: right after every kind of change, at the floor, and alike on all ranks."""

import functools
import logging
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from ranks import reports
from standins import Model, SlicedEngine, session_of
from trlx_hybrid_reshard.agreement import Agreement
from trlx_hybrid_reshard.shards import Shards
from trlx_hybrid_reshard.sync import LIMIT, SEEN, SHOWN, WARM, SyncLog, ranks_per_node

SYNCS = ["first", "trained", "newly frozen", "one frozen", "frozen but written", "lost", "offloaded and run"]


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """The reports of so many ranks, which run once."""
    return functools.cache(lambda world: reports("syncing.py", tmp_path_factory.mktemp("syncing"), world))


@pytest.fixture(params=[1, 2, 4])
def seen(request, launched):
    return launched(request.param)


@pytest.mark.parametrize("kind", ["sharded", "sharded by columns", "plain"])
def test_the_engine_holds_the_policy_after_every_change(seen, kind):
    for report in seen:
        run = report[kind]
        assert [(name, run[name]["wrong"]) for name in SYNCS] == [(name, []) for name in SYNCS]
        assert run["written"] == len(SYNCS) + ("replaced" in run)
        assert run.get("replaced", {"wrong": []})["wrong"] == []


@pytest.mark.parametrize("kind", ["sharded", "plain"])
def test_bytes_are_at_the_floor_and_frozen_ones_rest(seen, kind):
    for report in seen:
        run = report[kind]
        assert run["first"]["bytes"] == run["floor"]
        assert (run["floor"] > 0) == (kind == "sharded" and len(seen) > 1)
        moved = {name: (run[name]["bytes"], run[name]["tensors"]) for name in SYNCS}
        everything, fewer = moved["first"], moved["one frozen"]
        assert fewer == moved["offloaded and run"]
        assert fewer[1] == everything[1] - 1
        assert (fewer[0] < everything[0]) == (run["floor"] > 0)
        assert {moved[name] for name in SYNCS if name not in ("one frozen", "offloaded and run")} == {everything}
        assert set(run["staging"]) == {0}  # nothing is held between syncs


def test_ranks_that_differ_say_so_alike(launched):
    first, second = (report["refusals"] for report in launched(2))
    assert (first["one rank"], second["one rank"]) == ("rank 1: no, says 1", "no, says 1")
    for one, other in zip(first, second, strict=True):
        assert one == other
        assert one == "one rank" or first[one] == second[one]
    assert "does not say where its weights lie" in first["no regions"]
    assert (
        "Rank 1 trains another model than rank 0: layers.2.0.weight is (12, 8) there and missing"
        in first["other model"]
    )
    assert "rank 0 is at weight version 7 with plan" in first["version"]
    assert "rank 1 at version 8 with plan" in first["version"]
    digests = first["freezing"].split("with plan ")
    assert digests[1].split(",")[0] != digests[2].split(".")[0]
    assert first["after"] == second["after"] == []


def test_what_the_own_node_has_comes_from_there(launched):
    """Each rank lacks the other shard, which its neighbour has and a rank of the other node."""
    found = [report["two nodes"] for report in launched(4)]
    assert [rank["peers"] for rank in found] == [[1], [0], [3], [2]]
    assert [rank["wrong"] for rank in found] == [[]] * 4


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [("aabb", 2), ("aaaa", 4), ("abcd", 1), ("abab", 0), ("aaab", 0), ("abbb", 0), ("aabbaa", 0)],
)
def test_nodes_are_runs_of_equally_many_ranks(hosts, expected):
    assert ranks_per_node(tuple(hosts)) == expected


def test_adapters_are_merged_when_all_ranks_have_said_that_they_are_there(monkeypatch):
    """The merge of shards is FSDP's collective, which has no deadline of ours: a missing rank would hang the others."""
    _, sync = session_of(Model(), SlicedEngine(tp=1))
    called = []
    for owner, name in ((Agreement, "exchange"), (Agreement, "compare"), (Shards, "merge")):
        plain = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *a, plain=plain, name=name: (called.append(name), plain(*a))[1])
    assert sync.refuses() is None
    sync.open()
    assert called[:2] == ["exchange", "merge"]
    called.clear()
    sync.sync()
    assert called == ["compare", "merge"]


@pytest.fixture
def said(capsys, caplog):
    """Let syncs of so many seconds end every ten, on the test's own clock; what was printed and what was logged."""

    def after(durations, rank=0, level=logging.WARNING):
        with caplog.at_level(level, logger="trlx_hybrid_reshard.sync"):
            log = SyncLog(rank, lambda: "Do less.")
            for number, seconds in enumerate(durations):
                log.done(10.0 * number - seconds, 10.0 * number, f"transferred={number}GB")
        return capsys.readouterr().err.splitlines(), [(r.levelname, r.message) for r in caplog.records]

    return after


def test_the_first_syncs_are_shown_without_any_set_up(said):
    printed, logged = said([0.5] * (SHOWN + 4))
    assert printed == [f"[Reshard] duration=0.500s, transferred={number}GB" for number in range(SHOWN)]
    assert logged == []


def test_all_are_logged_and_none_is_said_twice(said):
    printed, logged = said([0.5] * 5, level=logging.INFO)
    assert printed == []
    assert logged == [("INFO", f"[Reshard] duration=0.500s, transferred={number}GB") for number in range(5)]


def test_other_ranks_print_nothing(said):
    assert said([3.0] * 20, rank=1) == ([], [])


def test_a_tenth_of_an_iteration_is_warned_about_once_and_only_when_warm(said):
    _, logged = said([9.0] * WARM + [0.9] * 5 + [2.0] * (SEEN - 1) + [0.9] + [2.0] * 10)
    assert logged == [("WARNING", "[Reshard] Resharding takes 20% of an iteration, 2 s of 10 s. Do less.")]


def test_one_slow_sync_among_others_is_no_news(said):
    assert said([10 * LIMIT] * 20)[1] == []
    assert said([0.5, 0.5, 5.0, 5.0] * 5)[1] == []


def test_what_a_sync_moves_is_not_known_before_it_is_planned():
    _, sync = session_of(Model(), None)
    assert sync.summary == "not planned yet"
