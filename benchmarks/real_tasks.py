"""The tasks of `benchmarks.real`: questions, rewards, tools, and the constants of their trainings, which are the same
for all arms."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

HELD_OUT = 128
"""The number of questions that no training draws. Accuracy is measured on them."""

DRAWN_WITH = 1
"""The seed that questions are drawn with, in all runs: the seed of a run changes what is sampled."""

Row = dict[str, Any]
Conversation = list[dict[str, Any]]
Reward = Callable[..., list[float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewards:
    """Rewards of a task's questions.

    Attributes:
        rows: different questions, as rows of a dataset.
        right: reward function, 1.0 for a right answer and else 0.0: its mean is the accuracy.
        others: further reward functions, with their weights. The weight of `right` is 1 without theirs.
    """

    rows: list[Row]
    right: Reward
    others: tuple[tuple[Reward, float], ...] = ()

    @property
    def functions(self) -> list[Reward]:
        """All reward functions, `right` first."""
        return [self.right, *(function for function, _ in self.others)]

    @property
    def weights(self) -> list[float]:
        """The weights of all reward functions, whose sum is 1."""
        others = [weight for _, weight in self.others]
        return [1.0 - sum(others), *others]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A task that a run trains on.

    Attributes:
        draw: takes a number and a seed, and returns this number of different questions with their rewards.
        training: number of questions to train on.
        learning_rates, steps: of a run, by kind.
        longest: the largest number of tokens of a completion, answers of tools included.
        prompt: the largest number of tokens of a prompt.
        tools: functions that the model may call.
    """

    draw: Callable[[int, int], Rewards]
    training: int = 4096
    learning_rates: Mapping[str, float]
    steps: Mapping[str, int]
    longest: int = 192
    prompt: int = 320
    tools: tuple[Callable[..., Any], ...] = ()

    def split(self) -> tuple[Rewards, list[Row]]:
        """Return the questions to train on, with their rewards, and `HELD_OUT` others."""
        drawn = self.draw(HELD_OUT + self.training, DRAWN_WITH)
        return Rewards(rows=drawn.rows[HELD_OUT:], right=drawn.right, others=drawn.others), drawn.rows[:HELD_OUT]


def asked(question: str) -> Conversation:
    """Return a question as a conversation."""
    return [{"role": "user", "content": question}]


def last_number(completion: Conversation) -> str:
    """Return the last whole number that the model's last message has; "" without one, or if a tool spoke last."""
    said = completion[-1]
    found = re.findall(r"-?\d+", said.get("content") or "") if said["role"] == "assistant" else []
    return found[-1] if found else ""


def right(completions: Sequence[Conversation], answer: Sequence[int], **others: Any) -> list[float]:
    """Return 1.0 for each completion whose last number is the answer, else 0.0."""
    return [float(last_number(said) == str(wanted)) for said, wanted in zip(completions, answer, strict=True)]


def sums(count: int, seed: int) -> Rewards:
    """Return sums of two numbers with two digits."""
    every = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    question = "What is {} + {}? Answer with the number only."
    pairs = random.Random(seed).sample(every, count)
    return Rewards(rows=[{"prompt": asked(question.format(a, b)), "answer": a + b} for a, b in pairs], right=right)


GYM = "chain_sum"
"""The name of reasoning-gym's tasks: sums and differences."""

GYM_SETTINGS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}


