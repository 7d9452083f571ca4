"""Whole user scripts on one GPU, in combinations that cover every pair of settings."""

import json
import sys

import pytest
import whole_run
import yaml
from cases import BASE, IN_FLIGHT, PACKED, SHOWN, STEPS, Case, flags
from whole_run import SCRIPTS

GPUS = 1
LIMIT = 420
CASES = [
    Case("bf16", sleep=True, graphs=True, ragged=True, offload="auto"),
    Case("bf16", sleep=False, graphs=False, ragged=False, offload="none"),
    Case("bf16", sleep=True, graphs=False, ragged=True, offload="all"),
    Case("fp32", sleep=True, graphs=False, ragged=False, offload="all"),
    Case("fp32", sleep=False, graphs=True, ragged=True, offload="auto"),
    Case("fp32", sleep=True, graphs=True, ragged=False, offload="none"),
    Case("lora", sleep=True, graphs=True, ragged=False, offload="all"),
    Case("lora", sleep=False, graphs=False, ragged=True, offload="auto"),
    Case("lora", sleep=True, graphs=False, ragged=True, offload="none"),
    Case("merged", sleep=True, graphs=True, ragged=False, offload="all"),
    Case("merged", sleep=False, graphs=False, ragged=True, offload="none"),
]
SMALL = BASE | {"dtype": "bfloat16", "bf16": True, "engine_options": json.dumps({"enforce_eager": True})}

pytestmark = pytest.mark.usefixtures("gpus")


