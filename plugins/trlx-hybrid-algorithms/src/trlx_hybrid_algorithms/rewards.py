"""Rewards that depend on the rest of the group."""

from __future__ import annotations

from torch import Tensor
from trlx_hybrid.protocols import Algorithm, Groups

from .options import LengthRewardOptions


class LengthReward(Algorithm):
    """Among the right completions of a group, the shorter ones get more; wrong ones gain nothing by being short, and
    lose by being long. Added to the first reward function's.

    Source: Kimi k1.5, arXiv 2501.12599, section 2.3.3.
    """

    name = "length_reward"

    def __init__(self, options: LengthRewardOptions) -> None:
        self._options = options

    def rewards(self, groups: Groups) -> Tensor:
        """With weight * (1/2 - where a completion's length lies between the group's shortest and its longest)."""
        lengths = groups.lengths.float()
        shortest, longest = lengths.amin(dim=1, keepdim=True), lengths.amax(dim=1, keepdim=True)
        bonus = 0.5 - (lengths - shortest) / (longest - shortest).clamp(min=1)
        bonus = bonus.where(groups.totals >= self._options.right, bonus.clamp(max=0))
        bonus = bonus.masked_fill(longest == shortest, 0.0)
        rewards = groups.rewards.clone()
        scored = ~groups.totals.isnan()
        first = rewards[..., 0].nan_to_num(nan=0.0) + self._options.weight * bonus / groups.weights[0]
        rewards[..., 0] = first.where(scored, rewards[..., 0])
        return rewards

    def note(self) -> str:
        """What is at stake."""
        return f"up to {self._options.weight / 2:g} more for the shortest right completion of a group"
