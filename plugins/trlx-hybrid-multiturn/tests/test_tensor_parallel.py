"""One engine over two or four ranks, each with the tools of its own rows: real processes, over gloo."""

import json
import os
import runpy
from pathlib import Path

import pytest
from trlx_hybrid.testing.processes import rank_reports

SCRIPT = Path(__file__).parent / "scripts" / "multiturn_distributed.py"
DEADLINE = 240  # seconds: for a rank that waits for ever


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The same run in one process: this one."""
    folder = tmp_path_factory.mktemp("alone")
    runpy.run_path(str(SCRIPT))["main"](folder)
    return json.loads((folder / "rank0.json").read_text())


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.slow)], ids=["tp=2", "tp=2, pp=2"])
def ranks(request, tmp_path_factory):
    environment = os.environ | {"ACCELERATE_USE_CPU": "true"}
    folder, stages = tmp_path_factory.mktemp("ranks"), request.param
    return rank_reports(SCRIPT, folder, stages, count=2 * stages, environment=environment, timeout=DEADLINE)


def assert_same_rows(ranks, alone, index):
    """Rank by rank, the conversations are those of one process."""
    rows = [row for rank in ranks for row in rank["batches"][index]]
    assert len(rows) == len(alone["batches"][index]) == 8
    for (ids, mask, messages, logprobs), other in zip(rows, alone["batches"][index], strict=True):
        assert (ids, mask, messages) == tuple(other[:3])
        assert logprobs == pytest.approx(other[3], abs=1e-4)
    assert [total for rank in ranks for total in rank["totals"][index]] == alone["totals"][index]


def test_ranks_hold_the_conversations_of_one(ranks, alone):
    """Although the tools of the first rank are slow, and draw from torch's, numpy's and Python's generators."""
    assert {report["rollout"] for report in [*ranks, alone]} == {"multi_turn"}
    assert_same_rows(ranks, alone, 0)
    turns = [sum(m["role"] == "assistant" for m in row[2]) for batch in alone["batches"] for row in batch]
    assert len(set(turns)) > 1
    assert max(turns) == 4


def test_each_rank_runs_the_tools_of_its_own_rows(ranks, alone):
    calls = [sum(message["role"] == "tool" for message in row[2]) for row in alone["batches"][0]]
    share = len(calls) // len(ranks)
    assert [rank["calls"] for rank in ranks] == [sum(calls[i * share : (i + 1) * share]) for i in range(len(ranks))]
    assert sum(calls) == alone["calls"]
    assert sum(rank["calls"] > 0 for rank in ranks) > 1


def test_a_rank_that_gives_up_stops_the_others_by_name_and_all_can_go_on(ranks, alone):
    *waited, (gave_up, reason) = (rank["error"] for rank in ranks)
    for error, text in waited:
        assert error == "EngineError"
        assert text.startswith(f"Rank {len(waited)} of this rank's replica gave up the rollout. Its own error says")
    assert gave_up == "TrajectoriesFailedError"
    assert reason.startswith(f"1 of {8 // len(ranks)} trajectories broke off, 0 may")
    assert max(rank["seconds"] for rank in ranks) < DEADLINE / 4
    assert [(rank["unfinished"], rank["taken"]) for rank in ranks] == [(False, 0)] * len(ranks)
    assert_same_rows(ranks, alone, 1)  # after a step of training


def test_ranks_play_the_episodes_of_one(ranks, alone):
    """Although the environments of the first rank are slow, and draw from everybody's generators."""
    rows = [row for rank in ranks for row in rank["episodes"]]
    assert len(rows) == len(alone["episodes"]) == 8
    for (ids, mask, logprobs, reward, messages), other in zip(rows, alone["episodes"], strict=True):
        assert (ids, mask, reward, messages) == (other[0], other[1], *other[3:])
        assert logprobs == pytest.approx(other[2], abs=1e-4)
    assert len({sum(m["role"] == "assistant" for m in row[4]) for row in rows}) > 1