def python(script, settings, model, out):
    return [sys.executable, SCRIPTS / script, *flags(settings, model, out)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_plain_script_trains_to_its_end(case, model, whole, seen, tmp_path):
    whole_run.check_case(case, [], model("plain"), tmp_path, whole, seen, LIMIT)


@pytest.mark.parametrize("sleep", [True, False], ids=["sleep", "awake"])
def test_tools(sleep, model, whole, tmp_path):
    settings = SMALL | {"vllm_enable_sleep_mode": sleep, "max_completion_length": 400, "vllm_max_model_length": 2048}
    whole(python("tools.py", settings, model("caller"), tmp_path / "run"), LIMIT)
    logs = whole_run.history(tmp_path / "run")
    whole_run.check_training(logs, STEPS)
    assert max(log.get("tools/call_frequency", 0.0) for log in logs) > 0


def test_an_environment(model, whole, tmp_path):
    settings = SMALL | {"vllm_enable_sleep_mode": True, "max_completion_length": 200, "vllm_max_model_length": 512}
    settings |= {"rollout": "multi_turn"}
    whole(python("game.py", settings, model("plain"), tmp_path / "run"), LIMIT)
    whole_run.check_training(whole_run.history(tmp_path / "run"), STEPS)


def test_a_killed_run_resumes(model, whole, tmp_path):
    settings = SMALL | {"vllm_enable_sleep_mode": True}
    command = python("grpo.py", settings, model("plain"), tmp_path / "run")
    killed = whole_run.run(command, LIMIT, kill_at="'epoch': '0.1562'")
    assert killed.returncode == -9, killed.output[-4000:]
    assert not (tmp_path / "run" / f"checkpoint-{STEPS}").exists()
    whole([*command, "--resume_from_checkpoint", tmp_path / "run" / "checkpoint-3"], LIMIT)
    whole(python("grpo.py", settings, model("plain"), tmp_path / "whole"), LIMIT)
    assert whole_run.history(tmp_path / "run") == whole_run.history(tmp_path / "whole")


def test_a_recording_replays_here_to_the_bit_and_on_a_cpu(model, whole, tmp_path):
    settings = SMALL | {"dtype": "float32", "bf16": False}
    arms = {"recorded": {"record": tmp_path / "it"}, "here": {"replay": tmp_path / "it"}}
    arms["on a CPU"] = arms["here"] | {"use_cpu": True}
    for name, given in arms.items():
        whole(python("grpo.py", settings | given, model("plain"), tmp_path / name), LIMIT)
    recorded, here, elsewhere = (whole_run.history(tmp_path / name) for name in arms)
    assert here == recorded
    assert [log.get("reward") for log in elsewhere] == [log.get("reward") for log in recorded]
    assert elsewhere[0]["grad_norm"] == pytest.approx(recorded[0]["grad_norm"], rel=1e-3)
    assert elsewhere[0]["entropy"] == pytest.approx(recorded[0]["entropy"], abs=1e-4)


def test_two_trainers_in_one_process(model, whole, tmp_path):
    whole(python("two_trainers.py", SMALL | {"vllm_enable_sleep_mode": True}, model("plain"), tmp_path), LIMIT)
    whole_run.check_training(whole_run.history(tmp_path / "second"), STEPS)
    whole_run.check_training(whole_run.history(tmp_path / "first"), 6)


def test_two_trainers_that_compile_in_one_process(model, whole, tmp_path):
    case = Case("bf16", sleep=True, graphs=True)
    command = python("two_trainers.py", case.settings(), model("plain"), tmp_path)
    whole(command, LIMIT, environment=case.environment(tmp_path))  # which has compiled nothing yet
    whole_run.check_training(whole_run.history(tmp_path / "second"), STEPS)


@pytest.mark.parametrize("sleep", ["sleep", "awake"])
def test_a_loop_without_a_trainer(sleep, model, whole):
    ended = whole([sys.executable, SCRIPTS / "loop.py", model("plain"), sleep], LIMIT)
    assert ended.output.count("'loss'") == 7


@pytest.mark.parametrize("how", ["sleep-graphs", "awake-graphs", "sleep-eager"])
def test_rollouts_repeat(how, model, whole, tmp_path):
    """In one engine, and in the next one, which finds what the first has compiled."""
    sleep, kind = how.split("-")
    command = [sys.executable, SCRIPTS / "repeats.py", model("plain"), sleep, kind, "100"]
    variables = Case("bf16", sleep=True, graphs=kind == "graphs").environment(tmp_path)
    whole_run.check_repeats([whole(command, LIMIT, environment=variables) for _ in range(2)])


@pytest.mark.parametrize("replay", [False, True], ids=["own-routes", "router_replay"])
@pytest.mark.parametrize("weights", ["bf16", "lora"])
def test_a_mixture_of_experts(weights, replay, model, whole, seen, tmp_path):
    case = Case(weights, sleep=True, graphs=False)
    whole_run.check_experts(case, {"router_replay": replay}, [], model("experts"), whole, seen, tmp_path, LIMIT)


@pytest.mark.parametrize("weights", ["bf16", "lora"])
def test_pictures(weights, model, whole, seen, tmp_path):
    whole_run.check_pictures(Case(weights, sleep=True, graphs=False), {}, model, whole, seen, tmp_path, LIMIT)


@pytest.mark.parametrize("weights", ["bf16", "lora"])
def test_pictures_for_qwen2_5_vl(weights, model, whole, seen, tmp_path):
    case = Case(weights, sleep=True, graphs=False)
    whole_run.check_pictures(case, {}, model, whole, seen, tmp_path, LIMIT, name="older_pictures")


def test_an_environment_that_shows_pictures(model, whole, seen, tmp_path):
    whole_run.check_pictures(Case("bf16", sleep=True, graphs=False), SHOWN, model, whole, seen, tmp_path, LIMIT)


@pytest.mark.parametrize("sleep", [True, False], ids=["sleep", "awake"])
def test_a_base_in_4_bits(sleep, model, whole, seen, tmp_path):
    case = Case("lora", sleep=sleep, graphs=True, ragged=True, offload="all" if sleep else "none")
    whole_run.check_4_bits(case, {}, model("plain"), whole, seen, tmp_path, LIMIT)


def test_a_base_of_7b_in_4_bits_within_24_gib(model, whole, seen, tmp_path):
    """With the settings of the recipe that says so; another process holds the rest of the GPU."""
    recipe = yaml.safe_load((SCRIPTS.parents[2] / "examples" / "recipes" / "math-7b-24gb.yaml").read_text())
    task = {"model_name_or_path", "dataset_name", "dataset_config", "prepare", "reward_funcs", "engine", "output_dir"}
    settings = BASE | {key: value for key, value in recipe.items() if key not in task}
    settings |= {"max_steps": 4, "save_steps": 3, "per_device_eval_batch_size": 64, "bf16": True}
    for key in ("vllm_gpu_memory_utilization", "verify_every", "attn_implementation"):
        del settings[key]  # the defaults are the recipe's
    with whole_run.held_back(24):
        ended = whole(python("grpo.py", settings, model("seven"), tmp_path / "run"), 2 * LIMIT)
    logs = whole_run.history(tmp_path / "run")
    whole_run.check_training(logs, 4)
    assert {path for path, _, _ in ended.proofs()} == {"lora"}
    seen["gap"] = whole_run.check_gap(logs)


def trained_with(changes, weights, model, whole, tmp_path):
    """How a script ended that trains with further settings, and its log, both checked."""
    case = Case(weights, sleep=True, graphs=True, ragged=True)
    ended = whole(python("grpo.py", case.settings() | changes, model("plain"), tmp_path / "run"), LIMIT)
    logs = whole_run.history(tmp_path / "run")
    whole_run.check_training(logs, STEPS)
    whole_run.check_proofs(ended, case.path)
    return ended, logs


@pytest.mark.parametrize("weights", ["bf16", "lora"])
def test_packed_rows(weights, model, whole, seen, tmp_path):
    ended, logs = trained_with(PACKED, weights, model, whole, tmp_path)
    whole_run.check_packed(ended)
    seen["gap"] = whole_run.check_gap(logs)


@pytest.mark.parametrize("weights", ["bf16", "fp32", "lora"])
def test_rows_in_flight(weights, model, whole, tmp_path):
    _, logs = trained_with(IN_FLIGHT, weights, model, whole, tmp_path)
    assert any("sampling/stale_logp_difference" in log for log in logs)


@pytest.mark.parametrize("scoring", [{"scoring": "padded"}, PACKED, {}], ids=["padded", "packed", "auto"])
def test_sampling_from_a_part_of_the_vocabulary(scoring, model, whole, tmp_path):
    settings = SMALL | scoring | {"vllm_enable_sleep_mode": True, "top_k": 20, "top_p": 0.9}
    whole(python("grpo.py", settings, model("plain"), tmp_path / "run"), LIMIT)
    logs = [log for log in whole_run.history(tmp_path / "run") if "loss" in log]
    whole_run.check_training(whole_run.history(tmp_path / "run"), STEPS)
    assert all(log["ratio/truncation"] < 0 for log in logs)
    assert [log["sampling/importance_sampling_ratio/mean"] for log in logs] == pytest.approx([1.0] * STEPS, abs=0.1)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_two_adapters_with_a_reference(dtype, model, whole, tmp_path):
    command = [sys.executable, SCRIPTS / "adapters.py"]
    whole_run.check_adapters(command, {"dtype": dtype}, model("plain"), whole, tmp_path, LIMIT)


def test_a_failing_reward_ends_the_run(model, whole, tmp_path):
    whole(python("fails.py", SMALL, model("plain"), tmp_path / "run"), LIMIT, check=whole_run.check_fails)
