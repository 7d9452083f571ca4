"""Trajectories for observers, read off what TRL's `_generate` returned, whoever generated."""

from __future__ import annotations

from typing import Any

from .types import Trajectory


def collect(
    trainer: str, generated: Any, *, rewards: Any, reward_weights: Any, rank: int, weight_version: int
) -> list[Trajectory]:
    """This rank's trajectories of one batch, in TRL's order.

    Args:
        trainer: `_name` of the trainer of TRL's that it is; the tuple that `_generate` returns depends on it.
        generated: that tuple.
        rewards: tensor (world * B, functions) of all ranks, NaN where a function returned None; or None.
        reward_weights: tensor (functions,) or None.
    """
    mask, completions, logprobs = None, None, None
    if trainer == "GRPO":
        prompts, ids, mask, completions, logprobs, *_ = generated
    elif trainer == "RLOO":
        prompts, ids, completions = generated
    else:
        prompts, ids, mask, *_ = generated
    scores = None
    if rewards is not None:
        weights = reward_weights.to(rewards.device) if reward_weights is not None else 1.0
        mine = rewards[rank * len(ids) : (rank + 1) * len(ids)]
        sums, scored = (mine * weights).nansum(dim=1).tolist(), (~mine.isnan()).any(dim=1).tolist()
        scores = [value if some else None for value, some in zip(sums, scored, strict=True)]
    return [
        Trajectory(
            prompt_ids=list(prompts[i]),
            completion_ids=list(ids[i]),
            loss_mask=list(mask[i]) if mask is not None else [1] * len(ids[i]),
            logprobs=list(logprobs[i]) if logprobs is not None else None,
            completion=completions[i] if completions is not None else None,
            reward=scores[i] if scores is not None else None,
            weight_version=weight_version,
        )
        for i in range(len(ids))
    ]
