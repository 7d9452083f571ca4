"""Conversations with tools that stay in flight over several optimizer steps, sampled by the real engine."""

import asyncio
from collections import Counter
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from transformers import TrainerCallback
from trlx_hybrid import GRPOTrainer
from trlx_hybrid.errors import ConfigError
from trlx_hybrid.testing.chat import chat_tokenizer, chatty_model

from tests.support.in_flight import Trajectories, Weights

STALENESS = 2
QUESTIONS = [[{"role": "user", "content": f"{'?' * i} {i * 7919 % 1000}"}] for i in range(16)]
CALLS = [f'<tool_call>\n{{"name": "add", "arguments": {{"a": {a}, "b": 2}}}}\n</tool_call>' for a in (1, 3, 5)]
TURNS = [*CALLS, '<tool_call>\n{"name": "add", "arguments": {"a": "x", "b": 2}}\n</tool_call>', "a plain answer", "no"]


def add(a: int, b: int) -> int:
    """Add.

    Args:
        a: one.
        b: two.
    """
    return a + b


def new_model():
    tokenizer = chat_tokenizer(TURNS)
    return chatty_model(tokenizer, TURNS), tokenizer


@pytest.fixture
def train(run, tmp_path):
    """Train with tools; returns the run, its batches, and the weights of each step."""

    def start(folder=None, *, options=None, callbacks=(), **given):
        model, tokenizer = new_model()
        kept, weights = Trajectories(), Weights()
        options = {"tools": "main", "progress": False, "max_staleness": STALENESS} | (options or {})
        settings = {
            "tools": [add],
            "max_steps": 4,
            "max_completion_length": 90,
            "max_tool_calling_iterations": 3,
            "vllm_max_model_length": 1024,
            "gradient_checkpointing": False,
            "loss_type": "grpo",
            "train_dataset": Dataset.from_dict({"prompt": QUESTIONS}),
            "hybrid": {"engine": "vllm", "rollout": "multi_turn", "rollout_options": options},
            "output_dir": str(folder or tmp_path / "run"),
        }
        done = run(
            GRPOTrainer,
            model=model,
            processing_class=tokenizer,
            plugins=[kept],
            callbacks=[weights, *callbacks],
            **settings | given,
        )
        return done, kept.batches, weights.of_version

    return start


@dataclass
class Whole:
    """What is kept of a run that other runs are compared with."""

    folder: Path
    batches: list
    of_version: list
    weights: dict
    logs: list
    history: list
    prompts: list


@pytest.fixture(scope="module")
def kept():
    return {}


@pytest.fixture
def whole(train, kept, tmp_path_factory):
    """A run that saves at each step; trained once for the module."""
    if not kept:
        folder = tmp_path_factory.mktemp("whole")
        done, batches, of_version = train(folder, save_strategy="steps", save_steps=1)
        history, prompts = done.trainer.state.log_history[:-1], done.recorder.prompts
        kept["whole"] = Whole(folder, batches, of_version, done.weights(), done.logs, history, prompts)
        done.close()
    return kept["whole"]


def test_each_token_has_the_log_prob_of_the_version_that_sampled_it(whole):
    model, _ = new_model()
    model.eval()
    ages, inside, observed = set(), 0, 0
    for step, batch in enumerate(whole.batches):
        for trajectory in batch:
            versions, mask = trajectory.weight_versions, trajectory.loss_mask
            assert len(versions) == len(mask) == len(trajectory.completion_ids) == len(trajectory.logprobs)
            assert versions == sorted(versions)
            ages.add(step - versions[0])
            observed += mask.count(0)
            changes = [at for at in range(1, len(versions)) if versions[at] != versions[at - 1]]
            inside += sum(mask[at] and mask[at - 1] for at in changes)  # within a turn
            ids = torch.tensor([trajectory.prompt_ids + trajectory.completion_ids])
            for version in set(versions):
                model.load_state_dict(whole.of_version[version])
                with torch.no_grad():
                    scored = model(ids).logits[0, len(trajectory.prompt_ids) - 1 : -1].float().log_softmax(-1)
                for token, of_token in enumerate(versions):
                    if of_token == version:
                        wanted = scored[token, trajectory.completion_ids[token]].item() * mask[token]
                        assert trajectory.logprobs[token] == pytest.approx(wanted, abs=1e-5)
    assert max(ages) == STALENESS  # conversations were in flight, and none for longer
    assert inside > 0
    assert observed > 100
    assert max(entry["hybrid/staleness/max"] for entry in whole.history) == STALENESS
    assert max(entry["hybrid/in_flight/rows"] for entry in whole.history) > 0


def test_each_prompt_is_trained_once_and_metrics_are_those_of_the_batch(whole):
    groups = [whole.prompts[at] for at in range(0, len(whole.prompts), 4)]
    assert all(whole.prompts[4 * at : 4 * at + 4] == [group] * 4 for at, group in enumerate(groups))
    assert len({str(group) for group in groups}) == len(groups) == 2 * len(whole.batches)
    for entry, batch in zip(whole.history, whole.batches, strict=True):
        turns = [sum(message["role"] == "assistant" for message in t.completion) for t in batch]
        assert entry["hybrid/turns/mean"] == sum(turns) / len(turns)
        calls = [sum(message["role"] == "tool" for message in t.completion) for t in batch]
        assert entry["tools/call_frequency"] >= sum(calls) / len(calls)  # calls of a last turn may lose their answers
    assert max(entry["tools/call_frequency"] for entry in whole.history) > 1


