"""A plugin that registers the games by name. It imports little: every process loads every plugin."""

from dataclasses import dataclass

from trlx_hybrid import hookimpl
from trlx_hybrid.contract.protocols import EnvironmentArguments


@dataclass(frozen=True, kw_only=True)
class GuessOptions:
    """The options that `--environment_options` takes."""

    highest: int = 15
    guesses: int = 4


def rows(options):
    """Return a dataset with one row for each number."""
    from datasets import Dataset

    prompt = [{"role": "user", "content": ""}]  # the game adds the text
    numbers = range(1, options.highest + 1)
    return Dataset.from_list([{"prompt": prompt, "number": n, "highest": options.highest} for n in numbers])


def guess(session, options):
    """Return the trainer's arguments for the game that answers whatever the model says."""
    from trlx_hybrid_multiturn import episode_reward, episodes

    from .games import GuessingGame

    return EnvironmentArguments(
        rollout_func=episodes(GuessingGame, max_turns=options.guesses),
        reward_funcs=episode_reward,
        train_dataset=lambda: rows(options),
    )


def guess_tool(session, options):
    """Return the trainer's arguments for the game whose public methods are tools; `get_reward` is its reward."""
    from .games import GuessingTool

    return EnvironmentArguments(environment_factory=GuessingTool, train_dataset=lambda: rows(options))


@hookimpl
def trlx_register(registry):
    """Register both games."""
    registry.offer("environment", "guess", guess, options=GuessOptions, summary="guess a number, told higher or lower")
    registry.offer("environment", "guess_tool", guess_tool, options=GuessOptions, summary="the same, with a tool")
