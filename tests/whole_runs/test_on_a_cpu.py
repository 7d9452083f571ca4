"""The same scripts without GPUs, so that every change runs some of them to their end."""

import json
import re
import sys

import pytest
import whole_run
from cases import IN_FLIGHT, PACKED, SHOWN, STEPS, Case, flags
from whole_run import SCRIPTS

LIMIT = 500
ON_CPU = {"use_cpu": True, "bf16": False, "dtype": "float32", "lora_target_modules": "all-linear"}
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def test_a_plain_script_trains_to_its_end_and_its_recording_does_again(model, whole, seen, tmp_path):
    case = Case("fp32", sleep=True, graphs=False, ragged=True)
    recorded = ON_CPU | {"record": tmp_path / "recording"}
    whole_run.check_case(
        case, [], model("plain"), tmp_path, whole, seen, LIMIT, changes=recorded, path="alias", gather=False
    )
    replayed = case.settings() | ON_CPU | {"replay": tmp_path / "recording"}
    whole([sys.executable, SCRIPTS / "grpo.py", *flags(replayed, model("plain"), tmp_path / "replay")], LIMIT)
    assert whole_run.history(tmp_path / "replay") == whole_run.history(tmp_path / "run")


@pytest.mark.parametrize("tp", [2, 1], ids=["tp", "pp"])
def test_a_plain_script_trains_to_its_end_on_two_ranks(tp, model, whole, seen, tmp_path):
    case = Case("fp32", sleep=True, graphs=False, tp=tp, pp=2 // tp)
    whole_run.check_case(
        case, TORCHRUN, model("plain"), tmp_path, whole, seen, LIMIT, changes=ON_CPU, path="reshard", gather=False
    )


def test_packed_rows(model, whole, tmp_path):
    settings = Case("lora", sleep=True, graphs=False, ragged=True).settings() | ON_CPU | PACKED
    ended = whole([sys.executable, SCRIPTS / "grpo.py", *flags(settings, model("plain"), tmp_path)], LIMIT)
    whole_run.check_training(whole_run.history(tmp_path), STEPS)
    whole_run.check_proofs(ended, "lora")
    whole_run.check_packed(ended)
    assert "LoRA layers: 14 of 14 compute in fewer passes" in ended.output


@pytest.mark.slow
def test_a_killed_run_with_rows_in_flight_resumes(model, whole, tmp_path):
    settings = Case("fp32", sleep=True, graphs=False, ragged=True).settings() | ON_CPU | IN_FLIGHT

    def command(name, *more):
        return [sys.executable, SCRIPTS / "grpo.py", *flags(settings, model("plain"), tmp_path / name), *more]

    killed = whole_run.run(command("run"), LIMIT, kill_at="'epoch': '0.1562'")
    assert killed.returncode == -9, killed.output[-4000:]
    assert not (tmp_path / "run" / f"checkpoint-{STEPS}").exists()
    whole(command("run", "--resume_from_checkpoint", tmp_path / "run" / "checkpoint-3"), LIMIT)
    whole(command("whole"), LIMIT)
    logs = whole_run.history(tmp_path / "whole")
    assert whole_run.history(tmp_path / "run") == logs
    whole_run.check_training(logs, STEPS)
    assert any("sampling/stale_logp_difference" in log for log in logs)


@pytest.mark.parametrize("weights", ["bf16", "lora"])
def test_pictures(weights, model, whole, seen, tmp_path):
    case, changes = Case(weights, sleep=True, graphs=False), ON_CPU | {"lora_dropout": 0.0}  # the engine has none
    whole_run.check_pictures(case, changes, model, whole, seen, tmp_path, LIMIT)
    logs = [log for log in whole_run.history(tmp_path) if "loss" in log]
    assert max(log["sampling/sampling_logp_difference/max"] for log in logs) < 1e-5


def test_an_environment_that_shows_pictures(model, whole, seen, tmp_path):
    case, changes = Case("bf16", sleep=True, graphs=False), ON_CPU | SHOWN
    whole_run.check_pictures(case, changes, model, whole, seen, tmp_path, LIMIT)
    assert seen["gap"] < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["bf16", "lora"])
