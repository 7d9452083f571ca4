"""Rounds over two real processes, with a group that lies on both: the same batches as in one."""

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trlx_hybrid.rollout.rounds import Place, batch_of, rows_per_rank
from trlx_hybrid.testing.processes import Script, rank_reports

SCRIPT = Path(__file__).parent / "scripts" / "rounds_distributed.py"


@pytest.mark.parametrize("options", [(), ("oversampling=1.5", "curriculum")], ids=["plain", "oversampled"])
def test_two_processes_train_on_the_batches_of_one(tmp_path, options):
    environment = os.environ | {"ACCELERATE_USE_CPU": "true"}
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    alone = Script(SCRIPT, tmp_path / "one", *options, environment=environment).wait(400)
    assert alone.returncode == 0, alone.stderr[-4000:]
    one = json.loads((tmp_path / "one" / "rank0.json").read_text())
    two = rank_reports(SCRIPT, tmp_path / "two", *options, count=2, environment=environment)
    for whole, first, second in zip(one["batches"], two[0]["batches"], two[1]["batches"], strict=True):
        assert len(first["rows"]) == len(second["rows"]) == 6
        assert first["rows"] + second["rows"] == whole["rows"]
        assert first["rounds"] == second["rounds"] == whole["rounds"]
    assert max(batch["rounds"] for batch in one["batches"]) > 1
    kept = [number for batch in one["batches"] for number, _, reward in batch["rows"] if reward is not None]
    assert kept
    assert all(number % 2 for number in kept)
    for name in ("loss", "grad_norm", "reward"):
        assert two[0][name] == pytest.approx(one[name], abs=1e-5, rel=1e-5)
    assert two[0]["extra"] == one["extra"] == [number for number, _, _ in one["batches"][-1]["rows"]]


@given(st.integers(1, 40), st.integers(2, 16), st.integers(1, 9))
def test_a_round_has_whole_groups_and_no_more_rows_than_needed(groups, size, world):
    rows = rows_per_rank(groups, size, world)
    assert rows * world >= groups * size
    assert rows * world % size == 0
    assert not any(
        fewer * world >= groups * size and fewer * world % size == 0 for fewer in range(max(0, rows - size), rows)
    )


@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=6), min_size=1, max_size=4), st.data())
def test_a_batch_has_kept_groups_first_and_others_where_those_are_too_few(rounds, data):
    sampled = sum(map(len, rounds))
    needed = data.draw(st.integers(1, sampled))
    batch = batch_of(rounds, needed)
    kept = [Place(r, g, True) for r, groups in enumerate(rounds) for g, flag in enumerate(groups) if flag]
    assert len({(place.round, place.group) for place in batch}) == len(batch) == needed
    assert batch[: len(kept)] == kept[:needed]
    assert all(rounds[place.round][place.group] == place.kept for place in batch)
