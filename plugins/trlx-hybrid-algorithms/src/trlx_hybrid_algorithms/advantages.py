"""How much each completion of a group counts."""

from __future__ import annotations

import torch
from torch import Tensor
from trlx_hybrid.protocols import Algorithm, Groups


class LeaveOneOut(Algorithm):
    """A completion's reward less the mean of the others': unbiased, where TRL's mean has the completion's own in it.

    Source: RLOO, arXiv 2402.14740.
    """

    name = "leave_one_out"

    def advantages(self, groups: Groups) -> Tensor:
        """n / (n - 1) times the reward less the mean of all n."""
        totals = groups.totals
        scored = (~totals.isnan()).sum(dim=1, keepdim=True)
        difference = totals - totals.nanmean(dim=1, keepdim=True)
        return (difference * scored / (scored - 1).clamp(min=1)).nan_to_num(nan=0.0)


class OptimalBaseline(Algorithm):
    """A completion's reward less the group's mean weighted by length, which is about the baseline of least variance.

    Source: OPO, arXiv 2505.23585.
    """

    name = "optimal_baseline"

    def advantages(self, groups: Groups) -> Tensor:
        """Of rows that were scored."""
        totals = groups.totals
        weights = groups.lengths.float().masked_fill(totals.isnan(), 0.0)
        baseline = (totals.nan_to_num(nan=0.0) * weights).sum(dim=1, keepdim=True)
        baseline /= weights.sum(dim=1, keepdim=True).clamp(min=1.0)
        return (totals - baseline).nan_to_num(nan=0.0)


class PassAtK(Algorithm):
    """What a completion adds to the best reward of its group: only the best has an advantage, by how far it is ahead.

    Source: arXiv 2503.19595, for k = n completions of a group.
    """

    name = "pass_at_k"

    def advantages(self, groups: Groups) -> Tensor:
        """The best less the second best, for the best."""
        totals = groups.totals.nan_to_num(nan=float("-inf"))
        best, where = totals.max(dim=1)
        advantages = torch.zeros_like(totals)
        if totals.shape[1] > 1:
            ahead = best - totals.topk(2, dim=1).values[:, 1]
            advantages.scatter_(1, where[:, None], ahead.masked_fill(~ahead.isfinite(), 0.0)[:, None])
        return advantages
