"""Tokens for which the sampler returned no log-prob: they are counted, and excluded from training.

TRL 1.16 gives them an importance ratio of 1, as if sampler and trainer agreed on them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

UNSCORED = "ratio/unscored_tokens"
"""The metric: number of a rollout's tokens without a log-prob, over all ranks. Logged only where there are any."""


def unscored(batch: Mapping[str, Any]) -> Tensor:
    """Return a (B, T) bool mask of the tokens that are trained on but have no log-prob from the sampler."""
    trained = batch["completion_mask"] * batch.get("tool_mask", 1)
    return batch["sampling_per_token_logps"].isnan() & trained.bool()  # type: ignore[no-any-return]


def left_out(ratio: Tensor, without: Tensor) -> Tensor:
    """Return the importance ratio of each token, with 0 for tokens without a log-prob, so that they do not count in the
    loss.

    Args:
        ratio: (B, T), or (B, 1) for whole sequences.
        without: (B, T) bool, the tokens without a log-prob; if there are none, `ratio` is returned unchanged.
    """
    return ratio.masked_fill(without, 0.0) if bool(without.any()) else ratio
