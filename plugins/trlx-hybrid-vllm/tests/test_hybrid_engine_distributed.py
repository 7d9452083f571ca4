"""HybridEngine under accelerate launch and under torchrun's variables: real processes, DDP over gloo."""

import contextlib
import json
import mmap
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from trlx_hybrid.testing.processes import free_port, start_ranks, wait_all
from trlx_hybrid_vllm.private import cpu as cpu_worker

SCRIPT = Path(__file__).parent / "scripts" / "loop_distributed.py"
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}


def launch(folder, launcher, *options):
    """The reports of two ranks, in rank order."""
    if launcher != "accelerate":
        return ended(folder, wait_all(started(folder, *options), 400))
    # With `--cpu` it would start one process whatever `--num_processes` says; with the GPU's launcher it is two.
    settings = "--multi_gpu --num_processes 2 --num_machines 1 --mixed_precision no --dynamo_backend no"
    command = [sys.executable, "-m", "accelerate.commands.launch", *settings.split()]
    command += ["--main_process_port", str(free_port()), str(SCRIPT), str(folder), *options]
    return ended(
        folder, [subprocess.run(command, capture_output=True, text=True, env=os.environ | ENVIRONMENT, timeout=400)]
    )


def started(folder, *options):
    folder.mkdir(exist_ok=True)
    return start_ranks(SCRIPT, folder, *options, count=2, environment=os.environ | ENVIRONMENT)


def ended(folder, ends):
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


def assert_equal_and_as_one(reports, single, path):
    """Both ranks end with the same weights, and their rows are, rank by rank, those that one process draws."""
    first, second = reports
    assert first["digests"] == second["digests"]
    assert len(set(first["digests"])) == 4
    assert all(report["closed"] == report["digests"][-1] for report in reports)
    assert max(first["gaps"] + second["gaps"]) < 1e-5
    assert [a + b for a, b in zip(first["drawn"], second["drawn"], strict=True)] == single["drawn"]
    assert {name for name, _ in first["syncs"] + second["syncs"]} == {path}
    assert {moved for _, moved in first["syncs"]} == {0}


def test_two_ranks_sample_train_and_stay_equal_and_experts_dealt_out_to_them_are_refused(tmp_path, single):
    reports = launch(tmp_path, "environment", "experts")
    assert_equal_and_as_one(reports, single, "alias")
    for report in reports:
        assert "weights='reshard' cannot serve this run: model.layers.0.mlp.experts" in report["refused"]
        assert "deals whole experts out to the ranks (expert parallelism)" in report["refused"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "options"),
    [
        ("accelerate", []),
        ("environment", ["raw"]),
    ],
    ids=["accelerate", "torch-alone"],
)
def test_two_ranks_sample_train_and_stay_equal_however_started(tmp_path, single, launcher, options):
    assert_equal_and_as_one(launch(tmp_path, launcher, *options), single, "alias")


@pytest.mark.slow
def test_tensor_parallel_jobs_of_one_machine_do_not_meet(tmp_path, single):
    """Both at once. Where their ranks share memory (vLLM does with AVX-512), it has lost its names."""
    folders = [tmp_path / name for name in ("one", "another")]
    jobs = [started(folder, "tp=2") for folder in folders]
    for folder, job in zip(folders, jobs, strict=True):
        reports = ended(folder, wait_all(job, 400))
        assert_equal_and_as_one(reports, single, "reshard")  # of replicas: every rank has what its slices need
        assert all(all(report["shared"]) for report in reports)


@pytest.mark.skipif(not cpu_worker.MAPS.exists(), reason="needs Linux")
def test_shared_memory_loses_its_name_and_nothing_else():
    identity = f"127.0.0.1-{os.getpid()}"
    mine, other = (f"/dev/shm/{name}-tp:0-[0-1]-cpushm_0" for name in (identity, f"{identity}1"))
    with contextlib.ExitStack() as kept:
        maps = []
        for path in (mine, other):
            with open(path, "x+b") as file:
                kept.callback(Path(path).unlink, missing_ok=True)
                file.truncate(4096)
                maps.append(kept.enter_context(mmap.mmap(file.fileno(), 4096)))
        cpu_worker.unlink_segments(identity)
        assert [Path(path).exists() for path in (mine, other)] == [False, True]
        maps[0][:5] = b"still"
        assert maps[0][:5] == b"still"
        cpu_worker.unlink_segments(identity)