@pytest.mark.parametrize("step", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_resumed_run_goes_on_to_the_token(train, whole, step):
    again, resumed, _ = train(resume=str(whole.folder / f"checkpoint-{step}"))
    assert resumed == whole.batches[step:]  # tokens, masks, log-probs, versions, messages and rewards
    assert again.logs[:-1] == whole.logs[:-1]  # the last is the mean loss of the steps that this process took
    assert all(torch.equal(value, whole.weights[name]) for name, value in again.weights().items())


class Evaluates(TrainerCallback):
    """Evaluates after each step: the setting of a resumed run is that of its checkpoint."""

    def on_step_end(self, args, state, control, **kwargs):
        control.should_evaluate = True


def test_an_evaluation_beside_it_changes_no_token(train, whole):
    evaluated = Dataset.from_dict({"prompt": QUESTIONS[:2]})
    given = {"eval_dataset": evaluated, "callbacks": [Evaluates()], "resume": str(whole.folder / "checkpoint-1")}
    done, batches, _ = train(**given)
    for one, other in zip(chain(*whole.batches[1:]), chain(*batches), strict=True):
        assert (one.completion_ids, one.weight_versions) == (other.completion_ids, other.weight_versions)
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
    assert sum("eval_loss" in entry for entry in done.trainer.state.log_history) == len(batches)


class Steps(TrainerCallback):
    """Writes down which steps have ended, and opens a gate at the end of the first."""

    def __init__(self, events, gate):
        self.events, self.gate = events, gate

    def on_step_end(self, args, state, control, **kwargs):
        self.events.append(f"step {state.global_step}")
        self.gate.set()


def test_a_slow_tool_holds_no_step_up_and_a_lost_one_masks_its_row(train, gate, caplog):
    events = []

    def add(a: int, b: int) -> str:
        """Add.

        Args:
            a: one.
            b: two.
        """
        if not events:
            events.append("called")
            gate.wait()
            events.append("answered")
        elif len(events) > 1 and a == 5:
            raise asyncio.CancelledError
        return f"{a} {b}"

    options = {"tools": "thread", "max_failed": 1.0}
    done, batches, _ = train(tools=[add], options=options, callbacks=[Steps(events, gate)], max_steps=3)
    assert events[:3] == ["called", "step 1", "answered"]
    waited = [t for batch in batches[1:] for t in batch if t.weight_versions[0] == 0 and t.weight_versions[-1] > 0]
    assert waited
    masked = [t for batch in batches for t in batch if not any(t.loss_mask)]
    history = done.trainer.state.log_history[:-1]
    assert len(masked) == sum(entry["hybrid/trajectories/failed"] for entry in history) > 0
    assert "broke off and is masked: tool 'add' raised CancelledError" in caplog.text


class Empty:
    """An environment without tools."""

    def reset(self, **row):
        return None


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"environment_factory": Empty}, "TRL resets its environments before each batch"),
        (
            {"hybrid": {"engine": "vllm", "rollout": "single_turn", "rollout_options": {"max_staleness": 2}}},
            r"conversations of the rollout 'single_turn'.* cannot be interrupted",
        ),
    ],
)
def test_what_it_cannot_serve_is_refused_before_an_engine_is_built(train, given, reason):
    with pytest.raises(ConfigError, match=reason):
        train(train=False, **given)


def test_without_staleness_no_conversation_stays_in_flight(train):
    done, *_ = train(train=False, options={"max_staleness": 0})
    assert done.trainer._run.in_flight is None


@pytest.mark.parametrize(
    ("size", "kind"),
    [
        pytest.param(1, "tools", marks=pytest.mark.slow),
        (2, "tools"),
        pytest.param(2, "episodes", marks=pytest.mark.slow),
    ],
    ids=["an engine on each", "one over both", "one over both, episodes"],
)
def test_two_ranks(two_processes, size, kind):
    ranks = two_processes(Path(__file__).parent / "scripts" / "in_flight_distributed.py", size, kind)
    for rank in ranks:
        assert [len(batch) for batch in rank["whole"]] == [4] * 4
        ages = [step - min(t["weight_versions"]) for step, batch in enumerate(rank["whole"]) for t in batch]
        assert max(ages) == STALENESS
        assert any(0 in t["loss_mask"] for batch in rank["whole"] for t in batch)
        prompts = [[t["prompt_ids"] for t in batch] for batch in rank["whole"][:2] + rank["resumed"]]
        if kind == "tools":
            assert rank["resumed"] == rank["whole"][2:]
        else:  # what was unfinished has begun anew
            assert sorted(chain(*prompts)) == sorted(t["prompt_ids"] for batch in rank["whole"] for t in batch)
    seen = Counter(tuple(t["prompt_ids"]) for rank in ranks for batch in rank["whole"] for t in batch)
    assert set(seen.values()) == {2}
