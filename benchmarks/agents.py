"""Seconds of a rollout of conversations: the trainer's own environment, and an agent with OpenAI's client.

    python -m benchmarks.agents

Both say the same: after each of the model's turns, a message of some words. The agent asks the run's engine over HTTP
(`trlx_hybrid_multiturn.gateway`); the environment is a Python object. They alternate in one training, a step each, with
one engine. Turns have a fixed number of tokens, so that both sample as many.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .child import answer, ask
from .harness import Measurement
from .lengths import Lengths
from .result import Result, accelerator
from .rollout import SCALES, write_model
from .scale import Variant

ARMS = ("environment", "agent", "processes")
"""An environment; an agent in the trainer's process; the same agent in processes of its own."""
PROCESSES = {"1.5b": 8, "tiny": 1}
EPISODES = {"1.5b": 64, "tiny": 16}
TURNS = {"1.5b": 5, "tiny": 3}
TOKENS = {"1.5b": 100, "tiny": 8}
"""The number of tokens of a turn."""
SHOWN = " ".join(f"{word:x}" for word in range(1, 30))
"""The message after a turn."""
BATCH = 8
WARM = 6
"""The number of first steps that are left out, two of each arm."""
LIMIT = 560.0
"""Seconds of the training, its start included."""


def measure(given: Mapping[str, Any]) -> dict[str, list[float]]:
    """Train in this process, and return the seconds of each arm's rollouts.

    Args:
        given: `folder`, `model` and `steps`.
    """
    from .building import engine_options, load, prepare_process

    prepare_process(given["folder"])
    from trlx_hybrid import GRPOTrainer, HybridConfig
    from trlx_hybrid_multiturn.gateway import episode_reward

    from .multiturn_talk import TEMPLATE
    from .stepping import arguments_of

    name = given["model"]
    longest = TURNS[name] * (TOKENS[name] + 40)
    scale = dataclasses.replace(SCALES[name], cases=(Lengths(sequences=EPISODES[name], longest=longest),))
    variant = Variant(sleep=True)
    model, tokenizer = load(given["folder"], variant)
    tokenizer.chat_template = TEMPLATE
    arguments = arguments_of(Path(given["folder"]) / "run", scale, variant, BATCH, given["steps"])
    arguments.generation_kwargs = {"ignore_eos": True, "max_tokens": TOKENS[name]}
    trainer = GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        args=arguments,
        reward_funcs=episode_reward,
        rollout_func=_Alternating(TURNS[name], PROCESSES[name]),
        train_dataset=_prompts(scale.prompt_tokens - 8, EPISODES[name] * (given["steps"] + 1)),
        hybrid=HybridConfig(
            engine="vllm",
            engine_options=engine_options(scale, variant),
            rollout_options={"progress": False},
        ),
    )
    trainer.train()
    seconds = [log["hybrid/rollout_seconds"] for log in trainer.state.log_history if "loss" in log]
    return {arm: seconds[WARM + place :: len(ARMS)] for place, arm in enumerate(ARMS)}


@functools.cache
def _client_of_all() -> Any:
    from openai import AsyncOpenAI

    return AsyncOpenAI(base_url="http://localhost", api_key="none")


async def played(base_url: str, row: Mapping[str, Any], turns: int) -> float:
    """Say what the environment says, with OpenAI's client."""
    client, messages = _client_of_all().with_options(base_url=base_url), list(row["prompt"])
    for _ in range(turns):
        done = await client.chat.completions.create(model="policy", messages=messages)
        messages.append({"role": "assistant", "content": done.choices[0].message.content or ""})
        messages.append({"role": "user", "content": SHOWN})
    return float(len(messages) % 7)


class _Alternating:
    """A `rollout_func` that plays the arms in turns."""

    rollout = "multi_turn"
    samples_from_session = True

    def __init__(self, turns: int, processes: int) -> None:
        from trlx_hybrid_multiturn import Environment, Step, episodes
        from trlx_hybrid_multiturn.gateway import agents

        class GoesOn(Environment):
            """The environment that says what the agent says."""

            async def reset(self, row: Mapping[str, Any]) -> None:
                self.turn = 0

            async def step(self, completion: str) -> Step:
                self.turn += 1
                return Step(observation=SHOWN, done=self.turn == turns, reward=float(self.turn % 2))

        from .agents import played  # by this name, under which a process finds it, and not as part of `__main__`

        agent = functools.partial(played, turns=turns)
        self._arms = [episodes(GoesOn), agents(agent), agents(agent, processes=processes)]
        self._played = 0

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        rows: dict[str, Any] = self._arms[self._played % len(ARMS)](prompts, trainer)
        self._played += 1
        return rows


def _prompts(words: int, count: int) -> Any:
    from datasets import Dataset

    draw = random.Random(0)
    texts = [" ".join(f"{word:x}" for word in draw.choices(range(1, 4000), k=words)) for _ in range(count)]
    return Dataset.from_dict({"prompt": [[{"role": "user", "content": text}] for text in texts]})


def run(model: str, steps: int) -> Result:
    """Train, and return the result.

    Args:
        model: a key of EPISODES.
        steps: optimizer steps, those that are left out included.
    """
    with tempfile.TemporaryDirectory(prefix="benchmark-agents-", ignore_cleanup_errors=True) as folder:
        write_model(Path(folder), SCALES[model])
        found = ask("benchmarks.agents", {"folder": folder, "model": model, "steps": steps}, LIMIT)
    medians = {arm: statistics.median(seconds) for arm, seconds in found.items()}
    return Result(
        benchmark="agents" if model == "1.5b" else f"agents_{model}",
        device=accelerator(),
        peer="environment",
        measurements=[Measurement(arm, tuple(seconds)) for arm, seconds in found.items()],
        metrics={
            f"{arm}_seconds_per_environment_second": medians[arm] / medians["environment"]
            for arm in ("agent", "processes")
        },
        settings={
            "model": model,
            "episodes": EPISODES[model],
            "turns": TURNS[model],
            "tokens_per_turn": TOKENS[model],
            "steps": steps,
            "processes": PROCESSES[model],
        },
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.agents", description=__doc__)
    parser.add_argument("--model", choices=sorted(EPISODES), default="1.5b", help="tiny is for trying it on a CPU")
    parser.add_argument("--steps", type=int, default=24, help="optimizer steps, a third of each arm (default: 24)")
    given = parser.parse_args()
    run(given.model, given.steps).publish()


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1].startswith("{"):
        answer(measure(json.loads(sys.argv[1])))
    else:
        main()
