"""GRPO with a tool on a CPU in minutes: a 0.6-million-parameter model learns to call a calculator, and to do it right.

    accelerate launch examples/calculator.py

What happens, in this order:

1. A small Qwen3 is trained from scratch on conversations about multiplications. In a third of them the assistant calls
   the calculator and reports its answer; in the others it guesses, or mistypes the expression.
2. GRPO with `tools=[calculate]`: vLLM samples inside this process, the calculator answers between the turns, and a
   final answer that reasoning-gym finds right earns the reward. The conversations advance independently.
3. Held-out multiplications are scored before and after.

It shows that reinforcement learning selects among behaviours that were demonstrated. The model learns no arithmetic.
Every `GRPOConfig` flag works, and `--config file.yaml` too.
"""

import random
import re
from dataclasses import dataclass, field
from typing import Any

from datasets import Dataset
from quickstart import quiet
from reasoning_gym import create_dataset
from toy_chat import BLANK, Conversation, ToyConfig, build_chat_tokenizer, learn_from_demonstrations, train_and_report
from trl import TrlParser
from trlx_hybrid import GRPOTrainer

GYM = create_dataset("products", min_terms=2, max_terms=2, min_digits=2, max_digits=2, size=10**5, seed=0)
UNREADABLE = "not a multiplication"


@dataclass
class ScriptArguments:
    """The settings of the toy. `GRPOConfig`'s own flags set the GRPO run itself."""

    num_tasks: int = field(default=4000, metadata={"help": "Tasks that demonstrations and GRPO are drawn from."})
    num_heldout: int = field(default=128, metadata={"help": "Tasks kept out of all training, for the score."})
    sft_steps: int = field(default=220, metadata={"help": "SFT steps on demonstrations (batch size 64)."})


@dataclass
class CalculatorConfig(ToyConfig):
    """The toy's defaults, with the folder of this run."""

    output_dir: str = field(default="runs/calculator", metadata={"help": "The run folder."})


def calculate(expression: str) -> int:
    """Multiply two numbers.

    Args:
        expression: such as 12 * 34
    """
    numbers = re.fullmatch(r"(\d+) \* (\d+)", expression)
    if numbers is None:
        raise ValueError(UNREADABLE)  # the model is shown this text
    return int(numbers[1]) * int(numbers[2])


def draw_tasks(count: int, seed: int) -> list[dict[str, Any]]:
    """Draw `count` tasks of reasoning-gym, each with another expression."""
    rng = random.Random(seed)
    tasks: dict[str, dict[str, Any]] = {}
    while len(tasks) < count:
        task = GYM[rng.randrange(len(GYM))]
        tasks.setdefault(task["metadata"]["expression"], task)
    return list(tasks.values())


def conversation(question: str, expression: str | None, result: str, answer: str) -> Conversation:
    """Return a question and its answer, with a call between them if there is an expression."""
    question_message = {"role": "user", "content": question}
    answer_message = {"role": "assistant", "content": answer}
    if expression is None:
        return [question_message, answer_message]
    function = {"name": "calculate", "arguments": {"expression": expression}}
    call = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
    return [question_message, call, {"role": "tool", "name": "calculate", "content": result}, answer_message]


def demonstrate(task: dict[str, Any], rng: random.Random) -> Conversation:
    """Draw a conversation: one third correct, one third with a wrong digit in the call, one third guesses."""
    expression = task["metadata"]["expression"]
    kind = rng.choice(["right", "mistyped", "guessed"])
    if kind == "guessed":
        return conversation(task["question"], None, "", str(rng.randrange(100, 10_000)))
    if kind == "mistyped":
        place = rng.choice([i for i, character in enumerate(expression) if character.isdigit()])
        expression = expression[:place] + rng.choice("123456789") + expression[place + 1 :]
    result = str(calculate(expression))
    return conversation(task["question"], expression, result, result)


def reward_right(completions: list[Conversation], task: list[dict[str, Any]], **kwargs: Any) -> list[float]:
    """Return 1 for a final answer that reasoning-gym finds right, else 0; a TRL reward function."""
    answers = [(messages[-1].get("content") or "").strip() for messages in completions]
    return [float(GYM.score_answer(answer, entry) == 1.0) for answer, entry in zip(answers, task, strict=True)]


def dataset(tasks: list[dict[str, Any]]) -> Dataset:
    """Return tasks as a dataset for TRL's trainers."""
    return Dataset.from_list([{"prompt": [{"role": "user", "content": t["question"]}], "task": t} for t in tasks])


def learn_to_calculate(script: ScriptArguments, config: ToyConfig) -> tuple[Any, Any, list[Any], list[Any]]:
    """Return a tokenizer, a model that learned from demonstrations, the tasks to train on, and the held-out ones."""
    tasks = draw_tasks(script.num_heldout + script.num_tasks, config.seed)
    heldout, training = tasks[: script.num_heldout], tasks[script.num_heldout :]

    question = GYM[0]["question"].replace(GYM[0]["metadata"]["expression"], BLANK)
    shapes = [conversation(question, BLANK, BLANK, BLANK), conversation(question, BLANK, UNREADABLE, BLANK)]
    tokenizer = build_chat_tokenizer(shapes, words=[*"0123456789 *", "{'error': '", "'}"], tools=[calculate])
    model = learn_from_demonstrations(
        lambda rng: demonstrate(rng.choice(training), rng), tokenizer, config, script.sft_steps, tools=[calculate]
    )
    return tokenizer, model, training, heldout


def main() -> None:
    """Learn from demonstrations, then train with GRPO and the tool."""
    script, config = TrlParser((ScriptArguments, CalculatorConfig)).parse_args_and_config()
    quiet()
    tokenizer, model, training, heldout = learn_to_calculate(script, config)
    trainer = GRPOTrainer(
        model=model,
        args=config,
        reward_funcs=reward_right,
        train_dataset=dataset(training),
        eval_dataset=dataset(heldout),
        processing_class=tokenizer,
        tools=[calculate],
        hybrid={"rollout_options": {"progress": False}},  # training has its own progress bars
    )
    train_and_report(trainer, f"{len(heldout)} held-out multiplications")


if __name__ == "__main__":
    main()