def reasoning_gym(count: int, seed: int) -> Rewards:
    """Return tasks of reasoning-gym, which finds the last number of an answer right or wrong.

    Raises:
        SystemExit: the package reasoning-gym is not installed, or makes too few different questions.
    """
    try:
        from reasoning_gym import create_dataset  # here, because other tasks do without the package
    except ImportError:
        raise SystemExit("--task reasoning-gym needs its package: pip install reasoning-gym") from None
    made = create_dataset(GYM, seed=seed, size=20 * count, **GYM_SETTINGS)
    different: dict[str, Any] = {}
    for task in made:
        different.setdefault(task["question"], task)
        if len(different) == count:
            break
    else:
        raise SystemExit(f"reasoning-gym makes {len(different)} different questions of {GYM}, not {count}.")

    def right(completions: Sequence[Conversation], gym: Sequence[str], **others: Any) -> list[float]:
        """Return 1.0 for each completion whose last number reasoning-gym finds right in full, else 0.0."""
        scored = zip(completions, map(json.loads, gym), strict=True)
        return [float(made.score_answer(last_number(said), task) == 1.0) for said, task in scored]

    rows = [{"prompt": asked(task["question"]), "gym": json.dumps(task)} for task in different.values()]
    return Rewards(rows=rows, right=right)


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first number
        b: the second number
    """
    return int(a) + int(b)


EXAMPLES = ((123, 4321), (5120, 204), (330, 671))
"""The terms of the sums that each prompt of the tool's task shows. SmolLM2-135M-Instruct called no tool in 16 samples
after one example, and in 9 of 16 after three others than these."""


def shown(a: int, b: int) -> Conversation:
    """Return a conversation in which a sum is computed with the tool."""
    call = {"type": "function", "function": {"name": add.__name__, "arguments": {"a": a, "b": b}}}
    return [
        *asked(f"What is {a} + {b}?"),
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": add.__name__, "content": str(add(a, b))},
        {"role": "assistant", "content": str(add(a, b))},
    ]


def called(completions: Sequence[Conversation], terms: Sequence[Sequence[int]], **others: Any) -> list[float]:
    """Return 0.5 for each completion that calls the tool with two whole numbers, 1.0 if they are the question's, else
    0.0."""
    return [max(map(call_of(wanted), said), default=0.0) for said, wanted in zip(completions, terms, strict=True)]


def call_of(terms: Sequence[int]) -> Callable[[Mapping[str, Any]], float]:
    """Return a function that scores a message's calls for a question with these terms, as `called` says."""

    def score(message: Mapping[str, Any]) -> float:
        scores = [0.0]
        for call in message.get("tool_calls") or ():
            function = call.get("function", call)
            given = function.get("arguments")
            if function.get("name") == add.__name__ and isinstance(given, Mapping) and given.keys() == {"a", "b"}:
                numbers = [given["a"], given["b"]]
                if all(type(number) is int for number in numbers):
                    scores.append(1.0 if sorted(numbers) == sorted(terms) else 0.5)
        return max(scores)

    return score


def tool(count: int, seed: int) -> Rewards:
    """Return sums of two numbers with four digits, to be computed with the tool `add`; half of the reward is for the
    call."""
    draw = random.Random(seed)
    numbers = range(1000, 10_000)
    pairs: dict[tuple[int, int], None] = {}
    while len(pairs) < count:
        pairs.setdefault((draw.choice(numbers), draw.choice(numbers)))
    examples = [message for terms in EXAMPLES for message in shown(*terms)]
    rows = [{"prompt": [*examples, *asked(f"What is {a} + {b}?")], "answer": a + b, "terms": [a, b]} for a, b in pairs]
    return Rewards(rows=rows, right=right, others=((called, 0.5),))


TASKS: Mapping[str, Task] = {
    "sums": Task(draw=sums, learning_rates={"full": 1e-5, "lora": 1e-4}, steps={"full": 60, "lora": 100}),
    "reasoning-gym": Task(
        draw=reasoning_gym,
        training=1024,  # so that a fifth of them have one digit, as only a few hundred different ones can
        learning_rates={"full": 1e-5, "lora": 1e-4},
        steps={"full": 60, "lora": 100},
    ),
    "tool": Task(
        draw=tool,
        learning_rates={"full": 1e-5, "lora": 1e-4},
        steps={"full": 60, "lora": 100},
        prompt=640,
        tools=(add,),
    ),
}
"""The tasks by name. They were fixed before anything was measured."""
