"""Rows in flight on engines of their own, which go on while the trainer trains."""

import os
import signal
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from transformers import TrainerCallback
from trlx_hybrid import GRPOTrainer, HybridConfig
from trlx_hybrid.testing.chat import chat_tokenizer, chatty_model
from trlx_hybrid.testing.models import character_tokenizer, sorting_prompts, tiny_model
from trlx_hybrid_multiturn import Step, episodes

from tests.support.in_flight import Trajectories, Weights

sys.path.insert(0, str(Path(__file__).parent))
from remote_training import Trained, gone, pids

STALENESS, LENGTH, DEADLINE = 2, 32, 60
ENDS = character_tokenizer().convert_tokens_to_ids([*"0123456789aeiou"])
SETTINGS = {
    "max_completion_length": LENGTH,
    "generation_kwargs": {"stop_token_ids": ENDS},
    "loss_type": "grpo",
    "learning_rate": 0.03,
    "max_steps": 6,
}


IN_FLIGHT = {"max_staleness": STALENESS, "in_flight": 24}  # as many as may begin
HYBRID = HybridConfig(engine="remote", rollout_options=IN_FLIGHT)


def wait_for(done):
    deadline = time.monotonic() + DEADLINE
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Beside(TrainerCallback):
    """Does things with the engines while they sample, each at the end of a step."""

    def __init__(self, **at):
        self.at, self.trained = at, None

    def on_step_end(self, args, state, control, **kwargs):
        does = self.at.get(f"step_{state.global_step}")
        if does is not None:
            does(self.trained.session.live_engine)


class Watched(Trained):
    """A run whose batches, weights and history are kept."""

    def __init__(self, folder, beside=None, resume=None, **settings):
        kept, weights = Trajectories(), Weights()
        callbacks = [weights] if beside is None else [weights, beside]
        if beside is not None:
            beside.trained = self
        self.batches, self.of_version = kept.batches, weights.of_version
        super().__init__(folder, HYBRID, [kept], callbacks, resume, **SETTINGS | settings)
        self.history = [log for log in self.trainer.state.log_history if "loss" in log]

    def check(self):
        """Each token has the log-prob of the weights that sampled it, and none is older than it may be."""
        model = tiny_model().eval()
        for step, batch in enumerate(self.batches):
            for trajectory in batch:
                versions = trajectory.weight_versions
                assert versions == sorted(versions)
                assert 0 <= step - versions[0] <= STALENESS
                assert versions[-1] <= step
                assert len(trajectory.completion_ids) <= LENGTH
                ids = torch.tensor([trajectory.prompt_ids + trajectory.completion_ids])
                for version in set(versions):
                    model.load_state_dict(self.of_version[version])
                    with torch.no_grad():
                        scored = model(ids).logits[0, len(trajectory.prompt_ids) - 1 : -1].log_softmax(-1)
                    for token, of_token in enumerate(versions):
                        if of_token == version:
                            wanted = scored[token, trajectory.completion_ids[token]].item()
                            assert trajectory.logprobs[token] == pytest.approx(wanted, abs=1e-5)

    def prompts(self):
        return Counter(tuple(t.prompt_ids) for batch in self.batches for t in batch)

    def close(self):
        started = pids(self.session.live_engine)
        self.session.close()
        gone(started)


def nothing_to_do(engine):
    """Wait until the engines have sampled all that they were asked for."""
    import ray

    def asked():
        left = lambda actor: sum(len(stream.tasks) for stream in actor._streams.values())  # noqa: E731
        return ray.get([r.handle.__ray_call__.remote(left) for r in engine.pool.replicas.values()])

    wait_for(lambda: not any(asked()))


@pytest.fixture(scope="module")
def whole(session_cluster, tmp_path_factory):
    """A run that saves and evaluates, and whose engine is killed while it trains."""
    killed = []

    def kill(engine):
        killed.extend(pids(engine))
        os.kill(killed[0][0], signal.SIGKILL)

    folder = tmp_path_factory.mktemp("whole")
    saving = {"save_strategy": "steps", "save_steps": 2}
    evaluated = {"eval_strategy": "steps", "eval_steps": 2, "eval_dataset": sorting_prompts(8)}
    trained = Watched(folder, Beside(step_3=nothing_to_do, step_5=kill), **saving, **evaluated)
    trained.folder = folder
    trained.close()
    gone(killed)
    return trained


def test_each_token_has_the_log_prob_of_the_version_that_sampled_it(whole):
    whole.check()
    assert set(whole.prompts().values()) == {4}
    assert len(whole.prompts()) == 2 * len(whole.batches) == 12
    assert sum("eval_loss" in log for log in whole.trainer.state.log_history) == 3


