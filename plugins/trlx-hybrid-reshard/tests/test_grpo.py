"""GRPO with real FSDP2 and a real vLLM over two ranks: each sync writes all of the engine, at the floor of bytes."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from ranks import reports

RUNS = ["float32", "bfloat16, tied, asleep in between", "adapters", "experts, asleep in between"]


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    return reports("grpo.py", tmp_path_factory.mktemp("grpo"), 2)


@pytest.mark.parametrize("run", range(len(RUNS)), ids=RUNS)
def test_every_sync_brings_the_policy_into_tensor_parallel_slices(seen, run):
    for rank, report in enumerate(seen):
        trained = report[run]
        assert trained["distributed_type"] == "DistributedType.FSDP"
        assert trained["sharded"]
        assert len(trained["syncs"]) == 3
        assert run == 2 or "not copy: " in trained["why"]  # `auto` came here by itself
        for sync in trained["syncs"]:
            assert sync["weights"] == "reshard"
            assert sync["differing"] == sync["unwritten"] == []
            assert sync["bytes"] == sync["floor"] > 0
            assert sync["gap"] < (0.1 if run == 1 else 1e-5), (rank, sync)


def test_frozen_weights_move_again_only_where_sleep_discarded_them(seen):
    for report in seen:
        awake, asleep, adapted, _ = ([sync["tensors"] for sync in run["syncs"]] for run in report)
        assert awake == [awake[0], awake[0] - 3, awake[0] - 3]  # gate, up and down of the frozen layer
        assert asleep == [awake[0] - 1] * 3  # its head is tied
        assert adapted == [awake[0], 8, 8]  # four adapted weights in each of two layers
