"""Algorithms that change rewards by comparing the completions of a group, which is all completions of one prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trlx_hybrid.contract.protocols import Algorithm, Groups

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthRewardOptions:
    """Settings of `length_reward`, which adds a bonus to the rewards of short right completions.

    Attributes:
        weight: the difference that length makes to the reward: the shortest right completion of a group gains half of
            `weight`, and the longest right completion loses half of `weight`.
        right: the reward, weighted and summed over functions, from which on a completion counts as right.
    """

    weight: float = 0.2
    right: float = 1.0


class LengthReward(Algorithm):
    """An algorithm that adds a bonus to the reward of short right completions, and a penalty to that of long ones.

    Wrong completions gain nothing by being short, and lose by being long. The bonus is added to the reward of the first
    function that has a weight other than 0 and returned a reward for the completion.

    Source: Kimi k1.5, arXiv 2501.12599, section 2.3.3.
    """

    name = "length_reward"

    def __init__(self, options: LengthRewardOptions) -> None:
        self._options = options

    def rewards(self, groups: Groups) -> Tensor:
        """Return the rewards, changed so that each scored completion's weighted sum of rewards rises by a bonus.

        The bonus is `weight` * (1/2 - position), where `weight` is the algorithm's option. The position is 0 for the
        shortest scored completion of a group and 1 for the longest, and grows linearly with the length in between.
        A wrong completion, whose weighted sum is below the option `right`, gets no bonus above 0. Where all scored
        completions of a group have the same length, no bonus is added.

        Args:
            groups: the groups, with their rewards and lengths.

        Returns:
            The changed rewards, in the shape of `groups.rewards`.
        """
        scored, lengths = ~groups.totals.isnan(), groups.lengths.float()
        shortest = lengths.masked_fill(~scored, float("inf")).amin(dim=1, keepdim=True)
        longest = lengths.masked_fill(~scored, 0.0).amax(dim=1, keepdim=True)
        bonus = 0.5 - (lengths - shortest) / (longest - shortest).clamp(min=1)
        bonus = bonus.where(groups.totals >= self._options.right, bonus.clamp(max=0))
        bonus = bonus.masked_fill(~scored | (longest <= shortest), 0.0)
        counts = ~groups.rewards.isnan() & (groups.weights != 0)
        first = counts & (counts.cumsum(dim=-1) == 1)
        share = self._options.weight * bonus.unsqueeze(-1) / groups.weights.where(groups.weights != 0, 1.0)
        return groups.rewards + share.where(first, 0.0)

    def note(self) -> str:
        """Return the line about this algorithm that is printed when a run starts: the largest bonus."""
        return f"up to {self._options.weight / 2:g} more for the shortest right completion of a group"
