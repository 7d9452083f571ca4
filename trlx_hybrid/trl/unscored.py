"""Tokens whose log-prob the sampler does not know: they are counted, and count for nothing.

TRL 1.16 gives them an importance ratio of 1, as if the sampler had said what the trainer says.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

UNSCORED = "ratio/unscored_tokens"
"""The metric: how many tokens of a rollout have no log-prob, over all ranks. Logged where there are any."""


def unscored(batch: Mapping[str, Any]) -> Tensor:
    """Return which tokens are trained on and have none: (B, T) bool."""
    trained = batch["completion_mask"] * batch.get("tool_mask", 1)
    return batch["sampling_per_token_logps"].isnan() & trained.bool()  # type: ignore[no-any-return]


def left_out(ratio: Tensor, without: Tensor) -> Tensor:
    """Return the ratio of each token, 0 for those without a log-prob.

    Args:
        ratio: (B, T), or (B, 1) of whole sequences.
        without: (B, T) bool; where there are none, the ratio stays as it is.
    """
    return ratio.masked_fill(without, 0.0) if bool(without.any()) else ratio
