"""A rank's environment is that of `accelerate launch`, up to a list that names every difference.

And what reaches it of the launcher's own, and what does not.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from launching import OBEDIENT, launch
from trlx_hybrid.errors import ConfigError
from trlx_hybrid_ray.launch import Job, accelerate_arguments, variables

from tests.support.fsdp import FSDP2_FILE

PROCESS = {
    # one run's, or one process's
    "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "PYTEST_CURRENT_TEST", "PWD", "OLDPWD", "SHLVL", "_",
    # the terminal's
    "COLUMNS", "LINES",
    # where torchrun wants a process to write its error, which here it says itself; and what torchrun itself listens to
    "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_SIGNALS_TO_HANDLE",
    # a rank on CPUs sees no GPU
    "CUDA_VISIBLE_DEVICES",
}  # fmt: skip
RAYS = ("RAY_", "TRLX_HYBRID_", "PET_", "PYTHONBREAKPOINT", "LD_LIBRARY_PATH", "PYTHONUNBUFFERED", "SPT_NOENV")


def compared(variables):
    return {n: v for n, v in variables.items() if n not in PROCESS and not n.startswith(RAYS)}


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "accelerate.yaml"
    path.write_text(json.dumps(FSDP2_FILE | {"mixed_precision": "bf16"}))
    return str(path)


def test_both_launchers_set_the_same(two_nodes, capfd, tmp_path, config, monkeypatch):
    monkeypatch.setenv("A_TOKEN", "secret")
    seen = {}
    for launcher in ("accelerate", "ray"):
        folder = tmp_path / launcher
        folder.mkdir()
        if launcher == "accelerate":
            command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", config]
            command += ["--main_process_port", "0", OBEDIENT, "look", str(folder)]
            done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=240)
            assert done.returncode == 0, done.stderr
        else:
            done = launch(capfd, tmp_path, OBEDIENT, "look", folder, processes_per_node=2, config_file=config)
            assert done.code == 0, done.err
        seen[launcher] = [json.loads((folder / f"seen.{rank}").read_text()) for rank in range(2)]
    for accelerate, ray in zip(seen["accelerate"], seen["ray"], strict=True):
        assert compared(ray["environment"]) == compared(accelerate["environment"])
        assert ray["environment"]["ACCELERATE_USE_FSDP"] == "true"
        assert ray["environment"]["FSDP_TRANSFORMER_CLS_TO_WRAP"] == "Qwen3DecoderLayer"
        assert ray["folder"] == accelerate["folder"]
        assert ray["main"] == accelerate["main"] == "__main__"


def job(**settings):
    return Job(**{"script": "s.py", "folder": "/", "processes_per_node": 4, "gpus": True, "nodes": 2} | settings)


def test_what_describes_this_machine_stays_here(monkeypatch):
    here = ("SSH_CONNECTION", "VLLM_HOST_IP", "POD_IP", "SLURM_PROCID", "PMI_SIZE", "CUDA_HOME", "RANK", "MASTER_PORT")
    for name in here:
        monkeypatch.setenv(name, "here")
    monkeypatch.setenv("WANDB_PROJECT", "rl")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth1")
    told = variables(job(), "run", 0)
    assert not {"PATH", "HOME", "RAY_ADDRESS", *here} & set(told)
    assert (told["WANDB_PROJECT"], told["NCCL_SOCKET_IFNAME"]) == ("rl", "eth1")
    assert "TRLX_HYBRID_RESUME" not in told
    assert variables(job(), "run", 1)["TRLX_HYBRID_RESUME"] == "1"
    assert [variables(job(), "run", start)["TRLX_HYBRID_LAUNCH"] for start in (0, 1)] == ["run", "run"]
    monkeypatch.setenv("TRLX_HYBRID_RESUME", "1")  # a launch that a scheduler has started again
    assert "TRLX_HYBRID_LAUNCH" not in variables(job(), "run", 1)


def test_what_the_launcher_was_told_reaches_no_other_node(two_nodes, capfd, tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_HOST_IP", "10.9.9.9")
    monkeypatch.setenv("WANDB_PROJECT", "rl")
    done = launch(capfd, tmp_path, OBEDIENT, "look", tmp_path, nodes=2)
    assert done.code == 0, done.err
    for rank in range(2):
        seen = json.loads((tmp_path / f"seen.{rank}").read_text())["environment"]
        assert "VLLM_HOST_IP" not in seen
        assert (seen["WANDB_PROJECT"], seen["CUDA_VISIBLE_DEVICES"]) == ("rl", "")


@pytest.mark.parametrize(
    ("settings", "several"),
    [
        ((), True),
        (("--use_fsdp", "--fsdp_version", "2"), False),
        (("--use_deepspeed",), False),
        (("--multi_gpu",), False),
    ],
)
def test_accelerate_is_told_that_there_are_several(monkeypatch, tmp_path, settings, several):
    monkeypatch.setattr("trlx_hybrid_ray.launch._default_config", lambda: None)
    config, arguments = accelerate_arguments(job(settings=settings))
    assert json.loads(config)["distributed_type"] == "NO"
    assert arguments[:4] == ("--num_machines", "2", "--num_processes", "8")
    assert arguments.count("--multi_gpu") == int(several or "--multi_gpu" in settings)
    assert arguments[len(arguments) - len(settings) :] == settings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("--mixed_precison", "bf16"), "unrecognized arguments: --mixed_precison"),
        (("--mixed_precision", "fp12"), "fp12"),
        (("--tpu",), "TPU"),
        (("--max_restarts", "3"), "--accelerate max_restarts: set by trlx-hybrid launch. Use --restart"),
        (("--num_machines", "3"), "--accelerate num_machines: set by trlx-hybrid launch. Use --nodes, or --placement."),
        (("--config_file", "x.yaml"), "--accelerate config_file: set by trlx-hybrid launch. Use --config_file."),
        (("--log_dir", "x"), "--accelerate log_dir: set by trlx-hybrid launch. Leave it out."),
        (("--num_processes", "3"), "--accelerate num_processes: set by trlx-hybrid launch. Use --gpus-per-node"),
        (("--machine_rank", "1"), "--accelerate machine_rank: set by trlx-hybrid launch. Leave it out."),
        (("--main_process_ip", "10.0.0.1"), "--accelerate main_process_ip: set by"),
        (("--main_process_port", "29500"), "--accelerate main_process_port: set by"),
        (("--rdzv_backend", "c10d"), "--accelerate rdzv_backend: set by"),
    ],
)
def test_settings_that_accelerate_refuses_are_refused_before_ray_starts(settings, message):
    with pytest.raises(ConfigError, match=message):
        accelerate_arguments(job(settings=settings))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("- a list", "accelerate.yaml is not a YAML mapping."),
        ("", "accelerate.yaml is not a YAML mapping."),
        ("distributed_type: XLA", "TPU"),
        ("[project]\nname = 1", r"accelerate.yaml is not valid YAML \(line 2: "),
    ],
)
def test_a_config_file_that_cannot_be_is_refused(tmp_path, config, message):
    (tmp_path / "accelerate.yaml").write_text(config)
    with pytest.raises(ConfigError, match=message):
        accelerate_arguments(job(config_file=str(tmp_path / "accelerate.yaml")))
