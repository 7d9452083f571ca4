"""Tasks of reasoning-gym, with more than one attempt: a wrong answer is said to be wrong, and may be mended."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from trlx_hybrid.errors import ConfigError
from trlx_hybrid.rollout.seeding import preserved_generators

from ..environment import Step

WRONG = "That is not right. Try again."


def from_reasoning_gym(
    name: str,
    *,
    size: int = 1000,
    seed: int = 0,
    attempts: int = 3,
    feedback: str = WRONG,
    answer: Callable[[str], str] | None = None,
    **config: Any,
) -> ReasoningGym:
    """A dataset of reasoning-gym, and the environment that goes with it.

        gym = from_reasoning_gym("chain_sum", attempts=2, min_digits=2)
        GRPOTrainer(..., train_dataset=gym.dataset(), rollout_func=episodes(gym), reward_funcs=episode_reward)

    The reward is reasoning-gym's score of the last answer, from 0 to 1. A score of 1 ends the episode, as the last
    attempt does; before that, the model is shown `feedback`.

    Args:
        name: reasoning-gym's name of the tasks.
        size: number of tasks. seed: which ones.
        attempts: answers of one episode.
        feedback: what a wrong answer is met with.
        answer: takes the answer out of a completion. By default what stands in `<answer>` tags, or else what follows
            `</think>`, or else all of it, without space around it.
        config: settings of these tasks.

    Raises:
        ConfigError: reasoning-gym is not installed, or knows no such tasks or settings.
    """
    if attempts < 1:
        raise ConfigError(f"from_reasoning_gym(attempts={attempts}): a task needs at least one attempt.")
    try:
        from reasoning_gym import create_dataset  # here, for the plugin does not depend on it
    except ImportError as error:
        raise ConfigError("from_reasoning_gym needs its package: pip install reasoning-gym") from error
    try:
        tasks = create_dataset(name, size=size, seed=seed, **config)
    except (ValueError, TypeError, AssertionError) as error:
        raise ConfigError(f"reasoning-gym makes no tasks {name!r} with these settings: {error}") from error
    with preserved_generators():  # some tasks are drawn from the global ones: alike in every process once seeded
        random.seed(seed)
        np.random.seed(seed % 2**32)
        made = list(tasks)
    return ReasoningGym(made, tasks.score_answer, attempts, feedback, answer or last_answer)


class ReasoningGym:
    """Makes environments for tasks of one kind; pass it to `episodes`.

    Attributes:
        tasks: reasoning-gym's entries, made once: asked for again, some kinds of task come out as others.
    """

    def __init__(
        self,
        tasks: list[dict[str, Any]],
        score: Callable[[str, dict[str, Any]], float],
        attempts: int,
        feedback: str,
        answer: Callable[[str], str],
    ) -> None:
        self.tasks, self.score = tasks, score
        self.attempts, self.feedback, self.answer = attempts, feedback, answer
        self.__name__ = "ReasoningGym"  # what messages call its environments

    def __call__(self) -> Attempts:
        """A fresh environment."""
        return Attempts(self)

    def dataset(self) -> Any:
        """The tasks as a `datasets.Dataset` with the columns `prompt` (messages) and `task` (index)."""
        from datasets import Dataset

        return Dataset.from_list(
            [
                {"prompt": [{"role": "user", "content": task["question"]}], "task": index}
                for index, task in enumerate(self.tasks)
            ]
        )


class Attempts:
    """One task, until it is solved or the attempts are used up. Scoring may compute, so it runs in threads."""

    def __init__(self, gym: ReasoningGym) -> None:
        self._gym, self._left = gym, gym.attempts
        self._task: Any = None

    def reset(self, row: Mapping[str, Any]) -> None:
        """Take the row's task; its question is the prompt already."""
        self._task = self._gym.tasks[row["task"]]

    def step(self, completion: str) -> Step:
        """Score the answer."""
        self._left -= 1
        score = float(self._gym.score(self._gym.answer(completion), self._task))
        if score >= 1.0 or self._left == 0:
            return Step(done=True, reward=score)
        return Step(observation=self._gym.feedback)


def last_answer(completion: str) -> str:
    """What a completion answers, see `from_reasoning_gym`."""
    said = completion.rpartition("</think>")[2]
    _, opened, tagged = said.rpartition("<answer>")
    return (tagged.partition("</answer>")[0] if opened else said).strip()
