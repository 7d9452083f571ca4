"""The matrix and the rewards by hand, and GRPO steps on both speakers."""

import json
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from trl import GRPOConfig
from trlx_hybrid import GRPOTrainer, hookimpl
from trlx_hybrid.errors import ConfigError
from trlx_hybrid.testing.processes import rank_reports
from trlx_hybrid_cure import CureReward, Sandbox, two_speakers
from trlx_hybrid_cure.cure import matrix_rewards

YES, NO = True, False


def test_rewards_of_a_matrix():
    """Programs A and B are right, C and D are wrong."""
    truth = [[YES, YES, YES, YES], [YES, YES, YES, YES], [YES, NO, NO, NO], [NO, NO, NO, NO]]
    judged = [
        # rejects both wrong, one, none; rejects B and: lets both pass, one, none; rejects all
        [YES, YES, YES, YES, YES, YES, NO],
        [YES, YES, YES, NO, NO, NO, NO],
        [NO, YES, YES, YES, YES, NO, NO],
        [NO, NO, YES, YES, NO, NO, NO],
    ]
    assert matrix_rewards(truth, judged) == ([1.0, 1.0, 0.25, 0.0], [1.0, 0.5, 0.0, -1.0, -0.5, 0.0, 0.0])


def test_rewards_where_all_programs_are_right_or_none():
    judged = [[YES, NO, YES], [YES, NO, NO]]
    assert matrix_rewards([[YES], [YES]], judged) == ([1.0, 1.0], [1.0, -1.0, -1.0])
    assert matrix_rewards([[YES, NO], [NO, NO]], judged) == ([0.5, 0.0], [0.0, 0.0, 0.0])
    assert matrix_rewards([[YES]], [[]]) == ([1.0], [])


TASKS = Dataset.from_list([{"asked": f"add {k}", "tests": [f"assert f(2) == {2 + k}"]} for k in (1, 2)])


def config(tmp_path, **settings):
    given = {"per_device_train_batch_size": 16, "num_generations": 4, "shuffle_dataset": False, "bf16": False}
    return GRPOConfig(str(tmp_path), use_cpu=True, report_to=[], **given | settings)


def ask(speaker):
    return lambda row: f"{speaker}: {row['asked']}"


def test_each_task_is_two_rows(tmp_path):
    rows = two_speakers(TASKS, config(tmp_path), coder=ask("write"), tester=ask("doubt"))
    assert rows["prompt"][:] == ["write: add 1", "doubt: add 1", "write: add 2", "doubt: add 2"]
    assert rows["task_id"][:] == [0, 0, 1, 1]
    assert rows["speaker"][:] == ["coder", "tester"] * 2
    assert rows["tests"][:] == [["assert f(2) == 3"]] * 2 + [["assert f(2) == 4"]] * 2


@pytest.mark.parametrize(
    ("settings", "tasks", "message"),
    [
        ({"shuffle_dataset": True}, TASKS, r"GRPOConfig\(shuffle_dataset=False\)"),
        (
            {"num_generations": 16},
            TASKS,
            r"\(16\) must be a multiple of 2 \* num_generations \(32\)",
        ),
        ({}, TASKS.remove_columns("tests"), "rename your column of ground-truth tests"),
        ({}, TASKS.add_column("speaker", ["she", "he"]), "rename 'speaker'"),
        ({}, Dataset.from_list([{"tests": ["pass"]}, {"tests": []}]), "task 1 has no ground-truth tests"),
    ],
)
def test_what_would_part_the_speakers_is_refused(tmp_path, settings, tasks, message):
    with pytest.raises(ConfigError, match=message):
        two_speakers(tasks, config(tmp_path, **settings), coder=str, tester=str)


ROWS = [
    # task, speaker, said, reward
    (7, "coder", "```python\nf = lambda x: x + 1\n```", 1.0),
    (7, "coder", "No idea.", 0.0),
    (7, "coder", "First ```f = 0``` and then\n```python\nf = lambda x: 3\n```", 0.5),
    (7, "coder", "```\nf = lambda x: x + 1\n```", 1.0),
    (7, "tester", "```python\nassert f(3) == 4\n```", 1.0),  # rejects both wrong programs
    (7, "tester", "```python\nassert f(2) == 3\n```", 0.5),  # lets the constant pass
    (7, "tester", "```python\nassert f(0) == 3\n```", -0.5),  # lets the constant pass alone
    (7, "tester", "```python\nassert f(3) == 3 or True: pass\n```", 0.0),  # no Python: rejects all
    (7, "tester", "No idea.", 0.0),
    (9, "coder", "```python\nwhile True: pass\n```", 0.0),
    (9, "tester", "```python\npass\n```", 0.0),  # no program is right
]
TESTS = {7: ["assert f(2) == 3", "assert f(5) == 6"], 9: ["assert f"]}


def columns(rows):
    tasks, speakers, said, _ = zip(*rows, strict=True)
    return {"completions": said, "task_id": tasks, "speaker": speakers, "tests": [TESTS[task] for task in tasks]}