def test_a_mixture_of_experts_on_two_ranks(weights, model, whole, seen, tmp_path):
    case = Case(weights, sleep=True, graphs=False, tp=2)
    whole_run.check_experts(case, ON_CPU, TORCHRUN, model("experts"), whole, seen, tmp_path, LIMIT)
    assert seen["gap"] < 1e-5


@pytest.mark.slow
def test_a_mixture_of_experts_with_the_engines_routes(model, whole, seen, tmp_path):
    case, changes = Case("bf16", sleep=True, graphs=False), ON_CPU | {"router_replay": True}
    whole_run.check_experts(case, changes, [], model("experts"), whole, seen, tmp_path, LIMIT)
    assert seen["gap"] < 1e-5


def test_a_base_in_4_bits(model, whole, seen, tmp_path):
    case = Case("lora", sleep=True, graphs=False, ragged=True, offload="all")
    whole_run.check_4_bits(case, ON_CPU, model("plain"), whole, seen, tmp_path, LIMIT)


def test_zero3(model, whole, seen, tmp_path, monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    settings = Case("lora", sleep=True, graphs=False, tp=2).settings() | ON_CPU | PACKED | {"beta": 0.1}
    command = [sys.executable, *TORCHRUN, SCRIPTS / "zero_on_cpu.py"]
    whole_run.check_deepspeed(3, settings, command, model("plain"), whole, seen, tmp_path, LIMIT)
    assert seen["gap"] < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(("script", "kind"), [("game.py", "plain"), ("gallery.py", "pictures")])
def test_episodes_are_recorded_and_replayed_and_sampled_without_training(script, kind, model, whole, tmp_path):
    if kind == "pictures":
        pytest.importorskip("torchvision", reason="the processors of vision-language models need torchvision")
    settings = Case("bf16", sleep=True, graphs=False).settings() | ON_CPU | SHOWN

    def run(name, **given):
        whole([sys.executable, SCRIPTS / script, *flags(settings | given, model(kind), tmp_path / name)], LIMIT)
        return whole_run.history(tmp_path / name)

    recorded = run("run", record=tmp_path / "recording")
    whole_run.check_training(recorded, STEPS)
    assert run("replay", replay=tmp_path / "recording") == recorded
    alone = run("alone", record=tmp_path / "alone.recording", rollout_only=True)
    assert [log["loss"] for log in alone if "loss" in log] == [0.0] * STEPS
    assert len(list((tmp_path / "alone.recording" / "rank0").glob("train-*"))) == STEPS


def test_rollouts_repeat(model, whole):
    whole_run.check_repeats(
        [whole([sys.executable, SCRIPTS / "repeats.py", model("plain"), "sleep", "eager", "5"], LIMIT)]
    )


def ended(*traces):
    """A run whose ranks said these, each `(number, rank, at, {what: digest})`, among other things."""
    lines = [json.dumps({"number": number, "rank": rank, "at": at} | found) for number, rank, at, found in traces]
    return whole_run.Ended([], 0, False, 1.0, "".join(f"{{'loss': 1}}TRACE {line}\n" for line in lines))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ((2, {"weights": 8}), "first at the sync on rank 0, in weights: the trainer, after equal rollouts"),
        ((4, {"logprobs": "z"}), "first at a rollout on rank 1, in logprobs: the engine, with equal weights"),
        ((0, {"kv_blocks": 9}), "nowhere in weights, tokens and log-probs: .* differ in kv_blocks 5 and 9"),
    ],
)
def test_two_runs_that_part_say_whose_arithmetic_it_is(changed, said):
    rollout = {"tokens": "x", "logprobs": "y"}
    ranks = [
        [
            (1, rank, "the engine", {"kv_blocks": 5}),
            (2, rank, "the sync", {"weights": 7}),
            (3, rank, "a rollout", rollout),
        ]
        for rank in range(2)
    ]
    traces = [ranks[0][0], ranks[1][0], ranks[0][1], ranks[0][2], ranks[1][2], ranks[1][1]]
    at, found = changed
    number, rank, where, before = traces[at]
    others = [*traces[:at], (number, rank, where, before | found), *traces[at + 1 :]]
    assert "nowhere" in whole_run.parting(ended(*traces), ended(*reversed(traces)))
    assert re.search(said, whole_run.parting(ended(*traces), ended(*others)))
