"""Tasks of reasoning-gym with several attempts: the model is told that an answer is wrong, and may try again."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from trlx_hybrid.errors import ConfigError
from trlx_hybrid.rollout.seeding import preserved_generators

from ..environment import Row, Step

if TYPE_CHECKING:
    from datasets import Dataset

Task = dict[str, Any]
"""A task as reasoning-gym makes it: a dict with "question", "answer" and more."""

WRONG = "That is not right. Try again."


def from_reasoning_gym(
    name: str,
    *,
    size: int = 1000,
    seed: int = 0,
    attempts: int = 3,
    feedback: str = WRONG,
    answer: Callable[[str], str] | None = None,
    **config: object,
) -> ReasoningGym:
    """Return the tasks of a reasoning-gym dataset, with the environment that goes with them.

        gym = from_reasoning_gym("chain_sum", attempts=2, min_digits=2)
        GRPOTrainer(..., train_dataset=gym.dataset(), rollout_func=episodes(gym), reward_funcs=episode_reward)

    The reward is reasoning-gym's score of the last answer, from 0 to 1. A score of 1 ends the episode, and so
    does the last attempt. After any other answer, the model is shown `feedback`.

    Args:
        name: reasoning-gym's name of the tasks.
        size: number of tasks.
        seed: seed that the tasks are drawn with.
        attempts: the largest number of answers in one episode.
        feedback: the text that the model is shown after a wrong answer.
        answer: extracts the answer from a completion. By default it is the text in `<answer>` tags, else the text after
            `</think>`, else the whole completion, stripped of surrounding whitespace.
        config: reasoning-gym's settings for tasks of this name, such as `min_digits`.

    Raises:
        ConfigError: reasoning-gym is not installed, or does not know these tasks or settings.
    """
    if attempts < 1:
        raise ConfigError(f"from_reasoning_gym(attempts={attempts}): a task needs at least one attempt.")
    try:
        from reasoning_gym import create_dataset  # here, because the plugin does not depend on it
    except ImportError as error:
        raise ConfigError("from_reasoning_gym needs its package: pip install reasoning-gym") from error
    try:
        tasks = create_dataset(name, size=size, seed=seed, **config)
    except (ValueError, TypeError, AssertionError) as error:
        raise ConfigError(f"reasoning-gym makes no tasks {name!r} with these settings: {error}") from error
    with preserved_generators():  # some tasks use the global generators: seeded, every process draws alike
        random.seed(seed)
        np.random.seed(seed % 2**32)
        made = list(tasks)
    return ReasoningGym(made, tasks.score_answer, attempts, feedback, answer or last_answer)


class ReasoningGym:
    """A factory of environments for tasks of one kind, which `from_reasoning_gym` returns; pass it to `episodes`.

    Attributes:
        tasks: reasoning-gym's tasks. They are made only once, because some kinds come out differently when made again.
        score: returns reasoning-gym's score of an answer, from 0 to 1, given the answer and the task.
        attempts: how many answers an episode may have.
        feedback: the text that the model is shown after a wrong answer.
        answer: extracts the answer from a completion.
    """

    def __init__(
        self,
        tasks: list[Task],
        score: Callable[[str, Task], float],
        attempts: int,
        feedback: str,
        answer: Callable[[str], str],
    ) -> None:
        self.tasks, self.score = tasks, score
        self.attempts, self.feedback, self.answer = attempts, feedback, answer
        self.__name__ = "ReasoningGym"  # name of its environments in messages

    def __call__(self) -> Attempts:
        """Return a fresh environment for one episode."""
        return Attempts(self)

    def dataset(self) -> Dataset:
        """Return the tasks as a `datasets.Dataset` with the columns `prompt` (messages) and `task` (index)."""
        from datasets import Dataset

        return Dataset.from_list(
            [
                {"prompt": [{"role": "user", "content": task["question"]}], "task": index}
                for index, task in enumerate(self.tasks)
            ]
        )


class Attempts:
    """An environment for one task, which ends when the task is solved or the attempts are used up.

    Its methods are plain functions, which run in threads, because scoring an answer may take CPU time.

    Args:
        gym: has the tasks, the score and the number of attempts.
    """

    def __init__(self, gym: ReasoningGym) -> None:
        self._gym, self._left = gym, gym.attempts
        self._task: Any = None

    def reset(self, row: Row) -> None:
        """Begin the task of a dataset's row. Nothing is shown, because the row's prompt already has the question."""
        self._task = self._gym.tasks[row["task"]]

    def step(self, completion: str) -> Step:
        """Score the answer in a completion, and return the reward if the episode is over, else the feedback."""
        self._left -= 1
        score = float(self._gym.score(self._gym.answer(completion), self._task))
        if score >= 1.0 or self._left == 0:
            return Step(done=True, reward=score)
        return Step(observation=self._gym.feedback)


def last_answer(completion: str) -> str:
    """Return the answer in a completion: the text in its last `<answer>` tags, else the text after `</think>`, else all
    of it, without surrounding whitespace."""
    said = completion.rpartition("</think>")[2]
    _, opened, tagged = said.rpartition("<answer>")
    return (tagged.partition("</answer>")[0] if opened else said).strip()
