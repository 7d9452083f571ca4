"""Rewards that are begun while the rollout is sampled: the same as those of a whole batch, and earlier."""

import functools
import json
import os
import signal
import sys
import time
import uuid

import pytest
import trlx_hybrid
from datasets import Dataset
from trl import GRPOConfig, RLOOConfig
from trlx_hybrid.testing.chat import chat_tokenizer, chatty_model
from trlx_hybrid.testing.models import character_tokenizer
from trlx_hybrid_ray.remote import remote_reward

ENGINE = {"engine": "vllm", "engine_options": {"enable_sleep_mode": True}}
RAGGED = {
    "generation_kwargs": {"stop_token_ids": list(range(10, 16))},
    "max_completion_length": 56,
    "per_device_train_batch_size": 16,
    "max_steps": 2,
}


@pytest.fixture(scope="module", autouse=True)
def nodes(session_cluster):
    """Actors do not find test modules, so they get functions by value."""
    from ray import cloudpickle

    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield session_cluster
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


def graded(prompts, completions, completion_ids, index, trainer_state, log_extra, log_metric, folder, **columns):
    """Depends on all that TRL gives a row, logs, and notes when it was asked for which rows."""
    note(folder, index)
    log_extra("tokens", [len(ids) for ids in completion_ids])
    log_metric("mean_tokens", sum(len(ids) for ids in completion_ids) / len(completion_ids))
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [
        len(str(prompt)) + sum(map(str.isdigit, text)) + row % 3 + trainer_state.global_step
        for prompt, text, row in zip(prompts, texts, index, strict=True)
    ]


def note(folder, index):
    """That these rows are being scored."""
    (folder / f"{uuid.uuid4().hex}.json").write_text(json.dumps({"at": time.time(), "index": index}))


def asked(folder):
    return sorted((json.loads(file.read_text()) for file in folder.glob("*.json")), key=lambda call: call["at"])


class Begun:
    """What was begun of each rollout before it was over. With the first of it a file is written."""

    def __init__(self, reward, first=None):
        self.rollouts, self._now, self._first = [], [], first
        reward.begin, self._begin = self._told, type(reward).begin.__get__(reward)

    def _told(self, rows, **arguments):
        self._now.append(list(rows))
        if self._first is not None:
            self._first.touch()
        self._begin(rows, **arguments)

    @trlx_hybrid.hookimpl
    def trlx_leave_phase(self, phase):
        if phase.name == "ROLLOUT":
            self.rollouts.append(self._now)
            self._now = []


def as_messages(rows):
    return rows.map(lambda row: {"prompt": [{"role": "user", "content": row["prompt"]}]})


def test_training_is_the_same_and_groups_are_scored_while_others_are_sampled(run, prompts, tmp_path):
    """The same as of the function itself, which TRL calls with all rows. GRPO parses completions, RLOO does not."""
    plain, chat = character_tokenizer(), character_tokenizer()
    chat.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    chat.response_template = "what says that there is something to parse"
    chat.parse_response = lambda ids, **_: {"role": "assistant", "content": chat.decode(ids)[::2]}
    evaluated = {"eval_dataset": as_messages(prompts).select(range(4)), "eval_strategy": "steps", "eval_steps": 2}
    cases = [
        (trlx_hybrid.GRPOTrainer, GRPOConfig, prompts, plain, {}),
        (trlx_hybrid.GRPOTrainer, GRPOConfig, as_messages(prompts), chat, evaluated),
        (trlx_hybrid.RLOOTrainer, RLOOConfig, as_messages(prompts), chat, {"beta": 0.0}),
    ]
    scored = functools.partial(graded, folder=tmp_path)
    with remote_reward(scored, workers=2, early=True) as reward:
        for trainer, config, rows, tokenizer, settings in cases:
            logs = {}
            for function in (scored, reward):
                begun, before = Begun(reward), len(asked(tmp_path))
                given = RAGGED | settings | {"train_dataset": rows, "processing_class": tokenizer}
                given |= {"reward_funcs": function, "config_class": config}
                finished = run(trainer, hybrid=ENGINE, plugins=[begun], **given)
                finished.close()
                logs[function], calls = finished.logs, asked(tmp_path)[before:]
            assert logs[reward] == logs[scored]
            assert any("mean_tokens" in log for log in logs[reward])
            assert len(begun.rollouts) == (4 if settings is evaluated else 2)
            groups = [[row, row + 1, row + 2, row + 3] for row in range(0, 16, 4)]
            assert [sorted(rows) for rows in begun.rollouts if len(rows) == 4] == [groups, groups]
            assert begun.rollouts[0] != groups  # but in the order in which they were sampled
            assert all(call["index"] == [call["index"][0]] * 4 for call in calls)  # a group each, whole
            assert len(calls) == sum(map(len, begun.rollouts))  # nothing was scored twice


