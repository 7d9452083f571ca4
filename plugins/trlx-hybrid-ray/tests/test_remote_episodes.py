"""Environments that are killed in the middle of a rollout, under the real multi-turn plugin: one trajectory each."""

import copy
import functools
import json
import logging
import math
import os
import re
import signal
import sys

import pytest
import trlx_hybrid
from datasets import Dataset
from trl import GRPOConfig
from trlx_hybrid.testing.chat import chat_tokenizer, chatty_model
from trlx_hybrid_multiturn import Step, episode_reward, episodes
from trlx_hybrid_ray.remote import remote_environment

ROWS, GROUP, NUMBERS = 6, 3, 5
TOOLS = ("add", "later")


@pytest.fixture(scope="module", autouse=True)
def nodes(session_cluster):
    """Actors do not find test modules, so they get classes by value."""
    from ray import cloudpickle

    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield session_cluster
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


class Counter:
    """Dies where a file says so: at a tool, or when it is scored."""

    def __init__(self, plan):
        self._plan = plan

    def reset(self, start, **row):
        self.start, self.total = start, 0

    def _meet_fate(self, where):
        with open(self._plan) as file:
            if json.load(file).get(str(self.start)) == where:
                os.kill(os.getpid(), signal.SIGKILL)

    def add(self, n: int) -> int:
        """
        Add a number.

        Args:
            n: How much.
        """
        self._meet_fate("add")
        self.total += n
        return self.total

    async def later(self, n: int) -> int:
        """
        Add a number later.

        Args:
            n: How much.
        """
        self._meet_fate("later")
        self.total += n
        return self.total

    def get_reward(self) -> float:
        self._meet_fate("get_reward")
        return float(self.total + self.start)


class Rig:
    """A trainer that rolls the same rows out again and again, from the same draws."""

    def __init__(self, folder, environment=Counter, reward_funcs=None):
        calls = [{"name": name, "arguments": {"n": n}} for name in TOOLS for n in range(NUMBERS)]
        turns = [f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls]
        turns += [f"plain answer {i}" for i in range(4)]
        tokenizer = chat_tokenizer(turns)
        self.rows = [
            {"prompt": [{"role": "user", "content": f"question {i * 7919 % 1000}"}], "start": i} for i in range(ROWS)
        ]
        self.plan = folder / "plan.json"
        self.plan.write_text("{}")
        rig = self

        class Recording(trlx_hybrid.GRPOTrainer):
            def _generate(self, prompts):
                rig.generated = copy.deepcopy(super()._generate(prompts))
                return rig.generated

        self.environments = remote_environment(
            functools.partial(environment, str(self.plan)), workers=ROWS, per_worker=1, cpus=0.1
        )
        self.trainer = Recording(
            model=chatty_model(tokenizer, turns),
            processing_class=tokenizer,
            train_dataset=Dataset.from_list(self.rows),
            environment_factory=self.environments,
            reward_funcs=reward_funcs,
            args=GRPOConfig(
                output_dir=str(folder),
                per_device_train_batch_size=ROWS,
                num_generations=GROUP,
                max_completion_length=300,
                max_tool_calling_iterations=3,
                use_vllm=True,
                vllm_max_model_length=2048,
                use_cpu=True,
                bf16=False,
                report_to=[],
                disable_tqdm=True,
            ),
            hybrid={"rollout_options": {"max_failed": 0.5}},
        )

    def roll(self, plan):
        """One rollout: of each row ids, mask and messages; and of each row the rewards, None where there is none."""
        self.plan.write_text(json.dumps(plan))
        self.trainer.session.sampler.forget()
        self.batch = self.trainer._generate_and_score_completions([dict(row) for row in self.rows])
        _, ids, masks, messages, *_ = self.generated
        rewards = [tuple(None if math.isnan(x) else x for x in row) for row in self.trainer._run.batch.rewards.tolist()]
        return list(zip(ids, masks, messages, strict=True)), rewards


