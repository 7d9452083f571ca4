"""HybridEngine under accelerate launch and under torchrun's variables: real processes, DDP over gloo."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from trlx_hybrid.testing.processes import free_port, start_ranks, wait_all

SCRIPT = Path(__file__).parent / "scripts" / "loop_distributed.py"


def launch(folder, launcher, *options):
    """The reports of two ranks, in rank order."""
    folder.mkdir()
    environment = os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    if launcher == "accelerate":
        # With `--cpu` it would start one process whatever `--num_processes` says; with the GPU's launcher it is two.
        settings = "--multi_gpu --num_processes 2 --num_machines 1 --mixed_precision no --dynamo_backend no"
        command = [sys.executable, "-m", "accelerate.commands.launch", *settings.split()]
        command += ["--main_process_port", str(free_port()), str(SCRIPT), str(folder), *options]
        ends = [subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240)]
    else:
        ends = wait_all(start_ranks(SCRIPT, folder, *options, count=2, environment=environment), 240)
    log = "".join(end.stderr for end in ends)
    assert not any(end.returncode for end in ends), log[-4000:]
    assert log.count("trlx_hybrid 0.1.0 · plugins:") == 1  # rank 0 alone
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """The same loop in one process: this one."""
    folder = tmp_path_factory.mktemp("single")
    runpy.run_path(str(SCRIPT))["main"](folder, {})
    report = json.loads((folder / "rank0.json").read_text())
    assert len(set(report["digests"])) == 4
    return report


@pytest.mark.parametrize(
    ("launcher", "options"),
    [
        ("environment", []),
        pytest.param("accelerate", [], marks=pytest.mark.slow),
        pytest.param("environment", ["raw"], marks=pytest.mark.slow),
        ("environment", ["tp=2"]),
    ],
    ids=["torchrun", "accelerate", "torch-alone", "tensor-parallel"],
)
def test_two_ranks_sample_train_and_stay_equal(tmp_path, single, launcher, options):
    first, second = launch(tmp_path / "out", launcher, *options)
    assert first["digests"] == second["digests"]
    assert len(set(first["digests"])) == 4
    assert all(report["closed"] == report["digests"][-1] for report in (first, second))
    assert max(first["gaps"] + second["gaps"]) < 1e-5
    # Rank by rank, the rows are those that one process draws.
    assert [a + b for a, b in zip(first["drawn"], second["drawn"], strict=True)] == single["drawn"]
    path = "reshard" if "tp=2" in options else "alias"  # of replicas: every rank has what its slices need
    assert {name for name, _ in first["syncs"] + second["syncs"]} == {path}
    assert {moved for _, moved in first["syncs"]} == {0}
