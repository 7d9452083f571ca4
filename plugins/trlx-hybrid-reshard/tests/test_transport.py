"""Random reshards of real tensors over gloo: poisoned memory, every element written, byte counts at the floor."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from ranks import reports


@pytest.mark.parametrize("world", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_tensors_arrive_and_nothing_else_is_touched(tmp_path, world):
    seen = reports("moving.py", tmp_path, world)
    assert {report["examples"] for report in seen} == {31}
    if world == 1:
        assert seen[0]["received"] == 0
        return
    assert all(report["received"] > 0 and report["buckets"] > 2 for report in seen)
    assert all(min(report["in_place"], report["packed"], report["joined"]) > 0 for report in seen)
