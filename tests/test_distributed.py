"""Several real processes under accelerate, over gloo: sampling and training do not depend on how many there are."""

import json
import os
from pathlib import Path

import pytest
from trlx_hybrid import GRPOTrainer
from trlx_hybrid.testing.processes import Script, rank_reports, start_ranks, wait_all

SCRIPT = Path(__file__).parent / "scripts" / "grpo_distributed.py"
FSDP2 = {
    "fsdp_version": 2,
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_transformer_layer_cls_to_wrap": "Qwen3DecoderLayer",
    "fsdp_reshard_after_forward": True,
    "fsdp_state_dict_type": "FULL_STATE_DICT",
    "fsdp_offload_params": False,
    "fsdp_cpu_ram_efficient_loading": False,
}


def launch(folder, processes, *options):
    """Run the script on `processes` ranks; the reports of all of them, in rank order."""
    folder.mkdir()
    environment = os.environ | {"ACCELERATE_USE_CPU": "true"}
    if "fsdp" in options:
        environment |= {"ACCELERATE_USE_FSDP": "true"} | {key.upper(): str(value) for key, value in FSDP2.items()}
    if processes > 1:
        return rank_reports(SCRIPT, folder, *options, count=processes, environment=environment)
    alone = Script(SCRIPT, folder, *options, environment=environment).wait(400)  # without torchrun's variables
    assert alone.returncode == 0, alone.stderr[-4000:]
    return [json.loads((folder / "rank0.json").read_text())]


def rows(reports, run=0, batch=8):
    """What all ranks saw, in global order: each step's rows lie rank by rank."""
    share = batch // len(reports)
    steps = len(reports[0]["runs"][run]["seen"]) // share
    return [
        row
        for step in range(steps)
        for report in reports
        for row in report["runs"][run]["seen"][step * share : (step + 1) * share]
    ]


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    return launch(tmp_path_factory.mktemp("single") / "out", 1, "save")


def assert_same_training(reports, single):
    assert rows(reports) == rows(single)
    for key in ("loss", "grad_norm"):
        assert reports[0]["runs"][0][key] == pytest.approx(single[0]["runs"][0][key], abs=1e-5, rel=1e-5)
    assert max(gap for report in reports for gap in report["runs"][0]["gap"]) < 1e-5
    for report in reports:  # each counts the tokens of all, and what its own rows were padded to
        assert report["runs"][0]["tokens"] == single[0]["runs"][0]["tokens"]
        assert report["runs"][0]["padded_tokens"] == reports[0]["runs"][0]["padded_tokens"]


@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ddp_samples_and_trains_what_one_process_does(tmp_path, single, processes):
    reports = launch(tmp_path / "out", processes)
    assert reports[0]["distributed_type"] == "DistributedType.MULTI_CPU"
    assert_same_training(reports, single)


def test_an_evaluation_before_the_training_leaves_ddp_out_of_nothing(tmp_path, single):
    assert_same_training(launch(tmp_path / "out", 2, "evaluate"), single)


def test_fsdp2_samples_and_trains_what_one_process_does(tmp_path, single):
    reports = launch(tmp_path / "out", 2, "fsdp")
    assert reports[0]["distributed_type"] == "DistributedType.FSDP"
    assert all(report["sharded"] for report in reports)
    assert_same_training(reports, single)


HELD = "FSDP: asked for (ACCELERATE_USE_FSDP), and the model is not sharded: "


def test_a_header_says_that_fsdp_was_asked_for_and_nothing_is_sharded(tmp_path):
    """On CPUs accelerate trains with DDP then, and says nothing; where it shards, there is nothing to say."""
    for real in (False, True):
        (folder := tmp_path / str(real)).mkdir()
        environment = os.environ | {"ACCELERATE_USE_CPU": "true", "ACCELERATE_USE_FSDP": "true"}
        environment |= {key.upper(): str(value) for key, value in FSDP2.items()}
        scripts = start_ranks(SCRIPT, folder, *["fsdp"] * real, "steps=1", count=2, environment=environment)
        first, second = wait_all(scripts, 300)
        assert first.returncode == second.returncode == 0, first.stderr[-3000:]
        assert (f"{HELD}each rank holds all of it. accelerate makes DDP" in first.stderr) != real
        assert HELD not in second.stderr
        assert json.loads((folder / "rank0.json").read_text())["sharded"] == real


def test_a_single_process_that_asks_for_fsdp_is_told_that_it_is_one(run, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    header = run(GRPOTrainer, max_steps=1).trainer.session.header_lines
    assert f"{HELD}this is the only process. Start several processes with" in "\n".join(header)


def test_a_process_that_was_not_connected_with_the_others_is_told_that_it_trains_by_itself(run, monkeypatch):
    """As where a script on CPUs makes a trainer without use_cpu, and its processes train a model each."""

    class Alone(GRPOTrainer):
        def create_accelerator_and_postprocess(self):
            super().create_accelerator_and_postprocess()
            monkeypatch.setenv("WORLD_SIZE", "2")

    found = run(Alone, max_steps=1).trainer.session.header_lines
    monkeypatch.delenv("WORLD_SIZE")
    (said,) = [line for line in found if line.startswith("processes: ")]
    assert "2 were started (WORLD_SIZE), and this one trains by itself. On CPUs, use_cpu=True is needed" in said
    others = run(GRPOTrainer, max_steps=1).trainer.session.header_lines
    assert not any(line.startswith("processes: ") for line in others)


def test_a_resumed_run_samples_what_the_uninterrupted_one_did(tmp_path, single):
    checkpoint = next(Path(p) for p in [single[0]["folder"]]) / "run0" / "checkpoint-2"
    resumed = launch(tmp_path / "out", 1, f"resume={checkpoint}")
    assert rows(resumed) == rows(single)[16:]
    assert resumed[0]["runs"][0]["version"] == single[0]["runs"][0]["version"]


@pytest.mark.slow
def test_two_trainers_one_after_another_under_ddp(tmp_path, single):
    reports = launch(tmp_path / "out", 2, "trainers=2")
    assert rows(reports, 0) == rows(reports, 1) == rows(single)


@pytest.mark.slow
def test_lora_under_fsdp2(tmp_path):
    one = launch(tmp_path / "one", 1, "lora")
    two = launch(tmp_path / "two", 2, "lora", "fsdp")
    assert_same_training(two, one)


def test_tensor_parallel_ranks_agree_with_one_process(tmp_path, single):
    reports = launch(tmp_path / "out", 2, "tp=2")
    assert_same_training(reports, single)
