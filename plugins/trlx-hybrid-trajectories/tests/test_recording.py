"""A run records what it was told to, whoever generates; settings that nobody would read are refused."""

import pytest
import trlx_hybrid
from trlx_hybrid.errors import HybridError
from trlx_hybrid_trajectories.plugin import TrajectoriesOptions
from trlx_hybrid_trajectories.record import read

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
