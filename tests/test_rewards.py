"""Reward functions keep their kind when they are checked."""

import asyncio
import functools
from types import SimpleNamespace

import pytest
from trl.chat_template_utils import parse_response
from trl.trainer.utils import is_async_callable
from trlx_hybrid.contract.conversation import PooledRow
from trlx_hybrid.errors import RewardError
from trlx_hybrid.rollout.pool import Pool
from trlx_hybrid.trl.generation.pooled_rewards import PooledRewards
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


class Deep:
    """A tokenizer whose parser cannot read what the model has sampled."""

    response_template = "there is something to parse"

    def parse_response(self, *args, **kwargs):
        raise RecursionError("a thousand brackets")

    def decode(self, ids, **kwargs):
        return "[" * len(ids)


class Trainer:
    """What is asked of a trainer."""

    _base_name, _tokenizer, tools, state = "GRPO", Deep(), None, None
    _run = SimpleNamespace(borrowed=SimpleNamespace(parse_response=parse_response))
    _log_completion_extra = _log_metric = staticmethod(lambda *given: None)


def test_a_completion_in_flight_that_cannot_be_parsed_is_rewarded_as_plain_text():
    begun, trainer = [], Trainer()
    begin = lambda rows, **given: begun.append((rows, given))  # noqa: E731
    trainer.reward_funcs = [SimpleNamespace(begins_early=True, begin=begin)]
    pool = Pool(1, 0)
    pool.completed = PooledRewards(trainer, lambda number: {"prompt": [{"role": "user", "content": "?"}]}).begin
    pool.begin(0, [1], 1).rows[0] = PooledRow(token_ids=[2, 3], finish_reason="stop")
    assert pool.ready() is not None
    ((rows, given),) = begun
    assert (rows, given["completions"]) == ([0], [[{"role": "assistant", "content": "[["}]])
    pool.ready()
    assert len(begun) == 1
