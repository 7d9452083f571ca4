"""Several real processes under accelerate, over gloo: sampling and training do not depend on how many there are."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

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


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def launch(folder, processes, *options):
    """Run the script on `processes` ranks; the reports of all of them, in rank order."""
    folder.mkdir()
    config = {"compute_environment": "LOCAL_MACHINE", "use_cpu": True, "mixed_precision": "no", "num_machines": 1}
    config |= {"num_processes": processes, "machine_rank": 0, "main_process_port": free_port()}
    config |= {"distributed_type": "FSDP", "fsdp_config": FSDP2} if "fsdp" in options else {}
    config.setdefault("distributed_type", "MULTI_CPU" if processes > 1 else "NO")
    (folder / "accelerate.yaml").write_text(json.dumps(config))
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(folder / "accelerate.yaml")]
    if processes > 1:
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(processes)]
        command += ["--master_port", str(config["main_process_port"])]
    port = str(config["main_process_port"])  # a single process would listen on 29500, as any other job may
    environment = dict(os.environ, OMP_NUM_THREADS="1", ACCELERATE_USE_CPU="true", MASTER_PORT=port)
    if "fsdp" in options:
        environment |= {"ACCELERATE_USE_FSDP": "true"} | {key.upper(): str(value) for key, value in FSDP2.items()}
    done = subprocess.run(
        [*command, str(SCRIPT), str(folder), *options], capture_output=True, text=True, env=environment, timeout=240
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(processes)]


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


@pytest.mark.parametrize("processes", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_ddp_samples_and_trains_what_one_process_does(tmp_path, single, processes):
    reports = launch(tmp_path / "out", processes)
    assert reports[0]["distributed_type"] == "DistributedType.MULTI_CPU"
    assert_same_training(reports, single)


def test_fsdp2_samples_and_trains_what_one_process_does(tmp_path, single):
    reports = launch(tmp_path / "out", 2, "fsdp")
    assert reports[0]["distributed_type"] == "DistributedType.FSDP"
    assert all(report["sharded"] for report in reports)
    assert_same_training(reports, single)


def test_a_resumed_run_samples_what_the_uninterrupted_one_did(tmp_path, single):
    checkpoint = next(Path(p) for p in [single[0]["folder"]]) / "run0" / "checkpoint-2"
    resumed = launch(tmp_path / "out", 1, f"resume={checkpoint}")
    assert rows(resumed) == rows(single)[16:]
    assert resumed[0]["runs"][0]["version"] == single[0]["runs"][0]["version"]


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
