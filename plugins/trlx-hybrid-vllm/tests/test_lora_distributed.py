"""Adapters of a policy over two ranks, served unmerged by engines over one or two: only the adapter moves."""

from pathlib import Path

import pytest
from trlx_hybrid.testing.processes import rank_reports

SCRIPT = Path(__file__).parent / "scripts" / "lora_distributed.py"


@pytest.mark.parametrize(
    ("mode", "size", "shape"),
    [
        ("fsdp", 2, []),
        pytest.param("fsdp", 1, [], marks=pytest.mark.slow),
        pytest.param("ddp", 2, ["num_key_value_heads=1"], marks=pytest.mark.slow),  # which both ranks then have
    ],
    ids=["sharded, sliced", "sharded", "sliced"],
)
def test_only_the_adapter_moves_and_the_engine_computes_what_the_unmerged_model_does(tmp_path, mode, size, shape):
    for report in rank_reports(SCRIPT, tmp_path, mode, size, *shape, count=2):
        assert report["sharded"] == (report["parameters"] if mode == "fsdp" else 0)
        assert report["why"].startswith("auto; not alias: ")
        first, *others = report["syncs"]
        assert len(others) == 3
        assert first[1] > 10 * report["adapter"]  # the base, once, also with sleep on
        for weights, moved, verified, gap, unchanged in report["syncs"]:
            assert weights == "lora"
            assert verified >= 2 * 14
            assert gap < 1e-5
            assert unchanged
            assert moved == report["adapter"] or moved == first[1]
        assert {moved for _, moved, *_ in others} == {report["adapter"]}
        assert any(report["losses"])