def spelled(prompts, completions, completion_ids, index, log_metric, folder, **columns):
    """Depends on the rows only: where these stay in flight, other weights are trained when a group is scored."""
    note(folder, index)
    log_metric("mean_tokens", sum(len(ids) for ids in completion_ids) / len(completion_ids))
    assert all(isinstance(completion, str) for completion in completions)
    return [len(str(p)) + len({*ids}) + row % 3 for p, ids, row in zip(prompts, completion_ids, index, strict=True)]


def test_groups_in_flight_are_scored_as_soon_as_they_are_complete(run, prompts, tmp_path):
    """Also where their batch is a later one; an evaluation in between is scored by itself, and changes nothing."""
    hybrid = {"engine": "vllm", "rollout_options": {"max_staleness": 2, "in_flight": 32}}
    given = RAGGED | {"max_steps": 5, "train_dataset": Dataset.from_list([*prompts, *prompts]), "hybrid": hybrid}
    given |= {"eval_dataset": prompts.select(range(4)), "eval_strategy": "steps", "eval_steps": 1}
    scored, logs = functools.partial(spelled, folder=tmp_path), {}
    with remote_reward(scored, workers=2, early=True) as reward:
        for function in (scored, reward):
            begun, before = Begun(reward), len(asked(tmp_path))
            finished = run(trlx_hybrid.GRPOTrainer, reward_funcs=function, plugins=[begun], **given)
            finished.close()
            logs[function], calls = finished.logs, asked(tmp_path)[before:]
        assert logs[reward] == logs[scored]
        trained = [rollout for rollout in begun.rollouts if len(rollout) != 1 or rollout[0][0] % 4 == 0]
        rows = [row for rollout in trained for group in rollout for row in group]
        assert len(calls) == sum(map(len, begun.rollouts))  # nothing was scored twice, and all was begun
        assert all(call["index"] == [call["index"][0]] * len(call["index"]) for call in calls)
        assert {*range(80)} <= {*rows}  # of 5 batches of 16 rows
        assert max(map(len, begun.rollouts)) > 4  # more groups than a batch has
        assert not reward._begun
        assert not reward._later


class Adder:
    """An environment whose state is part of its row's reward."""

    first = None  # a file for which the rows of the second group wait
    waited = ()  # and whether it came, for each call

    def reset(self, index, **row):
        self.total = self.index = index

    def add(self, n: int) -> int:
        """
        Add a number. Some rows take longer than others.

        Args:
            n: How much.
        """
        if self.first is not None and self.index >= 4:
            deadline = time.monotonic() + 60
            while not self.first.exists() and time.monotonic() < deadline:
                time.sleep(0.02)
            type(self).waited += (self.first.exists(),)
        time.sleep(self.index % 4 / 10)
        self.total += n
        return self.total


def tallied(completions, completion_ids, index, environments, folder, **columns):
    note(folder, index)
    told = [sum(len(str(m["content"])) for m in messages) for messages in completions]
    return [text + len(ids) + e.total for text, ids, e in zip(told, completion_ids, environments, strict=True)]