def test_engines_go_on_while_the_trainer_trains(whole):
    """What was in flight at the end of the third step was complete before the fourth batch was asked for."""
    assert "also while the trainer trains" in " ".join(whole.session.notes)
    assert all(version < 3 for t in whole.batches[3] for version in t.weight_versions)
    assert max(log["hybrid/staleness/max"] for log in whole.history) > 0


def test_a_resumed_run_goes_on_with_the_rows_in_flight(whole, tmp_path):
    resumed = Watched(tmp_path, resume=str(whole.folder / "checkpoint-4"))
    early = Counter(tuple(t.prompt_ids) for batch in whole.batches[:4] for t in batch)
    assert len(resumed.batches) == 2
    assert early + resumed.prompts() == whole.prompts()  # which rows a batch has is decided by the time they take
    held = torch.load(whole.folder / "checkpoint-4" / "trlx_hybrid_in_flight_0.pt", weights_only=False)
    begun = {tuple(group["prompt_ids"]): group["rows"] for group in held["pool"]["groups"]}
    trained = Counter(tuple(t.completion_ids) for batch in resumed.batches for t in batch)
    over = [tuple(row["token_ids"]) for rows in begun.values() for row in rows if row["finish_reason"]]
    assert over
    assert all(trained[row] for row in over)
    resumed.close()


def add(a: int, b: int) -> int:
    """Add.

    Args:
        a: one.
        b: two.
    """
    return a + b


class Doubts:
    """Answers twice."""

    def reset(self, row):
        self.left = 2

    def step(self, completion):
        self.left -= 1
        return Step(observation="sure?", done=self.left < 0, reward=float(len(completion) % 7))


class Waits(TrainerCallback):
    """Waits at the end of each step until the engines have sampled all that was left to them."""

    def on_step_end(self, args, state, control, **kwargs):
        nothing_to_do(self.trainer.session.live_engine)


@pytest.mark.parametrize("kind", ["tools", "an environment"])
def test_conversations_and_episodes_go_on_while_the_trainer_trains(session_cluster, run, tmp_path, kind):
    """Whole turns that were begun before a step ended are of its weights, and none is sampled by two versions."""
    turns = ['<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>', "a plain answer", "no"]
    tokenizer, kept, weights, waits = chat_tokenizer(turns), Trajectories(), Weights(), Waits()
    questions = [[{"role": "user", "content": f"{'?' * i} {i * 7919 % 1000}"}] for i in range(16)]
    answers = {"tools": [add]} if kind == "tools" else {"rollout_func": episodes(Doubts)}
    options = {"max_staleness": STALENESS, "tools": "main", "progress": False}
    done = run(
        GRPOTrainer,
        model=chatty_model(tokenizer, turns),
        processing_class=tokenizer,
        plugins=[kept],
        callbacks=[weights, waits],
        max_steps=4,
        max_completion_length=90 if kind == "tools" else 300,
        max_tool_calling_iterations=3,
        vllm_max_model_length=1024,
        loss_type="grpo",
        train_dataset=Dataset.from_dict({"prompt": questions}),
        hybrid={"engine": "remote", "rollout": "multi_turn", "rollout_options": options},
        eval_strategy="steps",
        eval_steps=2,
        eval_dataset=Dataset.from_dict({"prompt": questions[:2]}),
        save_strategy="steps",
        save_steps=2,
        output_dir=str(tmp_path / "run"),
        train=False,
        **answers,
    )
    waits.trainer = done.trainer
    done.trainer.train()
    history = [log for log in done.trainer.state.log_history if "loss" in log]
    assert "also while the trainer trains" in " ".join(done.trainer.session.notes)
    prompts = Counter(tuple(t.prompt_ids) for batch in kept.batches for t in batch)
    assert set(prompts.values()) == {4}
    if kind == "tools":
        assert max(log["tools/call_frequency"] for log in history) > 0
    ages = [step - t.weight_versions[0] for step, batch in enumerate(kept.batches) for t in batch]
    assert 0 < max(ages) <= STALENESS
    model, several = chatty_model(tokenizer, turns).eval(), 0
    for t in (t for batch in kept.batches for t in batch):
        versions = t.weight_versions
        sampled = [at for at, own in enumerate(t.loss_mask) if own]
        inside = [at for at in sampled if at and t.loss_mask[at - 1]]
        assert all(versions[at] == versions[at - 1] for at in inside)
        several += len({versions[at] for at in sampled}) > 1
        for version in {versions[at] for at in sampled}:
            model.load_state_dict(weights.of_version[version])
            with torch.no_grad():
                scored = model(torch.tensor([t.prompt_ids + t.completion_ids])).logits[0].log_softmax(-1)
            for at in sampled:
                if versions[at] == version:
                    wanted = scored[len(t.prompt_ids) + at - 1, t.completion_ids[at]].item()
                    assert t.logprobs[at] == pytest.approx(wanted, abs=1e-5)
    assert several  # turns of one row by several versions
    done.close()
