"""Packed rows and LoRA layers in two processes, sharded or not, over gloo."""

from pathlib import Path

import pytest
from trlx_hybrid.testing.processes import rank_reports

from tests.support.fsdp import FSDP2

SCRIPT = Path(__file__).parent / "scripts" / "scoring_distributed.py"


@pytest.mark.parametrize("options", [["fsdp"], ["fsdp", "lora"], []], ids=["FSDP2", "FSDP2 and adapters", "DDP"])
def test_packed_is_what_padded_is_in_two_processes(tmp_path, options):
    environment = FSDP2 if "fsdp" in options else {"ACCELERATE_USE_CPU": "true"}
    reports = rank_reports(SCRIPT, tmp_path, *options, count=2, environment=environment)
    layers = "; LoRA layers: 14 of 14 compute in fewer passes" if "lora" in options else ""
    for padded, packed in reports:
        assert packed["note"] == f"scoring: rows are packed, shared prompts once, attention by sdpa, row by row{layers}"
        assert packed["why"] is None
        assert packed["sharded"] == ("fsdp" in options)
        assert len(packed["logs"]) == len(padded["logs"]) == 3
    held_equal(*reports[0])


def test_sharded_ranks_recompute_as_many_layers_as_the_one_with_the_least_memory(tmp_path):
    """Or one would wait for the gathering of a layer that the other does not recompute."""
    reports = rank_reports(SCRIPT, tmp_path, "fsdp", "adaptive", count=2, environment=FSDP2)
    assert [packed["recomputed"] for _, packed in reports] == [2, 2]
    held_equal(*reports[0])


@pytest.mark.parametrize("options", [["fsdp"], ["fsdp", "lora"], []], ids=["FSDP2", "FSDP2 and adapters", "DDP"])
def test_tiles_and_host_memory_change_nothing_in_two_processes(tmp_path, options):
    """Gradients are reduced once, and sharded weights are there when tiles are computed again."""
    environment = FSDP2 if "fsdp" in options else {"ACCELERATE_USE_CPU": "true"}
    reports = rank_reports(SCRIPT, tmp_path, "long", *options, count=2, environment=environment)
    for padded, packed in reports:
        assert packed["in_host_memory"] > padded["in_host_memory"] == 0
        assert packed["sharded"] == ("fsdp" in options)
    held_equal(*reports[0])


@pytest.mark.parametrize("options", [["fsdp"], []], ids=["FSDP2", "DDP"])
def test_lora_layers_that_drop_are_pefts_in_two_processes(tmp_path, options):
    environment = FSDP2 if "fsdp" in options else {"ACCELERATE_USE_CPU": "true"}
    reports = rank_reports(SCRIPT, tmp_path, "lora", "layers", *options, count=2, environment=environment)
    for peft, here in reports:
        assert (peft["layers"], here["layers"]) == (0, 14)
        assert here["sharded"] == ("fsdp" in options)
        assert len(here["logs"]) == len(peft["logs"]) == 3
    held_equal(*reports[0])


def held_equal(stock, ours):
    for mine, theirs in zip(ours["logs"], stock["logs"], strict=True):
        assert mine == pytest.approx(theirs, abs=1e-5, rel=1e-5)
