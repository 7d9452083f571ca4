"""Whole user scripts on two GPUs, under every launcher."""

import json
import sys
from pathlib import Path

import pytest
import whole_run
from cases import BASE, IN_FLIGHT, STEPS, Case, flags
from whole_run import SCRIPTS

GPUS = 2
LIMIT = 480
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
BIN = Path(sys.executable).parent
CASES = [
    Case("bf16", sleep=True, graphs=False, tp=2, sharding="fsdp2"),
    Case("fp32", sleep=False, graphs=True, tp=2, sharding="fsdp2"),
    Case("lora", sleep=True, graphs=False, tp=2, sharding="fsdp2"),
    Case("bf16", sleep=False, graphs=True, tp=1, sharding="fsdp2", ragged=True),
    Case("fp32", sleep=True, graphs=False, tp=1, sharding="fsdp2"),
    Case("bf16", sleep=True, graphs=True, tp=2, sharding="ddp", ragged=True),
    Case("lora", sleep=False, graphs=True, tp=1, sharding="ddp"),
    Case("fp32", sleep=True, graphs=False, tp=1, sharding="ddp"),
    Case("bf16", sleep=True, graphs=False, tp=1, pp=2, sharding="fsdp2"),
]
FSDP2 = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
    "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
}
SHARDED = Case("bf16", sleep=True, graphs=False, tp=2, sharding="fsdp2")

pytestmark = pytest.mark.usefixtures("gpus")


def torchrun(script, settings, model, out):
    return [sys.executable, *TORCHRUN, SCRIPTS / script, *flags(settings, model, out)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_plain_script_trains_to_its_end(case, model, whole, seen, tmp_path):
    variables = FSDP2 if case.sharding == "fsdp2" else {}
    whole_run.check_case(case, TORCHRUN, model("plain"), tmp_path, whole, seen, LIMIT, environment=variables)


@pytest.mark.parametrize("weights", ["bf16", "lora"])
def test_a_mixture_of_experts(weights, model, whole, seen, tmp_path):
    case = Case(weights, sleep=True, graphs=False, tp=2, sharding="fsdp2")
    whole_run.check_experts(case, {}, TORCHRUN, model("experts"), whole, seen, tmp_path, LIMIT, environment=FSDP2)


@pytest.mark.parametrize("weights", ["bf16", "lora"])
def test_pictures(weights, model, whole, seen, tmp_path):
    case = Case(weights, sleep=True, graphs=False, tp=2, sharding="fsdp2")
    whole_run.check_pictures(case, {}, model, whole, seen, tmp_path, LIMIT, launcher=TORCHRUN, environment=FSDP2)


@pytest.mark.parametrize(("stage", "weights"), [(3, "bf16"), (3, "lora"), (2, "fp32")], ids=lambda value: str(value))
def test_deepspeed(stage, weights, model, whole, seen, tmp_path):
    settings = Case(weights, sleep=True, graphs=False, tp=2 if stage == 3 else 1).settings()
    command = [sys.executable, *TORCHRUN, SCRIPTS / "grpo.py"]
    whole_run.check_deepspeed(stage, settings, command, model("plain"), whole, seen, tmp_path, LIMIT)


@pytest.mark.parametrize("launcher", ["accelerate", "trlx-hybrid"])
def test_another_launcher(launcher, model, whole, tmp_path):
    starts = {
        "accelerate": [sys.executable, "-m", "accelerate.commands.launch"],
        "trlx-hybrid": [sys.executable, "-m", "trlx_hybrid", "launch", "--gpus-per-node", "2"],
    }
    launch = [*starts[launcher], "--config_file", SCRIPTS / "fsdp2.yaml"]
    command = [*launch, SCRIPTS / "grpo.py", *flags(SHARDED.settings(), model("plain"), tmp_path / "run")]
    ended = whole(command, LIMIT)
    whole_run.check_training(whole_run.history(tmp_path / "run"), STEPS)
    whole_run.check_proofs(ended, "reshard")


def test_the_best_model_is_loaded_at_the_end(model, whole, tmp_path):
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_reward", "save_total_limit": 2}
    command = torchrun("grpo.py", SHARDED.settings() | best, model("plain"), tmp_path / "run")
    whole(command, LIMIT, environment=FSDP2)
    whole_run.check_training(whole_run.history(tmp_path / "run"), STEPS)


@pytest.mark.parametrize("sharding", ["ddp", "fsdp2"])
def test_two_adapters_with_a_reference(sharding, model, whole, tmp_path):
    command, variables = [sys.executable, *TORCHRUN, SCRIPTS / "adapters.py"], FSDP2 if sharding == "fsdp2" else {}
    given = {"vllm_tensor_parallel_size": 2}
    whole_run.check_adapters(command, given, model("plain"), whole, tmp_path, LIMIT, environment=variables)


def apart(changes, model, whole, folder):
    """Train on one GPU, with the engine on the other; returns the log's history."""
    options = {"replicas": 1, "server_options": {"enforce_eager": True}}
    settings = BASE | {"dtype": "bfloat16", "bf16": True, "engine": "remote", "engine_options": json.dumps(options)}
    launcher = [sys.executable, "-m", "trlx_hybrid", "launch", "--gpus-per-node", "1"]
    whole([*launcher, SCRIPTS / "grpo.py", *flags(settings | changes, model("plain"), folder / "run")], LIMIT)
    logs = whole_run.history(folder / "run")
    whole_run.check_training(logs, STEPS)
    return logs


def test_an_engine_of_its_own_that_samples_while_the_other_gpu_trains(model, whole, tmp_path):
    logs = apart(IN_FLIGHT, model, whole, tmp_path)
    assert any("sampling/stale_logp_difference" in log for log in logs)


@pytest.mark.parametrize("part", [{}, {"top_k": 20, "top_p": 0.9}], ids=["all-ids", "part-of-the-ids"])
def test_an_engine_of_its_own(part, model, whole, tmp_path):
    """With truncated sampling it names the ids that it kept."""
    logs = apart({"generation_kwargs": json.dumps({"ignore_eos": True})} | part, model, whole, tmp_path)
    whole_run.check_gap(logs)
    if part:
        losses = [log for log in logs if "loss" in log]
        assert all(log["ratio/truncation"] < 0 for log in losses)
        ratios = [log["sampling/importance_sampling_ratio/mean"] for log in losses]
        assert ratios == pytest.approx([1.0] * STEPS, abs=0.1)


def test_a_failing_reward_on_one_rank_ends_the_run(model, whole, tmp_path):
    """While the other rank waits for it."""
    command = torchrun("fails.py", SHARDED.settings(), model("plain"), tmp_path / "run")
    whole(command, LIMIT, check=whole_run.check_fails, environment=FSDP2)
