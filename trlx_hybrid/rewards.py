"""Reward functions, with a literal NaN told apart from TRL's None."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import math
from collections.abc import Iterable
from typing import Any

from .errors import ConfigError, RewardError


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
