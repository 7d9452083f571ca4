"""A run records what it was told to, whoever generates; settings that nobody would read are refused."""

import json
import subprocess
import sys

import pytest
import trlx_hybrid
from trlx_hybrid.errors import HybridError
from trlx_hybrid_trajectories.events import read_events
from trlx_hybrid_trajectories.plugin import TrajectoriesOptions
from trlx_hybrid_trajectories.record import read
from trlx_hybrid_trajectories.report import as_report

ENGINE = {"engine": "vllm", "engine_options": {"max_model_len": 64}}


@pytest.mark.parametrize(
    "hybrid", [{}, ENGINE, ENGINE | {"rollout": "multi_turn"}], ids=["stock TRL", "single_turn", "multi_turn"]
)
def test_trajectories_of_any_rollout_are_recorded(run, tmp_path, hybrid):
    file = tmp_path / "seen.jsonl"
    given = hybrid | {"plugin_options": {"trajectories": {"record": str(file), "record_limit": 3}}}
    finished = run(trlx_hybrid.GRPOTrainer, hybrid=given, max_steps=2)
    found = list(read(file))
    assert [one.step for one in found] == [0, 0, 0, 1, 1, 1]
    batches = [finished.recorder.completions[:3], finished.recorder.completions[8:11]]
    assert [one.completion_ids for one in found] == batches[0] + batches[1]
    assert all(one.training and one.reward is not None and not one.failed for one in found)


def test_the_option_of_the_rollout_still_records_and_says_the_new_one(run, tmp_path, caplog):
    file = tmp_path / "seen.jsonl"
    given = ENGINE | {"rollout": "multi_turn", "rollout_options": {"record": str(file), "record_limit": 2}}
    run(trlx_hybrid.GRPOTrainer, hybrid=given, max_steps=1)
    assert len(list(read(file))) == 2
    assert f"plugin_options={{'trajectories': {{'record': '{file}', 'record_limit': 2}}}}" in caplog.text


RECORD = {"trajectories": {"record": "seen.jsonl"}}


@pytest.mark.parametrize(
    ("hybrid", "message"),
    [
        ({"plugin_options": {"trajectoris": {}}}, "'trajectoris', which is not loaded. Did you mean 'trajectories'"),
        ({"plugin_options": RECORD, "disable_plugins": ["trajectories"]}, "is disabled by"),
        ({"plugin_options": {"trajectories": {"recrod": "x"}}}, r"no setting 'recrod'. Did you mean 'record'\?"),
        ({"plugin_options": {"trajectories": {"record": "x", "record_limit": 0}}}, "must be 1 or more"),
        ({"plugin_options": {"trajectories": "seen.jsonl"}}, "must be a mapping"),
        ({"plugin_options": {"trajectories": {"record": "/dev/null/x"}}}, "cannot write trajectories to /dev/null/x"),
        ({"plugin_options": "{"}, "plugin_options is not valid JSON"),
        (
            ENGINE | {"rollout": "multi_turn", "rollout_options": {"record": "x"}, "disable_plugins": ["trajectories"]},
            "pip install trlx-hybrid-trajectories",
        ),
    ],
)
def test_settings_that_nobody_would_read_are_refused(run, hybrid, message):
    with pytest.raises(HybridError, match=message):
        run(trlx_hybrid.GRPOTrainer, hybrid=hybrid, max_steps=1)


def test_options_come_as_json_too():
    config = trlx_hybrid.HybridConfig(plugin_options='{"trajectories": {"record": "seen.jsonl"}}')
    assert config.options_of("trajectories", TrajectoriesOptions) == TrajectoriesOptions(record="seen.jsonl")
    assert config.options_of("others", TrajectoriesOptions) == TrajectoriesOptions()


WRITTEN = """
import json, os, resource, sys
from datasets import Dataset
from trl import GRPOConfig
from trlx_hybrid import GRPOTrainer
from trlx_hybrid.testing.models import character_tokenizer, tiny_model

folder = sys.argv[1]
said = folder + "/said.jsonl"


def reward(completions, trainer_state, **_):
    if trainer_state.global_step == 1:  # the disk fills up: there is room for half a line
        resource.setrlimit(resource.RLIMIT_FSIZE, (os.path.getsize(said) + 100, -1))
    if trainer_state.global_step == 3:  # somebody has made room
        resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))
    return [float(len(set(text))) for text in completions]


trainer = GRPOTrainer(
    model=tiny_model(),
    processing_class=character_tokenizer(),
    reward_funcs=reward,
    train_dataset=Dataset.from_dict({"prompt": ["1 + 1 ="] * 32}),
    hybrid={"plugin_options": {"trajectories": {"record": said, "record_limit": 2, "report": True}}},
    args=GRPOConfig(
        output_dir=folder, max_steps=5, per_device_train_batch_size=4, num_generations=4, max_completion_length=8,
        use_cpu=True, bf16=False, report_to=[], save_strategy="no", logging_steps=1, disable_tqdm=True,
    ),
)
trainer.train()
trainer.session.close()
print(json.dumps({"steps": trainer.state.global_step, "log": [
    line.get("hybrid/trajectories_lost", 0.0) for line in trainer.state.log_history if "loss" in line
]}))
"""


def test_a_disk_that_fills_up_takes_trajectories_and_not_the_run(tmp_path):
    # The limit on a file's size is the kernel's: a write ends half-way, as on a full disk.
    script = tmp_path / "script.py"
    script.write_text(WRITTEN)
    ran = subprocess.run([sys.executable, str(script), str(tmp_path)], capture_output=True, text=True, timeout=300)
    found = json.loads(ran.stdout.splitlines()[-1]) if ran.returncode == 0 else ran.stderr.splitlines()[-2:]
    assert found == {"steps": 5, "log": [0.0, 2.0, 4.0, 4.0, 4.0]}
    assert [one.step for one in read(tmp_path / "said.jsonl")] == [0, 0, 3, 3, 4, 4]
    told = [line for line in ran.stderr.splitlines() if "training goes on without: cannot write to" in line]
    assert sorted(line.partition(" are lost")[0] for line in told) == [
        "Events of the run report",
        "Recorded trajectories",
    ]
    assert all("File too large. Make room" in line for line in told)
    events = read_events(tmp_path)
    assert events.lost > 0
    assert [step for step, _ in events.logs][-1] == 5
    assert f"{events.lost} events lost: the disk was full." in as_report(tmp_path)
