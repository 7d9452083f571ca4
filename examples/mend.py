"""GRPO for an agent that mends a failing test in a sandbox, on a CPU in minutes.

    apt install bubblewrap
    pip install 'trlx-hybrid-multiturn[gateway]' openai
    accelerate launch examples/mend.py

Add `--use_peft --lora_target_modules all-linear` for LoRA.

Each episode has a repository of its own, made on the spot: a module with one wrong operator, and its tests. The agent
runs the tests, shows the model the name of the one that fails, writes what the model answers into the module, and runs
them again. It has two tries. All of this happens in a box without network, which sees none of this machine's files.
"""

import random
import re
import sys
from dataclasses import dataclass, field
from typing import Any

from datasets import Dataset
from openai import AsyncOpenAI
from quickstart import quiet
from toy_chat import BLANK, Conversation, ToyConfig, build_chat_tokenizer, learn_from_demonstrations, train_and_report
from trl import ModelConfig, TrlParser, get_peft_config
from trlx_hybrid import GRPOTrainer, HybridConfig
from trlx_hybrid_multiturn.gateway import agents, episode_reward, sandbox

CLIENT = AsyncOpenAI(base_url="http://localhost", api_key="none")  # of all episodes; each has an address of its own
OPERATORS = {"adds": "+", "subtracts": "-", "multiplies": "*", "divides": "//"}
RESULTS = {"adds": 22, "subtracts": 12, "multiplies": 85, "divides": 3}  # of 17 and 5
TESTS = """import unittest

import operations


class Operations(unittest.TestCase):
""" + "\n".join(
    f"    def test_{name}(self):\n        self.assertEqual(operations.{name}(17, 5), {result})\n"
    for name, result in RESULTS.items()
)
RUN_TESTS = [sys.executable, "-m", "unittest"]
FAILS, AGAIN = "The test test_{} fails. Which operator is right?", "It still fails."


@dataclass
class ScriptArguments:
    """The settings of the toy. `GRPOConfig`'s own flags set the GRPO run itself."""

    sft_steps: int = field(default=60, metadata={"help": "SFT steps on demonstrations (batch size 64)."})


@dataclass
class MendConfig(ToyConfig):
    """The toy's defaults, with the folder of this run."""

    output_dir: str = field(default="runs/mend", metadata={"help": "The run folder."})
    max_steps: int = field(default=15, metadata={"help": "GRPO steps."})
    per_device_train_batch_size: int = field(default=32, metadata={"help": "Conversations per step."})
    per_device_eval_batch_size: int = field(default=32, metadata={"help": "Conversations per evaluation batch."})


def module(operators: dict[str, str]) -> str:
    """Return the source of the module, whose functions have these operators."""
    return "\n\n".join(f"def {name}(a, b):\n    return a {operator} b\n" for name, operator in operators.items())


async def mend(base_url: str, row: dict[str, Any]) -> float:
    """Let the model mend a repository. Returns 1 where its first answer does, 0.5 where its second does, else 0."""
    client = CLIENT.with_options(base_url=base_url)
    operators = OPERATORS | {row["name"]: row["wrong"]}
    async with sandbox() as box:
        await box.write("operations.py", module(operators))
        await box.write("test_operations.py", TESTS)
        ran = await box.run(RUN_TESTS)
        (failed,) = re.findall(r"FAIL: test_(\w+)", ran.errors)
        messages = [{"role": "user", "content": FAILS.format(failed)}]
        for reward in (1.0, 0.5):
            answer = await client.chat.completions.create(model="policy", messages=messages)
            text = answer.choices[0].message.content or ""
            operator = text.rpartition("</think>")[2].strip()
            if operator in OPERATORS.values():
                await box.write("operations.py", module(operators | {failed: operator}))
            if (await box.run(RUN_TESTS)).code == 0:
                return reward
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": AGAIN}]
    return 0.0


def demonstrate(rng: random.Random) -> Conversation:
    """Draw a conversation of one or two tries, of which a third know the operator."""
    name, messages = rng.choice([*OPERATORS]), []
    for question in (FAILS.format(name), AGAIN)[: rng.choice([1, 2])]:
        right = rng.random() < 1 / 3
        operator = OPERATORS[name] if right else rng.choice([*OPERATORS.values()])
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": operator}]
    return messages


def repositories() -> Dataset:
    """Return a row for each function and each wrong operator."""
    return Dataset.from_list(
        [
            {"prompt": [{"role": "user", "content": FAILS.format(name)}], "name": name, "wrong": wrong}
            for name, right in OPERATORS.items()
            for wrong in OPERATORS.values()
            if wrong != right
        ]
    )


def main() -> None:
    """Learn from demonstrations, then train the agent with GRPO."""
    script, config, of_model = TrlParser((ScriptArguments, MendConfig, ModelConfig)).parse_args_and_config()
    quiet()
    sandbox()  # raises where this machine has none, before anything is trained
    shapes = [
        [{"role": "user", "content": FAILS.format(BLANK)}, {"role": "assistant", "content": BLANK}],
        [{"role": "user", "content": AGAIN}, {"role": "assistant", "content": BLANK}],
    ]
    tokenizer = build_chat_tokenizer(shapes, words=[*OPERATORS, *OPERATORS.values()])
    trainer = GRPOTrainer(
        model=learn_from_demonstrations(demonstrate, tokenizer, config, script.sft_steps),
        args=config,
        rollout_func=agents(mend),
        reward_funcs=episode_reward,
        train_dataset=repositories(),
        eval_dataset=repositories(),
        processing_class=tokenizer,
        peft_config=get_peft_config(of_model),
        hybrid=HybridConfig(engine="vllm", rollout_options={"progress": False}),  # training has its own progress bars
    )
    train_and_report(trainer, "Mended repositories")


if __name__ == "__main__":
    main()
