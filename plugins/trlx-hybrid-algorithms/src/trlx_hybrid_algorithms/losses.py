"""Algorithms that add terms to TRL's loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trlx_hybrid.contract.protocols import Algorithm, Scores

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class PositiveNllOptions:
    """Settings of `positive_nll`, which adds the negative log-likelihood of completions with a positive advantage to
    the loss.

    Attributes:
        weight: the factor of this term of the loss.
    """

    weight: float = 0.1


class PositiveNll(Algorithm):
    """An algorithm that adds the negative log-likelihood of completions with a positive advantage to the loss.

    It reinforces successful completions even where the clipped loss no longer has a gradient for them.

    Modelled on VAPO, arXiv 2504.05118. VAPO adds the term for every correct completion, and averages over the tokens of
    a whole batch, not of a micro-batch.
    """

    name = "positive_nll"

    def __init__(self, options: PositiveNllOptions) -> None:
        self._options = options

    def loss(self, scores: Scores, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the term to add to a micro-batch's loss: the option `weight` times the mean negative log-likelihood of
        the trained tokens whose advantage is positive; 0 if there are none.

        Args:
            scores: log-probs of the completions' tokens, (B, C).
            batch: the micro-batch of TRL, with `advantages`, `completion_mask` and, if tools were called, `tool_mask`.
        """
        mask = batch["completion_mask"] * batch.get("tool_mask", 1)
        better = batch["advantages"] > 0
        mask = mask * (better if better.ndim == 2 else better.unsqueeze(1))
        return -self._options.weight * (scores.log_probs * mask).sum() / mask.sum().clamp(min=1)

    def note(self) -> str:
        """Return the line about this algorithm that is printed when a run starts: the weight of the additional loss
        term."""
        return f"{self._options.weight:g} times the negative log-likelihood of better completions"
