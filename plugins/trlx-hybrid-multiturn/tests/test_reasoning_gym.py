"""Tasks of reasoning-gym as environments."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from trlx_hybrid.errors import ConfigError
from trlx_hybrid_multiturn import Step
from trlx_hybrid_multiturn.adapters.reasoning_gym import from_reasoning_gym, last_answer


def test_a_wrong_answer_may_be_mended() -> None:
    gym = from_reasoning_gym("chain_sum", size=5, attempts=2, min_terms=2, max_terms=2)
    row = gym.dataset()[3]
    assert row["prompt"] == [{"role": "user", "content": gym.tasks[3]["question"]}]
    environment = gym()
    assert environment.reset(row) is None
    assert environment.step("no idea") == Step(observation="That is not right. Try again.")
    assert environment.step(f"<think>x</think> {gym.tasks[3]['answer']} ") == Step(done=True, reward=1.0)


@pytest.mark.parametrize("name", ["pool_matrix", "list_functions"])
def test_the_task_that_is_scored_is_the_one_that_was_asked(name: str) -> None:
    """Both kinds come out differently when they are made again: one draws from NumPy's generator, one keeps a state."""
    before = np.random.get_state()[1].tolist()
    gym = from_reasoning_gym(name, size=20, seed=1, attempts=1)
    assert np.random.get_state()[1].tolist() == before
    rows = gym.dataset()
    assert [row["prompt"] for row in rows] == [
        row["prompt"] for row in from_reasoning_gym(name, size=20, seed=1).dataset()
    ]

    def asked_and_scored(row: dict) -> bool:
        environment = gym()
        environment.reset(row)
        same = environment._task["question"] == row["prompt"][0]["content"]
        return same and environment.step(environment._task["answer"]) == Step(done=True, reward=1.0)

    with ThreadPoolExecutor(16) as threads:
        assert all(threads.map(asked_and_scored, list(rows) * 5))


def test_attempts_end() -> None:
    gym = from_reasoning_gym("chain_sum", size=2, attempts=1)
    environment = gym()
    environment.reset(gym.dataset()[0])
    step = environment.step("no idea")
    assert step.done
    assert step.reward is not None
    assert step.reward < 0.1


@pytest.mark.parametrize(
    "completion", ["42", " 42\n", "<think>41</think>\n42", "so <answer>42</answer>.", "<answer>41</answer><answer> 42"]
)
def test_last_answer(completion: str) -> None:
    assert last_answer(completion) == "42"


def test_unknown_tasks_and_settings_are_refused() -> None:
    for given in ({"name": "no_such_tasks"}, {"name": "chain_sum", "digits": 3}, {"name": "chain_sum", "min_terms": 0}):
        with pytest.raises(ConfigError, match="reasoning-gym makes no tasks"):
            from_reasoning_gym(**given)
    with pytest.raises(ConfigError, match="at least one attempt"):
        from_reasoning_gym("chain_sum", attempts=0)