@pytest.fixture(scope="module")
def rig(nodes, tmp_path_factory):
    rig = Rig(tmp_path_factory.mktemp("episodes"))
    yield rig
    rig.trainer.session.close()
    rig.environments.close()


def first_tool(messages):
    """What a row calls first, or None."""
    return next((m["name"] for m in messages if m["role"] == "tool"), None)


@pytest.mark.slow
def test_a_killed_environment_ends_its_trajectory_and_no_other(rig, caplog):
    rows, rewards = rig.roll({})
    called = [first_tool(messages) for _, _, messages in rows]
    victims = {called.index(tool): tool for tool in TOOLS}  # one that is called here, one on the event loop
    unscored = next(i for i in range(ROWS) if i not in victims)
    with caplog.at_level(logging.WARNING):
        after, scored = rig.roll({str(i): where for i, where in {**victims, unscored: "get_reward"}.items()})
    conversations = rig.trainer._run.batch.conversations
    for i in range(ROWS):
        if i in victims:
            ids, mask, _ = after[i]
            assert set(mask) == {0}
            assert ids == rows[i][0][: len(ids)]
            name = f"Counter.{victims[i]}"
            assert conversations[i].failure.startswith(f"tool '{victims[i]}' raised EnvironmentLostError: environment ")
            assert f"'{name}': worker" in conversations[i].failure
            assert re.search("died: Actor(Died|Unavailable)Error", conversations[i].failure)
            assert f"A trajectory broke off and is masked: {conversations[i].failure}" in caplog.text
        else:
            assert after[i] == rows[i]
            assert conversations[i].failure is None
        gone = i in victims or i == unscored
        assert scored[i] == ((None,) if gone else rewards[i])
        assert not gone or rig.batch["advantages"][i] == 0
    assert "cannot be scored by it: environment 'Counter.get_reward': worker" in caplog.text
    assert rig.trainer.session.metrics["hybrid/trajectories/failed"] == 2
    assert rig.roll({}) == (rows, rewards)  # in new processes


class Maze:
    """Goes on for as many steps as the row says; dies at the second where it says so."""

    async def reset(self, row):
        self.row, self.steps = row, 0
        return f" door {row['door']}"

    async def step(self, completion):
        self.steps += 1
        if self.row["deadly"] and self.steps == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return Step(observation=f"door {len(completion)}", done=self.steps > 2, reward=0.5)


@pytest.mark.slow
def test_an_episode_ends_with_its_environment(run, caplog):
    turns = ["left", "right", "forward"]
    tokenizer, kept = chat_tokenizer(turns), {}

    def seen(episode_reward, completion_ids, deadly, **columns):
        kept.update(rewards=list(episode_reward), ids=completion_ids, deadly=list(deadly))
        return [0.0] * len(episode_reward)

    rows = [{"prompt": [{"role": "user", "content": "go"}], "door": i, "deadly": i % 2 == 0} for i in range(2)]
    with remote_environment(Maze, workers=4, per_worker=1, cpus=0.1) as mazes, caplog.at_level(logging.WARNING):
        done = run(
            trlx_hybrid.GRPOTrainer,
            model=chatty_model(tokenizer, turns),
            processing_class=tokenizer,
            train_dataset=Dataset.from_list(rows),
            reward_funcs=[episode_reward, seen],
            rollout_func=episodes(mazes),
            per_device_train_batch_size=4,
            num_generations=2,
            max_completion_length=200,
            max_steps=1,
            vllm_max_model_length=400,
            hybrid={"engine": "vllm", "rollout": "multi_turn", "rollout_options": {"max_failed": 0.5}},
        )
    assert sorted(kept["deadly"]) == [False, False, True, True]
    assert kept["rewards"] == [None if deadly else 1.5 for deadly in kept["deadly"]]
    assert done.trainer.state.log_history[0]["hybrid/trajectories/failed"] == 2
    cause = "environment 'Maze.step' raised EnvironmentLostError: environment 'Maze.step': worker"
    assert caplog.text.count(cause) >= 2
