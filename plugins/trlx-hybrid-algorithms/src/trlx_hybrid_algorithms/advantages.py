"""Algorithms that compute advantages: how much each completion of a group (the completions of one prompt) counts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trlx_hybrid.contract.protocols import Algorithm, Groups

if TYPE_CHECKING:
    from torch import Tensor


class LeaveOneOut(Algorithm):
    """An algorithm whose advantage is a completion's reward minus the mean reward of the group's other completions.

    This is unbiased, unlike TRL's mean, which includes the completion's own reward.

    Source: RLOO, arXiv 2402.14740.
    """

    name = "leave_one_out"

    def advantages(self, groups: Groups) -> Tensor:
        """Return the reward of each completion minus the mean reward of the others in its group; 0 for a completion
        without a reward.

        It is computed as n / (n - 1) times the difference from the mean of all n.

        Args:
            groups: the groups and their rewards.

        Returns:
            The advantages, float32 of shape (groups, completions).
        """
        totals = groups.totals
        scored = (~totals.isnan()).sum(dim=1, keepdim=True)
        difference = totals - totals.nanmean(dim=1, keepdim=True)
        return (difference * scored / (scored - 1).clamp(min=1)).nan_to_num(nan=0.0)


class OptimalBaseline(Algorithm):
    """An algorithm whose advantage is a completion's reward minus the length-weighted mean reward of its group.

    This mean approximates the baseline with which the policy gradient has the least variance.

    Source: OPO, arXiv 2505.23585.
    """

    name = "optimal_baseline"

    def advantages(self, groups: Groups) -> Tensor:
        """Return the reward of each completion minus the mean reward of its group, in which each reward is weighted by
        its completion's length; 0 for a completion without a reward.

        Args:
            groups: the groups, with their rewards and lengths.

        Returns:
            The advantages, float32 of shape (groups, completions).
        """
        totals = groups.totals
        weights = groups.lengths.float().masked_fill(totals.isnan(), 0.0)
        baseline = (totals.nan_to_num(nan=0.0) * weights).sum(dim=1, keepdim=True)
        baseline /= weights.sum(dim=1, keepdim=True).clamp(min=1.0)
        return (totals - baseline).nan_to_num(nan=0.0)


class PassAtK(Algorithm):
    """An algorithm that gives an advantage to the best completion of each group only: its lead over the second best.

    The lead is what a completion adds to the best reward of its group.

    Source: arXiv 2503.19595, for k = n completions of a group.
    """

    name = "pass_at_k"

    def advantages(self, groups: Groups) -> Tensor:
        """Return the best reward minus the second best for the best completion of each group, and 0 for all others.

        Args:
            groups: the groups and their rewards.

        Returns:
            The advantages, float32 of shape (groups, completions).
        """
        totals = groups.totals.nan_to_num(nan=float("-inf"))
        best, where = totals.max(dim=1)
        advantages = totals.new_zeros(totals.shape)
        if totals.shape[1] > 1:
            ahead = best - totals.topk(2, dim=1).values[:, 1]
            advantages.scatter_(1, where[:, None], ahead.masked_fill(~ahead.isfinite(), 0.0)[:, None])
        return advantages
