"""A rank's environment is that of `accelerate launch`, up to a list that names every difference."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from launching import OBEDIENT, launch
from trlx_hybrid.errors import ConfigError
from trlx_hybrid_ray.launch.job import Job
from trlx_hybrid_ray.launch.rank_environment import at_start, shared_environment

CONFIGS = {
    "fsdp": {
        "distributed_type": "FSDP",
        "mixed_precision": "bf16",
        "fsdp_config": {
            "fsdp_version": 2,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_transformer_layer_cls_to_wrap": "Qwen3DecoderLayer",
            "fsdp_reshard_after_forward": True,
            "fsdp_state_dict_type": "FULL_STATE_DICT",
            "fsdp_cpu_ram_efficient_loading": False,
        },
    },
}
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
RAYS = ("RAY_", "TRLX_HYBRID_", "PYTHONBREAKPOINT", "LD_LIBRARY_PATH", "PYTHONUNBUFFERED", "SPT_NOENV")


def compared(variables):
    return {n: v for n, v in variables.items() if n not in PROCESS and not n.startswith(RAYS)}


@pytest.fixture
def config(tmp_path):
    def write(name):
        given = {"compute_environment": "LOCAL_MACHINE", "use_cpu": True, "num_machines": 1, "machine_rank": 0}
        given |= {"num_processes": 2} | CONFIGS[name]
        (tmp_path / f"{name}.yaml").write_text(json.dumps(given))
        return str(tmp_path / f"{name}.yaml")

    return write


def test_both_launchers_set_the_same(two_nodes, capfd, tmp_path, config, monkeypatch):
    monkeypatch.setenv("A_TOKEN", "secret")
    seen = {}
    for launcher in ("accelerate", "ray"):
        folder = tmp_path / launcher
        folder.mkdir()
        if launcher == "accelerate":
            command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", config("fsdp")]
            command += ["--main_process_port", "0", OBEDIENT, "look", str(folder)]
            done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=60)
            assert done.returncode == 0, done.stderr
        else:
            done = launch(capfd, tmp_path, OBEDIENT, "look", folder, processes_per_node=2, config_file=config("fsdp"))
            assert done.code == 0, done.err
        seen[launcher] = [json.loads((folder / f"seen.{rank}").read_text()) for rank in range(2)]
    for accelerate, ray in zip(seen["accelerate"], seen["ray"], strict=True):
        assert compared(ray["environment"]) == compared(accelerate["environment"])
        assert ray["environment"]["ACCELERATE_USE_FSDP"] == "true"
        assert ray["environment"]["FSDP_TRANSFORMER_CLS_TO_WRAP"] == "Qwen3DecoderLayer"
        assert ray["folder"] == accelerate["folder"]
        assert ray["main"] == accelerate["main"] == "__main__"


def test_secrets_do_not_pass_through_rays_logs(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    job = Job(script="train.py", folder=str(tmp_path), processes_per_node=1, gpus=False)
    shared = shared_environment(job)
    assert shared["HF_TOKEN"] == "secret"
    started = at_start(shared, job)
    assert "HF_TOKEN" not in started
    assert started["OMP_NUM_THREADS"] == "1"


@pytest.mark.parametrize(
    ("given", "debug", "told"), [(None, True, "1"), ("legacy", True, "legacy"), (None, False, None)]
)
def test_one_of_rays_debuggers_is_chosen(monkeypatch, tmp_path, given, debug, told):
    monkeypatch.delenv("RAY_DEBUG", raising=False)
    if given is not None:
        monkeypatch.setenv("RAY_DEBUG", given)
    job = Job(script="train.py", folder=str(tmp_path), processes_per_node=1, gpus=False, debug=debug)
    started = at_start({}, job)
    assert started.get("RAY_DEBUG") == told
    assert started.get("RAY_DEBUG_POST_MORTEM") == ("1" if debug else None)


def test_what_describes_this_machine_stays_here(monkeypatch, tmp_path):
    monkeypatch.setenv("SSH_CONNECTION", "here")
    monkeypatch.setenv("WANDB_PROJECT", "rl")
    shared = shared_environment(Job(script="s.py", folder=str(tmp_path), processes_per_node=2, gpus=True, nodes=2))
    assert not {"PATH", "HOME", "SSH_CONNECTION", "MASTER_PORT", "RAY_ADDRESS"} & set(shared)
    assert shared["WANDB_PROJECT"] == "rl"
    assert shared["ACCELERATE_MIXED_PRECISION"] == "no"


@pytest.mark.parametrize(
    ("settings", "name", "value"),
    [
        (("--mixed_precision", "bf16"), "ACCELERATE_MIXED_PRECISION", "bf16"),
        (("--use_fsdp", "--fsdp_version", "2"), "FSDP_VERSION", "2"),
        (("--use_deepspeed", "--zero_stage", "3"), "ACCELERATE_DEEPSPEED_ZERO_STAGE", "3"),
        (("--dynamo_backend", "inductor"), "ACCELERATE_DYNAMO_BACKEND", "INDUCTOR"),
    ],
)
def test_settings_of_accelerate_reach_the_ranks(tmp_path, settings, name, value):
    job = Job(script="s.py", folder=str(tmp_path), processes_per_node=4, nodes=2, gpus=True, settings=settings)
    assert shared_environment(job)[name] == value


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("--mixed_precison", "bf16"), "unrecognized arguments: --mixed_precison"),
        (("--mixed_precision", "fp12"), "fp12"),
        (("--tpu",), "TPU"),
        (("--use_fsdp", "--use_deepspeed"), "at a time"),
    ],
)
def test_settings_that_accelerate_refuses_are_refused_before_ray_starts(tmp_path, settings, message):
    with pytest.raises(ConfigError, match=message):
        shared_environment(Job(script="s.py", folder=str(tmp_path), processes_per_node=1, gpus=True, settings=settings))
