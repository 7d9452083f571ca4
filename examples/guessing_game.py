"""GRPO in a game of several turns on a CPU in minutes: guess a number, told only "higher" or "lower".

    accelerate launch examples/guessing_game.py

What happens, in this order:

1. A small Qwen3 is trained from scratch on games that others played. In a third of them every guess halves the numbers
   that are left, which always wins in four guesses; in the others the player guesses at random.
2. GRPO plays through `episodes(GuessingGame)`: the environment is not a tool, it answers whatever the model says.
   Winning within four guesses earns the reward.
3. All numbers are played before and after.

It shows that reinforcement learning selects the strategy that was demonstrated along with a worse one, and keeps to it
over a whole game. There are only 15 numbers, so it shows nothing about games that the model has not seen. Every
`GRPOConfig` flag works, and `--config file.yaml` too.
"""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from datasets import Dataset, concatenate_datasets
from quickstart import quiet
from toy_chat import BLANK, Conversation, ToyConfig, build_chat_tokenizer, learn_from_demonstrations, train_and_report
from trl import TrlParser
from trlx_hybrid import GRPOTrainer
from trlx_hybrid_multiturn import Step, episode_reward, episodes

HIGHEST, GUESSES = 15, 4
RULES = f"I think of a number from 1 to {HIGHEST}. You have {GUESSES} guesses."
HIGHER, LOWER, WON = "higher", "lower", "right"


@dataclass
class ScriptArguments:
    """The settings of the toy. `GRPOConfig`'s own flags set the GRPO run itself."""

    sft_steps: int = field(default=200, metadata={"help": "SFT steps on demonstrations (batch size 64)."})


@dataclass
class GameConfig(ToyConfig):
    """The toy's defaults, with the folder of this run."""

    output_dir: str = field(default="runs/guessing_game", metadata={"help": "The run folder."})
    num_generations_eval: int = field(default=8, metadata={"help": "Games per number in the evaluation."})


class GuessingGame:
    """The environment, which knows the number and answers guesses."""

    async def reset(self, row: Mapping[str, Any]) -> str:
        """Take the row's number, and return the text that is appended to the prompt."""
        self.number = row["number"]
        return RULES

    async def step(self, completion: str) -> Step:
        """Compare the guess with the number."""
        guess = completion.replace("<think>", "").replace("</think>", "").strip()
        if not guess.isdecimal():
            return Step(done=True, reward=0.0)
        if int(guess) == self.number:
            return Step(done=True, reward=1.0)
        return Step(observation=HIGHER if int(guess) < self.number else LOWER, reward=0.0)


def game(guesses: list[str], answers: list[str]) -> Conversation:
    """Return a game as a conversation; the last guess is not answered."""
    messages = [{"role": "user", "content": RULES}]
    for guess, answer in zip(guesses, answers, strict=True):
        messages += [{"role": "assistant", "content": guess}, {"role": "user", "content": answer}]
    return messages[:-1]


def demonstrate(rng: random.Random) -> Conversation:
    """Draw one game: a third of the players halve what is left, the others guess at random."""
    number, low, high, halving = rng.randint(1, HIGHEST), 1, HIGHEST, rng.random() < 1 / 3
    guesses, answers = [], []
    while len(guesses) < GUESSES and number not in guesses:
        guess = (low + high) // 2 if halving else rng.randint(1, HIGHEST)
        if guess < number:
            low = max(low, guess + 1)
        else:
            high = min(high, guess - 1)
        guesses.append(guess)
        answers.append(HIGHER if guess < number else LOWER)
    return game([str(guess) for guess in guesses], answers)


def main(rollout: Callable[..., Any] = episodes, output_dir: str = GameConfig.output_dir) -> None:
    """Learn from demonstrations, then play with GRPO."""
    parser = TrlParser((ScriptArguments, GameConfig))
    parser.set_defaults(output_dir=output_dir)
    script, config = parser.parse_args_and_config()
    quiet()
    numbers = [str(number) for number in range(1, HIGHEST + 1)]
    tokenizer = build_chat_tokenizer([game([BLANK, BLANK, BLANK], [HIGHER, LOWER, HIGHER])], words=numbers)
    model = learn_from_demonstrations(demonstrate, tokenizer, config, script.sft_steps)
    prompt = [{"role": "user", "content": ""}]  # the environment adds the text
    games = Dataset.from_list([{"prompt": prompt, "number": number} for number in range(1, HIGHEST + 1)])
    trainer = GRPOTrainer(
        model=model,
        args=config,
        reward_funcs=episode_reward,
        rollout_func=rollout(GuessingGame, max_turns=GUESSES),
        train_dataset=concatenate_datasets([games] * 16),  # so that a batch has enough rows
        eval_dataset=games,
        processing_class=tokenizer,
        hybrid={"rollout": "multi_turn", "rollout_options": {"progress": False}},
    )
    train_and_report(trainer, f"Games about all {HIGHEST} numbers")


if __name__ == "__main__":
    main()
