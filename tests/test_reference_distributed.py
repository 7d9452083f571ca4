"""The reference of `beta > 0` on several ranks: adapters train there as they do on one, and resume."""

import functools
from pathlib import Path

import pytest
import torch
from trlx_hybrid.testing.processes import rank_reports

SCRIPT = Path(__file__).parent / "scripts" / "reference_distributed.py"
# FSDP with momentum: torch 2.13 cannot load the state of an optimizer that has none. DDP without: on a CPU transformers
# 5.17 cannot load the state of one that has some.
WAYS = {"ddp": (0,), "fsdp": (0.5, "fsdp", "FULL_STATE_DICT"), "in shards": (0.5, "fsdp", "SHARDED_STATE_DICT")}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Returns the folder of a run on one rank, with a momentum."""

    @functools.cache
    def run(momentum):
        folder = tmp_path_factory.mktemp("alone")
        rank_reports(SCRIPT, folder, momentum, count=1)
        return folder

    return run


@pytest.mark.parametrize("way", WAYS)
def test_two_adapters_train_on_two_ranks_as_on_one_and_resume(tmp_path, alone, way):
    names = ["first", "second"]
    for report in rank_reports(SCRIPT, tmp_path, *WAYS[way], count=2):
        assert report["active"] == report["moved"] == names
        assert abs(report["kl"][0]) < 1e-6 < report["kl"][1]
        assert report["resumed_kl"][-1] == report["kl"][2]
        assert report["differing"] == []
    one, two = (torch.load(folder / "adapters.pt") for folder in (alone(WAYS[way][0]), tmp_path))
    assert one.keys() == two.keys()
    assert max(float((one[name] - two[name]).abs().max()) for name in one) < 1e-6
