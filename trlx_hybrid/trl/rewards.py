"""Reward functions, with a literal NaN told apart from TRL's None."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import ConfigError, RewardError

if TYPE_CHECKING:
    from ..session import Session


def refuse_missing_package(functions: Any) -> None:
    """Refuse TRL's accuracy rewards without math-verify. They say so themselves at their first batch only.

    Args:
        functions: what the trainer was given as `reward_funcs`.

    Raises:
        ConfigError: names the function and what to install.
    """
    for function in functions if isinstance(functions, (list, tuple)) else [functions]:
        of_trl = getattr(function, "__module__", None) == "trl.rewards.accuracy_rewards"
        if of_trl and importlib.util.find_spec("math_verify") is None:
            raise ConfigError(
                f"Reward function {function.__name__!r} needs the package math-verify, which is not installed: "
                "pip install 'trl[math-verify]'"
            )


@contextmanager
def checking(trainer: Any) -> Iterator[None]:
    """Inside, what reward functions return is checked; outside, the trainer has the user's own objects."""
    functions = trainer.reward_funcs
    trainer.reward_funcs = [checked_reward(function) for function in functions]
    try:
        yield
    finally:
        trainer.reward_funcs = functions


def checked_reward(function: Any) -> Any:
    """`function` as TRL may call it, refusing NaN and infinity. Reward models pass through unchanged.

    TRL turns None ("not applicable to this sample") into NaN and skips it, so a NaN that a function computed by
    mistake is skipped as well, in silence.
    """
    if hasattr(function, "parameters") or not callable(function):  # a reward model
        return function
    name = getattr(function, "__name__", type(function).__name__)
    called = function
    while isinstance(called, functools.partial):
        called = called.func
    if inspect.iscoroutinefunction(called) or inspect.iscoroutinefunction(called.__call__):

        @functools.wraps(function)
        async def reward_async(*args: Any, **kwargs: Any) -> Any:
            return _checked(await function(*args, **kwargs), name)

        return reward_async

    @functools.wraps(function)
    def reward(*args: Any, **kwargs: Any) -> Any:
        return _checked(function(*args, **kwargs), name)

    return reward


def _checked(returned: Iterable[Any], name: str) -> list[Any]:
    rewards = list(returned)  # TRL takes any iterable, an iterator can be read once
    for index, value in enumerate(rewards):
        if value is not None and not math.isfinite(value):
            raise RewardError(
                f"Reward function {name!r} returned {value} for completion {index} of its batch. Return a finite "
                "number, or None where the reward does not apply."
            )
    return rewards


HOOK = "trlx_advantages"


def without_masked(rewards: Tensor, loss_mask: Sequence[Sequence[int]] | None, session: Session) -> Tensor:
    """The rewards of a batch, NaN in rows of which no token is trained, as those of conversations that broke off.

    TRL takes a row without any reward for unscorable: it leaves it out of its group's mean and deviation, and gives it
    no advantage. What a broken conversation happens to score would else move its neighbours' advantages. Collective.

    Args:
        rewards: (world * B, functions), of all ranks.
        loss_mask: of this rank's B rows; None where every token is trained.
    """
    if loss_mask is None:
        return rewards
    masked = [row for rows in session.ranks.gather([not any(mask) for mask in loss_mask]) for row in rows]
    return rewards.masked_fill(torch.tensor(masked, device=rewards.device)[:, None], torch.nan)


def replaced(session: Session, batch: Mapping[str, Any], rewards: Tensor | None) -> Tensor:
    """The plugin's advantages where there is one and it answers, else TRL's.

    Args:
        batch: what TRL trains on, this rank's rows.
        rewards: (world * B, functions), of all ranks.

    Raises:
        PluginError: the plugin returned something else than finite numbers in the shape of TRL's advantages.
    """
    stock: Tensor = batch["advantages"]
    advantages = session.host.call(HOOK, session=session, batch={**batch, "rewards_per_func": rewards})
    if advantages is None:
        return stock
    if isinstance(advantages, Tensor) and advantages.shape == stock.shape and rewards is not None:
        mine = rewards[session.ranks.rank * len(stock) :][: len(stock)].isnan().all(dim=1)  # no reward, no advantage
        advantages = advantages.masked_fill(mine.view(-1, *[1] * (stock.ndim - 1)), 0.0)
    problem = None
    if not isinstance(advantages, Tensor):
        problem = f"a {type(advantages).__name__} where a tensor was expected"
    elif advantages.shape != stock.shape:
        problem = f"a tensor of shape {tuple(advantages.shape)} where {tuple(stock.shape)} was expected"
    elif not advantages.isfinite().all():
        row = int((~advantages.isfinite()).nonzero()[0, 0])
        problem = f"{advantages[row].item()} for row {row}"
    if problem is not None:
        plugin = session.host.only(HOOK)
        assert plugin is not None
        raise session.host.fault(plugin, HOOK, TypeError(f"it returned {problem}"))
    replacement: Tensor = advantages.to(stock)
    return replacement


def tabulate(trainer: Any, advantages: Tensor) -> None:
    """Show in TRL's table of completions the advantages that are trained with. Collective.

    Args:
        advantages: (B,), of this rank's rows.
    """
    every, shown = trainer.accelerator.gather(advantages).tolist(), trainer._logs["advantages"]
    for place in range(1, min(len(every), len(shown)) + 1):  # it keeps those of the last rows
        shown[-place] = every[-place]
