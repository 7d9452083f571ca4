"""Shards of many tensors, whole again in one call per mesh and dtype."""

from pathlib import Path

import pytest
from trlx_hybrid.testing.processes import rank_reports


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_every_tensor_is_what_torch_gathers_by_itself(tmp_path, world):
    for report in rank_reports(Path(__file__).parent / "scripts" / "gathering.py", tmp_path, count=world):
        assert report == {"same_object": True, "different": [], "dtypes": [], "calls": 3, "kinds": 3}
