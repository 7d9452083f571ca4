"""Answers that are longer than what a model can be shown, wherever a tool runs, and observations like them."""

import sys
from pathlib import Path

import pytest
from trlx_hybrid_multiturn.environment import CheckedEnvironment, Step
from trlx_hybrid_multiturn.loop import Loop
from trlx_hybrid_multiturn.options import MultiTurnOptions
from trlx_hybrid_multiturn.tools.runner import ToolRunner

sys.path.insert(0, str(Path(__file__).parent))
from test_tool_calls import Idle, call, event_loop, pool, run  # noqa: F401

SHOWN = 1 << 20  # characters
LONG = 5 << 20
END = f" of its {LONG:,} characters are shown.]"


def talk():
    return "x" * LONG


async def talk_later():
    return "x" * LONG


def complain():
    raise ValueError("x" * LONG)


@pytest.mark.parametrize("mode", ["thread", "process", "main"])
def test_the_model_is_shown_the_beginning_of_a_tools_answer_and_goes_on(pool, mode):  # noqa: F811
    messages, conversation = run(pool(tools=mode), [call("talk"), call("complain")], [talk, complain])
    answer, error = [message["content"] for message in messages]
    assert len(answer) <= SHOWN
    assert answer.endswith(END)
    assert len(error) <= SHOWN
    assert (conversation.calls, conversation.failed_calls) == (2, 1)


def test_so_it_is_of_an_asynchronous_ones(pool, event_loop):  # noqa: F811
    messages, _ = run(pool(), [call("talk_later")], [talk_later], event_loop=event_loop[0])
    assert len(messages[0]["content"]) <= SHOWN
    assert messages[0]["content"].endswith(END)


class Talks:
    def reset(self, row):
        return "x" * LONG

    def step(self, completion):
        return Step(observation=[{"role": "user", "content": "x" * LONG, "name": "kept"}], reward=1.0)


def test_so_it_is_of_what_environments_show():
    runner, seen = ToolRunner(MultiTurnOptions()), []

    async def play():
        environment = CheckedEnvironment(Talks, runner, None)
        seen.extend([await environment.reset({}), await environment.step("")])

    Loop(Idle(), Idle(), width=1).run([play()])
    runner.close()
    first, step = seen
    (message,) = step.observation
    assert max(len(first), len(message["content"])) <= SHOWN
    assert first.endswith(END)
    assert message["content"].endswith(END)
    assert (message["role"], message["name"], step.reward) == ("user", "kept", 1.0)


def test_the_limit_is_an_option(pool):  # noqa: F811
    messages, _ = run(pool(max_answer=1000), [call("talk")], [talk])
    assert messages[0]["content"].startswith("x" * 800 + "\n[This answer was cut: 800 of its ")