def test_conversations_that_are_over_are_scored_while_others_go_on(run, tmp_path):
    calls = [{"name": "add", "arguments": {"n": n}} for n in range(6)]
    turns = [f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls] + [f"answer {i}" for i in range(6)]
    tokenizer, scored, logs, asks = chat_tokenizer(turns), functools.partial(tallied, folder=tmp_path), {}, {}
    rows = [{"prompt": [{"role": "user", "content": f"from {i * 7919 % 1000}"}], "index": i} for i in range(8)]
    with remote_reward(scored, workers=2, early=True) as reward:
        for function in (scored, reward):
            Adder.first = tmp_path / "begun" if function is reward else None
            begun, before = Begun(reward, Adder.first), len(asked(tmp_path))
            finished = run(
                trlx_hybrid.GRPOTrainer,
                model=chatty_model(tokenizer, turns),
                processing_class=tokenizer,
                train_dataset=Dataset.from_list(rows),
                environment_factory=Adder,
                reward_funcs=function,
                hybrid={"engine": "vllm"},
                plugins=[begun],
                max_tool_calling_iterations=2,
                max_completion_length=300,
                max_steps=1,
                vllm_max_model_length=2048,
            )
            finished.close()
            logs[function], asks[function] = finished.logs, asked(tmp_path)[before:]
        early, late = logs[reward][0], logs[scored][0]
        assert early == pytest.approx(late, abs=1e-4)  # turns of another company round otherwise
        assert early["rewards/tallied/mean"] == late["rewards/tallied/mean"]
        assert early["tools/call_frequency"] > 0
        assert sorted(begun.rollouts[0]) == [[0, 1, 2, 3], [4, 5, 6, 7]]
        assert [len(call["index"]) for call in asks[reward]] == [4, 4]  # nothing was scored twice
        assert Adder.waited
        assert all(Adder.waited)


def add(n: int) -> int:
    """
    Add a number.

    Args:
        n: How much.
    """
    return n + 1


def told(completions, completion_ids, index, folder, **columns):
    note(folder, index)
    said = [sum(len(str(m["content"])) for m in messages) for messages in completions]
    return [float(text + len(ids)) for text, ids in zip(said, completion_ids, strict=True)]


def test_conversations_in_flight_are_scored_as_soon_as_their_group_is_complete(run, tmp_path):
    calls = [{"name": "add", "arguments": {"n": n}} for n in range(6)]
    turns = [f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls] + [f"answer {i}" for i in range(6)]
    tokenizer, scored, logs = chat_tokenizer(turns), functools.partial(told, folder=tmp_path), {}
    rows = [{"prompt": [{"role": "user", "content": f"from {i * 7919 % 1000}"}], "index": i} for i in range(16)]
    options = {"max_staleness": 2, "in_flight": 24, "tools": "main", "progress": False}
    with remote_reward(scored, workers=2, early=True) as reward:
        for function in (scored, reward):
            begun, before = Begun(reward), len(asked(tmp_path))
            finished = run(
                trlx_hybrid.GRPOTrainer,
                model=chatty_model(tokenizer, turns),
                processing_class=tokenizer,
                train_dataset=Dataset.from_list(rows),
                tools=[add],
                reward_funcs=function,
                hybrid={"engine": "vllm", "rollout": "multi_turn", "rollout_options": options},
                plugins=[begun],
                max_tool_calling_iterations=2,
                max_completion_length=300,
                max_steps=4,
                vllm_max_model_length=2048,
            )
            finished.close()
            logs[function], asks = finished.logs, asked(tmp_path)[before:]
    assert logs[reward] == logs[scored]
    assert sorted(row for rollout in begun.rollouts for group in rollout for row in group) == [*range(32)]
    assert [call["index"] for call in asks] == [[call["index"][0]] * 4 for call in asks]  # whole groups, each once
    assert len(asks) == 8


def lengths(prompts, completions, folder, **columns):
    note(folder, completions)
    return [float(len(c)) for c in completions]


def test_what_was_begun_is_scored_once_and_what_has_changed_anew(tmp_path, capfd):
    with remote_reward(functools.partial(lengths, folder=tmp_path), workers=2, early=True) as reward:
        reward.begin([0, 1], prompts=["a", "a"], completions=["x", "yy"])
        reward.begin([2, 3], prompts=["b", "b"], completions=["interrupted", "before"])
        given = {"prompts": ["a", "a", "b", "b"], "completions": ["x", "yy", "zzz", ""]}
        assert reward(**given) == [1.0, 2.0, 3.0, 0.0]
        calls = sorted(call["index"] for call in asked(tmp_path))
        assert calls == [[""], ["interrupted", "before"], ["x", "yy"], ["zzz"]]
        assert "1 of 2 groups that it had begun with have changed since" in capfd.readouterr().err
        assert reward(**given) == [1.0, 2.0, 3.0, 0.0]  # nothing is begun any more
        reward.begin([0], prompts=["a"], completions=["of a pool that was closed"])
        reward.close()
        assert reward(prompts=["a"], completions=["of a pool that was closed"]) == [25.0]


