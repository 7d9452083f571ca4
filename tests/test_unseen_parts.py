"""TRL's own reward functions that cannot see what they reward are named after the first batch, with the reason."""

import functools
from importlib.resources import files

import pytest
import trlx_hybrid
from datasets import Dataset
from trl.chat_template_utils import add_response_schema
from trl.rewards import think_format_reward
from trlx_hybrid.testing.chat import chat_tokenizer, chatty_model

TURNS = ["<think>\nfour\n</think>\n4", "four\n</think>\n4", "4"]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 2}}\n</tool_call>'
MEAN = "rewards/think_format_reward/mean"


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: one.
        b: the other.
    """
    return a + b


def tags(completions, **kwargs):
    """Read all messages, as a user's own function may."""
    return [float("</think>" in str(completion)) for completion in completions]


@functools.wraps(think_format_reward)
def completed(completions, **kwargs):
    """Put the tag there: the way out that the warning names."""
    whole = [[{**message, "content": "<think>" + message["content"]} for message in c] for c in completions]
    return think_format_reward(whole, **kwargs)


completed.__name__ = "completed"


@pytest.fixture
def warned(run, caplog):
    """Return what a run says of its reward functions, and the line of its log."""

    def train(template, functions, turns=TURNS, parsed=False, steps=1, **given):
        tokenizer = chat_tokenizer(turns)
        tokenizer.chat_template = files("trl").joinpath("chat_templates", f"{template}.jinja").read_text()
        finished = run(
            trlx_hybrid.GRPOTrainer,
            model=chatty_model(tokenizer, turns),
            processing_class=add_response_schema(tokenizer) if parsed else tokenizer,
            reward_funcs=functions,
            train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": f"{i}+2"}]} for i in range(8)]),
            hybrid={"engine": "vllm"},
            max_steps=steps,
            vllm_max_model_length=800,
            **{"max_completion_length": 40} | given,
        )
        said = [r.getMessage() for r in caplog.records if r.getMessage().startswith("Reward function")]
        caplog.clear()
        return said, finished.trainer.state.log_history[0]

    return train


def test_a_template_that_opens_the_think_block_is_said(warned):
    partial = functools.partial(think_format_reward, further=1)
    partial.__name__ = "partial"
    said, log = warned("qwen3_5_think", [think_format_reward, partial, tags, completed], steps=2)
    assert log[MEAN] == 0.0  # TRL's
    assert log["rewards/tags/mean"] > 0.0
    assert log["rewards/completed/mean"] > 0.0
    assert len(said) == 2, said  # each once in two steps; a user's own function is none of TRL's
    assert all("'think_format_reward' of TRL is 0 wherever the prompt ends in <think>, as 8 of 8" in s for s in said)
    assert all("Wrap the function in one of your own that puts <think> before" in s for s in said)


def test_a_template_that_opens_none_is_not_warned_of(warned):
    said, _ = warned("qwen3", [think_format_reward, tags], max_completion_length=1)
    assert said == []


def test_reasoning_that_a_response_template_moves_is_said(warned):
    said, log = warned("qwen3", [think_format_reward], parsed=True)
    assert log[MEAN] == 0.0
    assert len(said) == 1, said
    assert "moves the reasoning to a field of its own" in said[0]


def test_messages_after_the_first_are_said_to_go_unread(warned):
    said, log = warned("qwen3", [think_format_reward, tags], turns=[CALL, TURNS[0]], tools=[add])
    assert log[MEAN] == 0.0
    assert len(said) == 2, said
    assert "moves the reasoning to a field of its own" in said[0]
    assert "reads the first message of a completion only" in said[1]
