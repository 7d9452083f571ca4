"""Experts: FSDP2 shards which of them a rank has, tensor parallelism slices inside each. vLLM's own loader judges."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from ranks import reports

pytestmark = pytest.mark.slow  # experts as data are in test_plan.py


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    return reports("experts.py", tmp_path_factory.mktemp("experts"), 2)


def test_every_sync_writes_what_the_loader_would_have(seen):
    for report in seen:
        assert report["refuses"] is None
        assert report["sharded"]
        assert report["wrong"] == [[], []]


def test_bytes_are_those_that_the_tool_plans(seen):
    for report in seen:
        assert report["bytes"] == report["planned"] > 0


def test_a_slice_of_all_experts_is_one_region(seen):
    """Six experts of 64 rows each for gate and for up, hidden size 128; each rank has half of the rows."""
    for rank, report in enumerate(seen):
        own = [32 * rank, 32 * rank + 32]
        assert report["gate_up"] == [[[0, 6], own, [0, 128]], [[0, 6], [64 + own[0], 64 + own[1]], [0, 128]]]
        assert report["down"] == [[[0, 6], [0, 128], own]]


def test_backends_that_lay_experts_out_anew_are_refused_by_name(seen):
    for report in seen:
        refused = report["refused"]
        assert "computes with the MoE backend CPU" in refused["cpu"]
        assert "computes with the MoE backend FlashInfer CUTLASS" in refused["FLASHINFER_CUTLASS"]
        assert "engine_args={'moe_backend': 'triton'}" in refused["FLASHINFER_CUTLASS"]
        assert refused["TRITON"] is None
        assert "expert parallelism" in refused["dealt out"]