def test_a_list_that_was_written_to_since_its_rows_were_begun_is_scored_anew(tmp_path):
    with remote_reward(functools.partial(lengths, folder=tmp_path), early=True) as reward:
        completions = [[1, 2, 3], [4]]
        reward.begin([0, 1], prompts=["a", "a"], completions=completions)
        completions[0].pop()
        assert reward(prompts=["a", "a"], completions=completions) == [2.0, 1.0]


class Editing:
    """A reward that is told of each group early, and edits all that it is given."""

    begins_early, __name__ = True, "editing"

    def __init__(self, edits):
        self.edits, self.sampled = edits, {}

    def prepare(self):
        self.sampled = {}

    def begin(self, rows, completion_ids, completions, parts, **columns):
        for row, ids in zip(rows, completion_ids, strict=True):
            self.sampled[row] = list(ids)
        if self.edits:
            for ids in completion_ids:
                ids[-1] = 5
            for messages in completions:
                messages[0]["content"] = "edited"
            for part in parts:
                part["numbers"].clear()

    def __call__(self, completion_ids, completions, parts, **columns):
        return [
            len(messages[0]["content"]) + sum(part["numbers"]) + sum(ids) / 100
            for messages, part, ids in zip(completions, parts, completion_ids, strict=True)
        ]


def test_a_reward_that_edits_what_it_is_begun_with_edits_nothing_that_is_trained(run, prompts):
    tokenizer, weights, logs = character_tokenizer(), [], []
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    rows = as_messages(prompts).map(lambda row: {"parts": {"numbers": [row["index"], 1]}})
    for edits in (False, True):
        finished = run(
            trlx_hybrid.GRPOTrainer,
            hybrid=ENGINE,
            reward_funcs=Editing(edits),
            vllm_importance_sampling_correction=False,  # which compares engine and trainer, and may find it first
            **RAGGED | {"train_dataset": rows, "processing_class": tokenizer},
        )
        finished.close()
        weights.append(finished.weights())
        logs.append(finished.logs)
    assert logs[0] == logs[1]
    assert max(float((weights[0][name] - weights[1][name]).abs().max()) for name in weights[0]) == 0.0


def dying(prompts, completions, marker, **columns):
    """Ends its process once."""
    if "die" in completions and not os.path.exists(marker):
        open(marker, "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    return [float(len(c)) for c in completions]


def test_rows_of_a_worker_that_died_meanwhile_are_scored_again(tmp_path, capfd):
    with remote_reward(functools.partial(dying, marker=str(tmp_path / "died")), workers=2, early=True) as reward:
        reward.begin([0, 1], prompts=["a", "a"], completions=["die", "x"])
        reward.begin([2, 3], prompts=["b", "b"], completions=["yy", "zzz"])
        assert reward(prompts=["a", "a", "b", "b"], completions=["die", "x", "yy", "zzz"]) == [3.0, 1.0, 2.0, 3.0]
    assert "Reward function 'dying' lost a worker" in capfd.readouterr().err


def test_where_nothing_can_begin_early_it_is_said_once(run, tmp_path, caplog):
    scored = functools.partial(lengths, folder=tmp_path)
    with remote_reward(scored, early=True, drop=["trainer_state"]) as reward:
        finished = run(trlx_hybrid.GRPOTrainer, reward_funcs=reward, max_steps=2)
    assert [len(call["index"]) for call in asked(tmp_path)] == [8, 8]
    said = [record.getMessage() for record in caplog.records if "Rewards begin" in record.getMessage()]
    assert said == ["Rewards begin when all is sampled: TRL generates."]
    assert finished.logs
