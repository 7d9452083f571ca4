"""Reward functions keep their kind when they are checked."""

import asyncio
import functools

import pytest
from trl.trainer.utils import is_async_callable
from trlx_hybrid.errors import RewardError
from trlx_hybrid.trl.rewards import checked_reward


class Later:
    async def __call__(self, scores, scale=1.0):
        return (score * scale for score in scores)


async def later(scores, scale=1.0):
    return await Later()(scores, scale)


@pytest.mark.parametrize(
    "function",
    [later, Later(), functools.partial(later, scale=1.0), functools.partial(Later(), scale=1.0)],
    ids=["function", "object", "partial", "partial object"],
)
def test_what_trl_awaits_is_awaited_and_checked(function):
    assert is_async_callable(function)
    checked = checked_reward(function)
    assert is_async_callable(checked)
    assert asyncio.run(checked([1.0, 2.0])) == [1.0, 2.0]
    with pytest.raises(RewardError, match="returned inf for completion 0"):
        asyncio.run(checked([float("inf")]))
