"""Terms of the loss beside TRL's."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor
from trlx_hybrid.protocols import Algorithm, Scores

from .options import PositiveNllOptions


class PositiveNll(Algorithm):
    """The negative log-likelihood of completions with a positive advantage: what went well is imitated, also where the
    clipped loss has no gradient for it any more.

    After: VAPO, arXiv 2504.05118, which takes all right answers and averages over the tokens of a batch.
    """

    name = "positive_nll"

    def __init__(self, options: PositiveNllOptions) -> None:
        self._options = options

    def loss(self, scores: Scores, batch: Mapping[str, Tensor]) -> Tensor:
        """Mean over the trained tokens of those completions of a micro-batch; 0 where there are none."""
        mask = batch["completion_mask"] * batch.get("tool_mask", 1)
        better = batch["advantages"] > 0
        mask = mask * (better if better.ndim == 2 else better.unsqueeze(1))
        return -self._options.weight * (scores.log_probs * mask).sum() / mask.sum().clamp(min=1)

    def note(self) -> str:
        """How much."""
        return f"{self._options.weight:g} times the negative log-likelihood of better completions"
