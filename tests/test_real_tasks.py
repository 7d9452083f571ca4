"""The tasks that real weights learn in `benchmarks.real`."""

import json

import pytest

from benchmarks import real_tasks
from benchmarks.real import KINDS
from benchmarks.real_tasks import TASKS, add, called, last_number, right


def said(text: str) -> list[dict]:
    return [{"role": "assistant", "content": text}]


def calling(name: str, arguments: object, *later: dict) -> list[dict]:
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return [{"role": "assistant", "content": "", "tool_calls": [call]}, *later]


@pytest.mark.parametrize("name", TASKS)
def test_held_out_questions_are_never_drawn_for_training(name) -> None:
    task = TASKS[name]
    rewards, held_out = task.split()
    asked = [row["prompt"][-1]["content"] for row in rewards.rows]
    kept = [row["prompt"][-1]["content"] for row in held_out]
    assert (len(asked), len(kept)) == (task.training, real_tasks.HELD_OUT)
    assert len({*asked, *kept}) == len(asked) + len(kept)
    assert task.split()[1] == held_out  # the seed of a run changes none of them
    assert task.learning_rates.keys() == task.steps.keys() == set(KINDS)
    assert sum(rewards.weights) == 1.0
    assert min(rewards.weights) > 0


def test_an_answer_is_the_last_number_that_the_model_says() -> None:
    assert last_number(said("12 + 30 is -42.")) == "-42"
    assert last_number(said("none")) == last_number([{"role": "assistant", "content": None}]) == ""
    answer = {"role": "tool", "name": "add", "content": "42"}
    assert last_number([*said("I ask"), answer]) == ""  # cut off before the model repeats it
    assert right([said("it is 42"), said("43"), said("042")], answer=[42, 42, 42]) == [1.0, 0.0, 0.0]


def test_reasoning_gym_judges_the_last_number() -> None:
    rewards, held_out = TASKS["reasoning-gym"].split()
    tasks = [row["gym"] for row in held_out]
    answers = [json.loads(task)["answer"] for task in tasks]
    assert rewards.right([said(f"The answer is {answer}") for answer in answers], gym=tasks) == [1.0] * len(tasks)
    assert rewards.right([said(f"{answer}1") for answer in answers], gym=tasks) == [0.0] * len(tasks)
    assert rewards.right([said("I do not know")], gym=tasks[:1]) == [0.0]


def test_half_of_the_tools_reward_is_for_the_call() -> None:
    completions = [
        calling("add", {"a": 1000, "b": 2000}, {"role": "tool", "name": "add", "content": "3000"}),
        calling("add", {"a": 2000, "b": 1000}),
        calling("add", {"a": 1, "b": 2}),
        calling("add", {"a": "1000", "b": 2000}),
        calling("add", {"a": 1000}),
        calling("add", [1000, 2000]),
        calling("multiply", {"a": 1000, "b": 2000}),
        said("3000"),
    ]
    assert called(completions, terms=[[1000, 2000]] * 8) == [1.0, 1.0, 0.5, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert add(1000, 2000) == 3000
    rewards, _ = TASKS["tool"].split()
    assert rewards.functions == [right, called]
    assert rewards.weights == [0.5, 0.5]
