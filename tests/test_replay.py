"""A run's batches are kept in a folder, and train again to the bit what they trained, with nothing sampled."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import trl
import trlx_hybrid
from datasets import Dataset
from peft import LoraConfig
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from trlx_hybrid import GRPOTrainer, HybridConfig
from trlx_hybrid.config import RESUME_VARIABLE
from trlx_hybrid.errors import ConfigError
from trlx_hybrid.testing.chat import chat_tokenizer, chatty_model
from trlx_hybrid.testing.models import character_tokenizer, tiny_model
from trlx_hybrid.testing.processes import rank_reports
from trlx_hybrid.trl.replay.recording import Recording

SCRIPTS = Path(__file__).parent / "scripts"


def never(*args, **kwargs):
    raise AssertionError("a reward function was called")


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "recording"


@pytest.fixture
def twice(run, folder):
    """`twice(trainer, **arguments)`: a recorded run and its replay; `make` has arguments that each takes anew."""

    def start(trainer=GRPOTrainer, make=None, again=None, **given):
        made = [{name: build() for name, build in (make or {}).items()} for _ in range(2)]
        recorded = run(trainer, hybrid={"record": str(folder)}, **given | made[0])
        recorded.close()
        if trainer is not trlx_hybrid.DistillationTrainer:
            made[1]["reward_funcs"] = [never]
        return recorded, run(trainer, hybrid={"replay": str(folder)}, **given | made[1] | (again or {}))

    return start


def assert_same(recorded, replayed, since=0):
    assert replayed.logs[since:] == recorded.logs[since:]
    assert any(log.get("grad_norm") for log in replayed.logs[since:])
    weights = recorded.weights()
    assert all(torch.equal(value, weights[name]) for name, value in replayed.weights().items())
    assert replayed.trainer.session.engine is None
    assert replayed.trainer.state.num_input_tokens_seen == recorded.trainer.state.num_input_tokens_seen


def lora(**given):
    return lambda: LoraConfig(r=4, target_modules="all-linear", **given)


@pytest.mark.parametrize(
    "given",
    [
        {"gradient_accumulation_steps": 2, "logging_steps": 2},
        {"num_iterations": 2, "steps_per_generation": 2},
        {"gradient_accumulation_steps": 3, "steps_per_generation": 2, "train_dataset": 8},
        {"make": {"peft_config": lora(lora_dropout=0.2)}, "beta": 0.1},
        {"trainer": trlx_hybrid.RLOOTrainer, "config_class": trl.RLOOConfig, "beta": 0.0},
        {
            "trainer": trlx_hybrid.DistillationTrainer,
            "config_class": trl.DistillationConfig,
            "make": {"teacher_model": lambda: tiny_model(seed=1)},
        },
    ],
    ids=["accumulation", "iterations", "across steps and epochs", "lora", "rloo", "distillation"],
)
def test_losses_gradients_metrics_and_weights_are_those_that_were_recorded(twice, prompts, given):
    if "train_dataset" in given:
        given = given | {"train_dataset": prompts.select(range(given["train_dataset"]))}
    assert_same(*twice(**{"max_steps": 4, "num_generations": 4} | given))


def test_a_second_training_leaves_the_recording_of_the_first_whole(run, folder):
    recorded = run(GRPOTrainer, hybrid={"record": str(folder)})
    logs = list(recorded.logs)
    with pytest.raises(ConfigError, match=r"has a recording already\. Name another folder"):
        recorded.trainer.train()
    recorded.close()
    assert run(GRPOTrainer, hybrid={"replay": str(folder)}, reward_funcs=[never]).logs == logs


def test_a_training_that_is_resumed_by_the_same_trainer_is_recorded_as_one(run, folder, tmp_path):
    settings = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    recorded = run(GRPOTrainer, hybrid={"record": str(folder)}, **settings)
    recorded.trainer.train(resume_from_checkpoint=str(Path(recorded.trainer.args.output_dir) / "checkpoint-2"))
    recorded.close()
    replayed = run(GRPOTrainer, hybrid={"replay": str(folder)}, reward_funcs=[never], **settings)
    assert [log["step"] for log in replayed.logs if "loss" in log] == [1, 2, 3, 4]
    assert all(torch.equal(value, recorded.weights()[name]) for name, value in replayed.weights().items())


def test_on_a_cpu_a_replay_takes_as_many_threads_as_the_recorded_run(run, folder):
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        recorded = run(GRPOTrainer, hybrid={"record": str(folder)})
        torch.set_num_threads(before)
        replayed = run(GRPOTrainer, hybrid={"replay": str(folder)}, reward_funcs=[never])
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert_same(recorded, replayed)


def test_evaluations_between_are_replayed_where_they_were(twice, prompts):
    settings = {"eval_strategy": "steps", "eval_steps": 2, "eval_on_start": True, "max_steps": 4}
    recorded, replayed = twice(eval_dataset=prompts.select(range(4)), per_device_eval_batch_size=8, **settings)
    assert_same(recorded, replayed)
    assert [log["step"] for log in replayed.logs if "eval_reward" in log] == [0, 2, 4]


@pytest.mark.parametrize("save_steps", [2, 3], ids=["between batches", "within a batch"])
def test_a_replay_goes_on_from_a_checkpoint(run, twice, folder, tmp_path, save_steps):
    settings = {"num_iterations": 2, "max_steps": 4, "save_steps": save_steps, "make": {"peft_config": lora()}}
    recorded, replayed = twice(save_strategy="steps", again={"output_dir": str(tmp_path / "replay")}, **settings)
    settings = {"num_iterations": 2, "max_steps": 4, "peft_config": lora()(), "reward_funcs": [never]}
    checkpoint = str(tmp_path / "replay" / f"checkpoint-{save_steps}")
    resumed = run(GRPOTrainer, hybrid={"replay": str(folder)}, resume=checkpoint, **settings)
    assert_same(recorded, replayed)
    assert resumed.logs[:-1] == recorded.logs[:-1]  # the last is the mean loss of the steps that this process took
    assert all(torch.equal(value, recorded.weights()[name]) for name, value in resumed.weights().items())


def test_a_run_that_was_resumed_is_recorded_as_one(run, folder, tmp_path, monkeypatch, capsys):
    """Resumed within a batch, which the checkpoint holds, the recording goes on with the next one."""
    settings = {"num_iterations": 2, "max_steps": 6, "save_strategy": "steps", "save_steps": 3}
    settings["output_dir"] = str(tmp_path / "run")
    keep = {"record": str(folder)}
    run(GRPOTrainer, hybrid=keep, **settings)
    assert names(folder) == ["train-000000-0", "train-000002-0", "train-000004-0"]
    shutil.rmtree(tmp_path / "run" / "checkpoint-6")
    monkeypatch.setenv(RESUME_VARIABLE, "1")
    recorded = run(GRPOTrainer, hybrid=keep, **settings)
    assert names(folder) == ["train-000000-0", "train-000002-0", "train-000004-0"]
    monkeypatch.delenv(RESUME_VARIABLE)
    replayed = run(GRPOTrainer, hybrid={"replay": str(folder)}, **settings | {"save_strategy": "no"})
    assert replayed.logs[:-1] == recorded.logs[:-1]
    assert all(torch.equal(value, recorded.weights()[name]) for name, value in replayed.weights().items())


def names(folder, rank=0):
    return sorted(path.stem for path in (folder / f"rank{rank}").iterdir())


def calculate(expression: str) -> str:
    """Evaluate.

    Args:
        expression: what.
    """
    return "4"


def test_tokens_that_tools_answered_stay_masked(twice, folder):
    turns = ["four", '<tool_call>\n{"name": "calculate", "arguments": {"expression": "2+2"}}\n</tool_call>']
    tokenizer = chat_tokenizer(turns)
    rows = [{"prompt": [{"role": "user", "content": f"{i}+2"}]} for i in range(8)]
    given = {"processing_class": tokenizer, "tools": [calculate], "train_dataset": Dataset.from_list(rows)}
    make = {"model": lambda: chatty_model(tokenizer, turns)}
    recorded, replayed = twice(make=make, max_steps=1, max_completion_length=60, **given)
    assert_same(recorded, replayed)
    masked = load_file(folder / "rank0" / "train-000000-0.safetensors")["batch.tool_mask"]
    assert not masked.all()
    assert replayed.logs[0]["tools/call_frequency"] > 0


@pytest.fixture
def recorded(run, folder):
    """Two steps of TRL's own sampling, recorded."""
    return run(GRPOTrainer, hybrid={"record": str(folder)}, max_steps=2)


