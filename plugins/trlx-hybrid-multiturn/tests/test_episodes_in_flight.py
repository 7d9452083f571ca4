"""Episodes with environments, and agents, that stay in flight over several optimizer steps."""

import importlib
import threading
from itertools import chain
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from transformers import TrainerCallback
from trlx_hybrid import GRPOTrainer
from trlx_hybrid.testing.chat import chat_tokenizer, chatty_model
from trlx_hybrid_multiturn import Step, episode_reward, episodes
from trlx_hybrid_multiturn.gateway import agents

from tests.support.agents import TURNS, doubts, rewrites
from tests.support.branches import branches_of
from tests.support.in_flight import Trajectories, Weights

STALENESS = 2
QUESTIONS = [[{"role": "user", "content": f"{'?' * i} {i * 7919 % 1000}"}] for i in range(16)]


class Doubts:
    """Answers a few times, according to the question, and pays for each answer."""

    def reset(self, row):
        self.left = len(row["prompt"][0]["content"]) % 3

    def step(self, completion):
        self.left -= 1
        return Step(observation=f"sure? {len(completion)}", done=self.left < 0, reward=1.0)


KINDS = {"an environment": episodes(Doubts), "an agent": agents(doubts), "branches": agents(rewrites)}


def varied(completion_ids, **columns):
    """A second reward, by which the weights move."""
    return [float(len(set(ids))) for ids in completion_ids]


@pytest.fixture
def train(run, tmp_path):
    """Train with episodes; returns the run, its batches, and the weights of each version."""

    def start(rollout_func, *, options=None, callbacks=(), **given):
        tokenizer, kept, weights = chat_tokenizer(TURNS), Trajectories(), Weights()
        options = {"tools": "main", "progress": False, "max_staleness": STALENESS} | (options or {})
        settings = {
            "max_steps": 6,
            "max_completion_length": 800,
            "vllm_max_model_length": 1024,
            "gradient_checkpointing": False,
            "loss_type": "grpo",
            "train_dataset": Dataset.from_dict({"prompt": QUESTIONS}),
            "rollout_func": rollout_func,
            "reward_funcs": [episode_reward, varied],
            "reward_weights": [1.0, 0.1],
            "hybrid": {"engine": "vllm", "rollout_options": options},
            "output_dir": str(tmp_path / "run"),
        }
        done = run(
            GRPOTrainer,
            model=chatty_model(tokenizer, TURNS),
            processing_class=tokenizer,
            plugins=[kept],
            callbacks=[weights, *callbacks],
            **settings | given,
        )
        return done, kept.batches, weights.of_version

    return start


@pytest.mark.parametrize("kind", KINDS)
def test_each_token_has_the_log_prob_of_the_version_that_sampled_it(train, kind):
    done, batches, of_version = train(KINDS[kind], max_steps=4)
    ages, inside, found = set(), 0, []
    for step, batch in enumerate(batches):
        for t in batch:
            versions, mask = t.weight_versions, t.loss_mask
            assert len(versions) == len(mask) == len(t.completion_ids) == len(t.logprobs)
            ages.add(step - versions[0])
            changes = [at for at in range(1, len(versions)) if versions[at] != versions[at - 1]]
            inside += sum(mask[at] and mask[at - 1] for at in changes)  # within a turn
            found.append(len(branches_of(t, of_version)))
    assert max(ages) == STALENESS
    assert inside > 0
    assert not all(torch.equal(value, of_version[-1][name]) for name, value in of_version[0].items())
    history = done.trainer.state.log_history[:-1]
    assert max(entry["hybrid/staleness/max"] for entry in history) == STALENESS
    assert max(entry["hybrid/in_flight/tokens"] for entry in history) > 0
    assert all(entry.get("sampling/current_logp_difference", 0.0) < 1e-5 for entry in history)
    assert max(found) == (3 if kind == "branches" else 1)


@pytest.mark.parametrize("kind", ["an environment", "an agent"])
def test_each_prompt_is_trained_once_with_its_own_reward(train, kind):
    done, batches, _ = train(KINDS[kind])
    shown = [tuple(batch[at].prompt_ids) for batch in batches for at in (0, 4)]
    assert len(set(shown)) == len(shown) == 2 * len(batches)
    for batch in batches:
        for t in batch:
            blocks = sum(t.loss_mask[at] and not t.loss_mask[at - 1] for at in range(1, len(t.loss_mask)))
            assert t.reward == pytest.approx(blocks + 1 + 0.1 * len(set(t.completion_ids)))
    assert done.trainer.session.weight_version == len(batches)


@pytest.mark.parametrize("kind", ["an environment", "an agent"])
def test_a_resumed_run_keeps_the_episodes_that_are_over_and_begins_the_others_anew(train, tmp_path, kind):
    saving = {"save_strategy": "steps", "save_steps": 1, "max_steps": 4}
    whole, batches, _ = train(KINDS[kind], **saving)
    whole.close()
    checkpoint = str(tmp_path / "run" / "checkpoint-2")
    pool = torch.load(f"{checkpoint}/trlx_hybrid_in_flight_0.pt", weights_only=True)["pool"]
    rows = [row for group in pool["groups"] for row in group["rows"]]
    kept = [row["conversation"]["completion_ids"] for row in rows if row["conversation"] is not None]
    assert 0 < len(kept) < len(rows)
    resumed = []
    for name in ("again", "once more"):
        again, found, _ = train(KINDS[kind], resume=checkpoint, output_dir=str(tmp_path / name), **saving)
        resumed.append(found)
        again.close()
    trained = [t.completion_ids for t in chain(*resumed[0])]
    assert all(ids in trained for ids in kept)
    prompts = [tuple(t.prompt_ids) for t in chain(*batches[:2], *resumed[0])][::4]
    assert len(set(prompts)) == len(prompts) == 8
    if kind == "an environment":
        assert resumed[0] == resumed[1]


