"""Several speakers in one model: their rows stay together, and each is rewarded against the others."""

import re
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from hypothesis import example, given, settings
from hypothesis import strategies as st
from trl import GRPOConfig
from trl.trainer.utils import RepeatSampler
from trlx_hybrid import GRPOTrainer, hookimpl
from trlx_hybrid.errors import ConfigError
from trlx_hybrid.speakers import by_task, with_speakers
from trlx_hybrid.testing.processes import rank_reports

ROOT = Path(__file__).parents[1]
TASKS = Dataset.from_dict({"round": [10, 20, 30, 40], "prompt": ["?"] * 4})


def config(**given):
    return GRPOConfig("unused", use_cpu=True, bf16=False, report_to=[], **{"shuffle_dataset": False} | given)


def ask(speaker):
    return lambda row: f"{speaker} {row['round']}"


def test_each_task_is_a_row_of_each_speaker():
    asks = {speaker: ask(speaker) for speaker in ("asks", "answers", "judges")}
    rows = with_speakers(TASKS.select([0, 2]), config(per_device_train_batch_size=6, num_generations=2), **asks)
    assert rows.to_dict() == {
        "round": [10] * 3 + [30] * 3,
        "prompt": ["asks 10", "answers 10", "judges 10", "asks 30", "answers 30", "judges 30"],
        "task_id": [0] * 3 + [1] * 3,
        "speaker": ["asks", "answers", "judges"] * 2,
    }


@settings(max_examples=10)
@given(st.integers(1, 4), st.integers(1, 6), st.integers(2, 3), st.integers(1, 3), st.integers(1, 9))
@example(3, 6, 2, 2, 7)
@example(3, 4, 2, 1, 7)
def test_batches_of_trl_hold_whole_tasks_or_are_refused(speakers, prompts, generations, steps, tasks):
    args = config(
        per_device_train_batch_size=prompts * generations, num_generations=generations, steps_per_generation=steps
    )
    asks = {f"speaker{k}": str for k in range(speakers)}
    in_batch = prompts * steps
    if in_batch % speakers:
        with pytest.raises(ConfigError, match=rf"must be a multiple of {speakers} \* num_generations"):
            with_speakers(Dataset.from_dict({"round": range(tasks)}), args, **asks)
        return
    rows = with_speakers(Dataset.from_dict({"round": range(tasks)}), args, **asks)
    sampled = list(RepeatSampler(rows, generations, in_batch, shuffle=args.shuffle_dataset))
    size = args.generation_batch_size
    for start in range(0, len(sampled), size):
        batch = rows.select(sampled[start : start + size])
        said = by_task(batch["task_id"], batch["speaker"], batch["prompt"], required=asks)
        assert {len(places) for spoken in said.places.values() for places in spoken.values()} == {generations}
        assert said.own(said.values) == batch["prompt"][:]
    assert len(sampled) == tasks * speakers // in_batch * size


@pytest.mark.parametrize(
    ("given", "tasks", "speakers", "message"),
    [
        ({"shuffle_dataset": True}, TASKS, ["a", "b"], r"'a', 'b', .*GRPOConfig\(shuffle_dataset=False\)"),
        ({}, TASKS, ["a", "b", "c"], r"size \(8\) must be a multiple of 3 \* num_generations \(12\)"),
        ({}, TASKS.add_column("task_id", [1] * 4), ["even", "odd"], "rename 'task_id'"),
        ({}, TASKS, [], "was given no speaker: name each"),
    ],
    ids=["shuffled", "parted", "taken", "nobody"],
)
def test_what_would_part_the_speakers_is_refused(given, tasks, speakers, message):
    args = config(per_device_train_batch_size=8, num_generations=4, **given)
    with pytest.raises(ConfigError, match=message):
        with_speakers(tasks, args, **dict.fromkeys(speakers, str))


def test_speakers_on_two_ranks_are_seen_together(tmp_path):
    first, second = rank_reports(ROOT / "tests" / "scripts" / "speakers.py", tmp_path, count=2, timeout=120)
    assert [first.pop("own"), second.pop("own")] == [["a", "b", "c"], ["d", "e", "f", "g"]]
    assert first == second
    assert first["values"] == list("abcdefg")
    assert first["places"] == {"5": {"even": [0, 1], "odd": [2, 3, 6]}, "8": {"odd": [4], "even": [5]}}
    assert "parted" not in first
    assert first["absent"].startswith("A batch has completions of 'odd' for task 0, and none of 'even'.")


class Observer:
    """A plugin that remembers the batch of a step."""

    @hookimpl
    def trlx_advantages(self, session, batch):
        self.advantages = batch["advantages"]

    @hookimpl
    def trlx_rollout_end(self, session, trajectories):
        self.trajectories = trajectories


def test_the_game_of_the_page_trains_both_speakers_against_each_other(run):
    """Sums of two numbers: one speaker wins the even ones, the other the odd ones."""
    samples = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "cure.md").read_text(), re.DOTALL)
    (code,) = [sample for sample in samples if "with_speakers" in sample]
    given = {"per_device_train_batch_size": 16, "num_generations": 4, "shuffle_dataset": False, "max_steps": 1}
    names = {"args": config(**given), "Dataset": Dataset}
    exec(code, names)
    observer = Observer()
    done = run(GRPOTrainer, reward_funcs=names["duel"], train_dataset=names["rounds"], plugins=[observer], **given)

    odd = torch.tensor([int("0" + re.sub(r"\D", "", t.completion)) % 2 for t in observer.trajectories])
    rewards = torch.tensor([t.reward for t in observer.trajectories])
    for evens, odds in ((slice(0, 4), slice(4, 8)), (slice(8, 12), slice(12, 16))):
        drawn = [1.0 - 2.0 * odd[group].float().mean() for group in (evens, odds)]  # the mean of 1 and -1
        assert rewards[evens].tolist() == [float(drawn[1] * (1 - 2 * of)) for of in odd[evens]]
        assert rewards[odds].tolist() == [float(-drawn[0] * (1 - 2 * of)) for of in odd[odds]]
        assert rewards[evens].sum() == -rewards[odds].sum()
        for group in (evens, odds):
            normal = (rewards[group] - rewards[group].mean()) / (rewards[group].std() + 1e-4)
            assert observer.advantages[group].tolist() == pytest.approx(normal.tolist(), abs=1e-5)
    told_apart = [len(set(rewards[start : start + 4].tolist())) > 1 for start in range(0, 16, 4)]
    assert any(told_apart[0::2])  # of the first speaker
    assert any(told_apart[1::2])
    assert done.trainer.state.log_history[0]["grad_norm"] > 0