def test_what_vllm_sampled_trains_where_there_is_no_vllm(run, folder, tmp_path):
    """In a new process, in which neither vLLM nor Ray can be imported."""
    sampled = run(GRPOTrainer, hybrid={"engine": "vllm", "record": str(folder)}, num_iterations=2, max_steps=4)
    script = [sys.executable, SCRIPTS / "replay_without_vllm.py", tmp_path, "--replay", folder]
    ended = subprocess.run([*map(str, script), "--engine", "vllm"], capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, ended.stderr[-4000:]
    assert "engine=none (HybridConfig.replay): nothing is sampled" in ended.stderr
    replayed = json.loads((tmp_path / "logs.json").read_text())
    assert [{name: log[name] for name in sampled.logs[i]} for i, log in enumerate(replayed)] == sampled.logs
    weights = load_file(tmp_path / "weights.safetensors")
    assert all(torch.equal(value, weights[name]) for name, value in sampled.weights().items())


def test_two_ranks_replay_their_own_rows(tmp_path):
    """And both are told where one of them lacks a batch."""
    environment = os.environ | {"ACCELERATE_USE_CPU": "true"}
    reports = rank_reports(SCRIPTS / "replay_distributed.py", tmp_path, count=2, environment=environment)
    for report in reports:
        assert report["replayed"] == report["recorded"]
        assert report["same_weights"]
        assert "the same batches; their last are of step 1 of rank 0, 0 of rank 1" in report["torn"]
    assert names(tmp_path / "recording", rank=0) != []


def test_a_recording_of_a_gpu_replays_on_a_cpu(run, recorded, folder, capsys, caplog):
    """Its weights go their own way after a step, by rounding: that is said, once. What a GPU adds is added here."""
    source, target = Recording(folder), Recording(folder.with_name("of a GPU"))
    target.begin(source.facts | {"device": "cuda"}, 0)
    for step in range(2):
        batch = source.read("train", step, 0)
        batch.generators["cuda"] = torch.zeros(16, dtype=torch.uint8)
        batch.weights[1] += step
        target.write(batch)
    replayed = run(GRPOTrainer, hybrid={"replay": str(target.folder)}, max_steps=2, reward_funcs=[never])
    assert_same(recorded, replayed)
    assert "device is 'cpu', and 'cuda' was recorded" in capsys.readouterr().err
    (apart,) = [message for message in caplog.messages if "no longer those of the recording" in message]
    assert f"{target.folder} at step 1." in apart


def test_a_recording_may_be_shorter_than_the_run(run, recorded, folder, capsys):
    """As of a run that was killed."""
    replayed = run(GRPOTrainer, hybrid={"replay": str(folder)}, max_steps=50, lr_scheduler_type="constant")
    assert replayed.trainer.state.global_step == 2
    assert "the recording ends after 2 of 50 steps, and training with it" in (said := capsys.readouterr().err)
    assert "max_steps is 50, and 2 was recorded" in said


def test_other_losses_train_on_the_same_batches(run, recorded, folder):
    given = {"max_steps": 2, "loss_type": "dr_grpo", "learning_rate": 1e-4}
    replayed = run(GRPOTrainer, hybrid={"replay": str(folder)}, **given)
    assert [log["reward"] for log in replayed.logs[:2]] == [log["reward"] for log in recorded.logs[:2]]
    assert replayed.logs[1]["grad_norm"] != recorded.logs[1]["grad_norm"]


OTHERS = {
    "model.num_hidden_layers is 3, and 2 was recorded": lambda: {"model": tiny_model(num_hidden_layers=3)},
    "model.class is 'LlamaForCausalLM', and 'Qwen3ForCausalLM' was recorded": lambda: {"model": tiny_model("llama")},
    "adapters is": lambda: {"peft_config": lora()()},
    "model.parameters in is 'torch.bfloat16'": lambda: {"model": tiny_model(dtype=torch.bfloat16)},
    "tokenizer.tokens is 99, and 98 was recorded": lambda: {"processing_class": larger()},
    "temperature is 0.5, and 1.0 was recorded": lambda: {"temperature": 0.5},
    "trainer is 'RLOO', and 'GRPO' was recorded": lambda: {"config_class": trl.RLOOConfig, "beta": 0.0},
    "eval_strategy is 'steps', and 'no' was recorded": lambda: {"eval_strategy": "steps", "eval_steps": 1},
}


def larger():
    tokenizer = character_tokenizer()
    tokenizer.add_tokens(["word"])
    return tokenizer


def test_another_runs_recording_is_refused_with_what_differs(run, recorded, folder, prompts):
    for message, given in OTHERS.items():
        trainer = trlx_hybrid.RLOOTrainer if "RLOO" in message else GRPOTrainer
        with pytest.raises(ConfigError, match=f"is not of this run: .*{re.escape(message)}"):
            run(trainer, hybrid={"replay": str(folder)}, train=False, eval_dataset=prompts, **given())
    facts = json.loads((folder / "recording.json").read_text())
    for name, value in {"ranks": 2, "versions": facts["versions"] | {"trl": "1.15.0"}}.items():
        (folder / "recording.json").write_text(json.dumps(facts | {name: value}))
        with pytest.raises(
            ConfigError, match=r"(ranks is 1, and 2|versions\.trl is '1\.16\S*, and '1\.15\.0') was recorded"
        ):
            run(GRPOTrainer, hybrid={"replay": str(folder)}, train=False)
    (folder / "recording.json").write_text(json.dumps(facts))
    with pytest.raises(ConfigError, match=r"The weights are not those of the recording in .* at step 0"):
        run(GRPOTrainer, hybrid={"replay": str(folder)}, model=tiny_model(seed=1))
    with pytest.raises(ConfigError, match="has a recording already"):
        run(GRPOTrainer, hybrid={"record": str(folder)})


def test_a_torn_recording_is_refused(run, recorded, folder):
    first, second = (folder / "rank0" / f"train-{step:06d}-0.safetensors" for step in range(2))
    whole, kept = first.read_bytes(), shutil.copy(second, folder / "kept")

    def refused(message):
        with pytest.raises(ConfigError, match=message):
            run(GRPOTrainer, hybrid={"replay": str(folder)}, train=False)

    first.write_bytes(whole[:-1])
    refused(rf"is not whole: {first} is torn: .*replay what comes before")
    with safe_open(first.with_name(second.name), "pt") as file:
        about = file.metadata()
    first.write_bytes(whole)
    tensors = load_file(second)
    tensors["batch.advantages"] += 1.0
    save_file(tensors, second, about)
    refused(rf"{second} is damaged: its tensors are not those that were written")
    shutil.copy(kept, second)
    first.unlink()
    refused(rf"{second} was batch 1, not 0")
    second.unlink()
    refused("holds no batch of a training step")
    (folder / "recording.json").unlink()
    refused(r"holds no recording \(recording\.json\)")


def test_rollout_only_samples_and_scores_and_trains_nothing(run, folder, capfd):
    given = {"gradient_accumulation_steps": 2, "max_steps": 3}
    hybrid = {"engine": "vllm", "record": str(folder), "rollout_only": True}
    sampled = run(GRPOTrainer, hybrid=hybrid, weight_decay=0.1, **given)
    assert "rollout_only: batches are sampled and scored, and nothing is trained" in capfd.readouterr().err
    before = tiny_model().state_dict()
    assert all(torch.equal(value, before[name]) for name, value in sampled.weights().items())
    assert sampled.trainer.session.weight_version == 0
    assert [log["loss"] for log in sampled.logs[:3]] == [0.0] * 3
    assert len({log["reward"] for log in sampled.logs[:3]}) == 3  # other samples each time
    assert len(sampled.recorder.completions) == 3 * 16
    kept = load_file(folder / "rank0" / "train-000002-0.safetensors")
    assert {"batch.old_per_token_logps", "batch.sampling_per_token_logps"} <= kept.keys()
    assert kept["rewards"].shape == (16, 1)
    sampled.close()
    trained = run(GRPOTrainer, hybrid={"replay": str(folder)}, **given)
    assert [log["reward"] for log in trained.logs[:3]] == [log["reward"] for log in sampled.logs[:3]]
    assert all(log["grad_norm"] > 0 for log in trained.logs[:3])


def test_settings_that_contradict_each_other_are_refused():
    for other in ({"record": "there"}, {"rollout_only": True}):
        with pytest.raises(ConfigError, match=f"replay samples nothing, and {next(iter(other))} is about"):
            HybridConfig(replay="here", **other)
    with pytest.raises(ConfigError, match="HybridEngine trains nothing: leave record"):
        trlx_hybrid.HybridEngine(None, None, config=HybridConfig(record="there"), max_tokens=1)