class Open(Doubts):
    """Knows which of its kind were opened, and which were closed."""

    opened, closed = [], []

    def reset(self, row):
        super().reset(row)
        Open.opened.append(self)

    def close(self):
        Open.closed.append(self)


class OpenAsync(Open):
    """Closes on an event loop."""

    async def close(self):
        super().close()


class Stops(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step == 2


@pytest.mark.parametrize(("environment", "tools"), [(Open, "main"), (Open, "thread"), (OpenAsync, "thread")])
def test_a_run_that_stops_early_closes_the_environments_that_are_open(train, environment, tools):
    Open.opened, Open.closed = [], []
    done, batches, _ = train(episodes(environment), callbacks=[Stops()], options={"tools": tools})
    done.close()
    assert len(Open.opened) > sum(map(len, batches)) == 16
    assert len(Open.closed) == len(Open.opened)
    assert set(Open.closed) == set(Open.opened)


def test_an_environment_that_does_not_close_is_named(train, caplog, monkeypatch):
    monkeypatch.setattr("trlx_hybrid_multiturn.tools.runner.CLOSE_SECONDS", 0.2)
    hanging = threading.Event()

    class Hangs(Doubts):
        def close(self):
            if done:
                hanging.wait(20)

    done = []
    run, _, _ = train(episodes(Hangs), callbacks=[Stops()], options={"tools": "thread"})
    done.append(True)
    run.close()
    hanging.set()
    assert any("environments were not closed: Hangs." in record.message for record in caplog.records)


@pytest.mark.parametrize("tools", ["main", "thread"])
def test_an_environment_that_fails_to_close_at_the_end_is_named(train, caplog, tools):
    class Fails(Doubts):
        def close(self):
            if done:
                raise ValueError("still locked")

    done = []
    run, _, _ = train(episodes(Fails), callbacks=[Stops()], options={"tools": tools})
    done.append(True)
    run.close()
    assert any("not closed: environment 'Fails.close' raised" in record.message for record in caplog.records)


class Evaluates(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        control.should_evaluate = True


def test_an_evaluation_beside_it_changes_no_token(train):
    _, usual, _ = train(KINDS["an environment"], max_steps=3)
    evaluated = {"eval_dataset": Dataset.from_dict({"prompt": QUESTIONS[:2]}), "callbacks": [Evaluates()]}
    done, batches, _ = train(KINDS["an environment"], max_steps=3, **evaluated)
    for one, other in zip(chain(*usual), chain(*batches), strict=True):
        assert (one.completion_ids, one.weight_versions) == (other.completion_ids, other.weight_versions)
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
    assert sum("eval_loss" in entry for entry in done.trainer.state.log_history) == len(batches)


class Opens(TrainerCallback):
    """Writes down which steps have ended, and opens a gate at the end of the first."""

    def __init__(self, events, gate):
        self.events, self.gate = events, gate

    def on_step_end(self, args, state, control, **kwargs):
        self.events.append(f"step {state.global_step}")
        self.gate.set()


def test_a_slow_agent_holds_no_step_up_and_one_that_fails_is_masked(train, gate):
    events, first = [], threading.Lock()

    def slow(base_url, row):
        import openai

        with openai.OpenAI(base_url=base_url, api_key="none") as client:
            done = client.chat.completions.create(model="any", messages=row["prompt"])
            if first.acquire(blocking=False):
                events.append("waits")
                gate.wait()
                events.append("goes on")
            if len(done.choices[0].message.content or "") % 2:
                raise RuntimeError("it gave up")
            client.chat.completions.create(
                model="any", messages=[*row["prompt"], done.choices[0].message.model_dump(), *row["prompt"]]
            )
        return 1.0

    options = {"max_failed": 1.0}
    done, batches, _ = train(agents(slow), options=options, callbacks=[Opens(events, gate)], max_steps=4)
    assert events[:3] == ["waits", "step 1", "goes on"]
    waited = [t for batch in batches[1:] for t in batch if t.weight_versions[0] == 0 and t.weight_versions[-1] > 0]
    assert waited
    masked = [t for batch in batches for t in batch if not any(t.loss_mask)]
    history = done.trainer.state.log_history[:-1]
    assert len(masked) == sum(entry["hybrid/trajectories/failed"] for entry in history) > 0


def test_agents_in_processes_stay_in_flight(train, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "tests" / "support"))
    beside = importlib.import_module("agents")  # a process imports it by its name, as a module beside a script
    _, batches, _ = train(agents(beside.doubts, processes=1), max_steps=3)
    assert max(step - t.weight_versions[0] for step, batch in enumerate(batches) for t in batch) > 0
    assert all(t.reward for t in chain(*batches))