@pytest.mark.parametrize("conversational", [False, True])
def test_the_reward_function_pays_both_speakers_from_the_matrix(conversational):
    given, logged = columns(ROWS), {}
    if conversational:
        given["completions"] = [[{"role": "assistant", "content": text}] for text in given["completions"]]
    reward = CureReward(sandbox=Sandbox(seconds=0.2))
    rewards = reward(**given, log_metric=logged.__setitem__, prompts=None, trainer_state=None)
    assert rewards == [reward for *_, reward in ROWS]
    assert logged.pop("cure/seconds") < 60
    assert logged == {"cure/pass@1": 2 / 5, "cure/precision": 2 / 5}


def test_tests_without_programs_are_refused():
    reward = CureReward()
    with pytest.raises(ConfigError, match=r"a batch has tests of task 7 and none of its programs\."):
        reward(**columns([row for row in ROWS if row[:2] != (7, "coder")]))
    assert reward(**columns(ROWS[:2])) == [1.0, 0.0]
    with pytest.raises(ConfigError, match="the rows have no column 'speaker'"):
        reward(completions=["x"], task_id=[1], tests=[["pass"]])


def test_another_speaker_is_refused_by_name():
    rows = [(task, "proposer" if speaker == "tester" else speaker, *rest) for task, speaker, *rest in ROWS]
    with pytest.raises(ConfigError, match="has the speaker 'proposer', and CURE has 'coder' and 'tester'"):
        CureReward()(**columns(rows))


@pytest.mark.slow
def test_groups_that_lie_on_two_ranks_are_judged_as_one(tmp_path):
    given = columns(ROWS)
    (tmp_path / "rows.json").write_text(json.dumps(list(zip(*given.values(), strict=True))))
    first, second = rank_reports(Path(__file__).parent / "scripts" / "cure_ranks.py", tmp_path, count=2, timeout=120)
    assert first.pop("rewards") + second.pop("rewards") == [reward for *_, reward in ROWS]
    assert first == second
    assert first["alone"].startswith("ConfigError: CURE: a batch has tests of task 7 and none of its programs.")
    assert first["broken"].startswith("SandboxError: Rank 1: ")


class Observer:
    """A plugin that remembers advantages and trajectories."""

    def __init__(self):
        self.advantages, self.trajectories = [], []

    @hookimpl
    def trlx_advantages(self, session, batch):
        self.advantages.append(batch["advantages"].tolist())

    @hookimpl
    def trlx_rollout_end(self, session, trajectories):
        self.trajectories.append(trajectories)


def shift(text):
    """What the random text of a tiny model stands for: a number from 0 to 2."""
    return sum(map(ord, text)) % 3


def test_a_grpo_step_trains_on_both_speakers(run, tmp_path):
    tasks = Dataset.from_list([{"asked": f"add {k}", "tests": [f"assert f(2) == {2 + k}"]} for k in (0, 1, 2, 1)])
    args = {"per_device_train_batch_size": 16, "num_generations": 4, "shuffle_dataset": False, "max_steps": 2}
    reward = CureReward(
        program=lambda text: f"f = lambda x: x + {shift(text)}", test=lambda text: f"assert f(2) == {2 + shift(text)}"
    )
    observer = Observer()
    rows = two_speakers(tasks, config(tmp_path, **args), coder=ask("write"), tester=ask("doubt"))
    done = run(GRPOTrainer, reward_funcs=reward, train_dataset=rows, plugins=[observer], **args)

    informative = 0
    for step, (trajectories, advantages) in enumerate(zip(observer.trajectories, observer.advantages, strict=True)):
        said = [shift(t.completion) for t in trajectories]
        for task in range(2):
            truth = [0, 1, 2, 1][2 * step + task]
            programs, tests = said[8 * task : 8 * task + 4], said[8 * task + 4 : 8 * task + 8]
            wrong = [k for k in programs if k != truth]
            if wrong == programs:
                expected = [0.0] * 4
            elif wrong:
                expected = [1.0 if k == truth else -wrong.count(k) / len(wrong) for k in tests]
            else:
                expected = [1.0 if k == truth else -1.0 for k in tests]
            groups = [[float(k == truth) for k in programs], expected]
            for start, group in zip((8 * task, 8 * task + 4), groups, strict=True):
                rewards = torch.tensor(group)
                assert [t.reward for t in trajectories[start : start + 4]] == pytest.approx(group, abs=1e-6)
                normal = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
                assert advantages[start : start + 4] == pytest.approx(normal.tolist(), abs=1e-5)
                informative += len(set(group)) > 1
    assert informative >= 2
    assert step == 1
    assert {"cure/pass@1", "cure/seconds"} <= done.trainer.state.log_history[0].keys()


def test_a_dataset_that_was_shuffled_after_all_is_refused(run, tmp_path):
    rows = two_speakers(TASKS, config(tmp_path), coder=ask("write"), tester=ask("doubt"))
    args = {"reward_funcs": CureReward(), "shuffle_dataset": False, "max_steps": 1}
    with pytest.raises(ConfigError, match=r"none of its programs\. Give the trainer what `two_speakers` returns"):
        run(GRPOTrainer, train_dataset=rows.select([1, 2, 0, 3]), **args)
