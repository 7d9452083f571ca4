"""A model that sees images, its tower included, sharded by FSDP2 and resharded into a tensor-parallel engine."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from ranks import reports

NEEDED = "the processors of vision-language models need torchvision"


def test_a_row_without_an_image_beside_rows_with_some_is_named_where_the_tower_is_sharded(tmp_path):
    pytest.importorskip("torchvision", reason=NEEDED)
    for told in reports("images.py", tmp_path, 2, "fsdp"):
        assert "Row 0 of rank 1 has no image, and others have" in told


def test_a_rank_without_images_trains_beside_one_with_some_where_nothing_is_sharded(tmp_path):
    pytest.importorskip("torchvision", reason=NEEDED)
    first, second = reports("images.py", tmp_path, 2, "ddp")
    assert first == second
    assert len(first) == 2
    assert min(first) > 0


@pytest.mark.parametrize("architecture", ["qwen2_5_vl", "qwen3_vl"])
def test_every_sync_brings_the_tower_as_well(architecture, tmp_path):
    pytest.importorskip("torchvision", reason=NEEDED)
    for report in reports("images.py", tmp_path, 2, architecture):
        assert report["sharded"]
        assert len(report["syncs"]) == len(report["logs"]) == 3
        assert max(log["grad_norm"] for log in report["logs"]) > 0
        for sync in report["syncs"]:
            assert sync["weights"] == "reshard"
            assert sync["differing"] == []
            assert sync["gap"] < 1e-5
