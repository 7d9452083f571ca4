"""How far log-probs depend on the shape of the micro-batch that they are scored in, apart from the engine's rounding.

Kernels sum in an order that depends on how many rows and how much padding they are given, and a model may let rows see
each other. Engine and trainer then differ, and the engine has no part in it. So one row of a rank is scored once more,
alone and without padding, with the weights that scored it in its micro-batch. What differs between the two is the
shape's, trainer against trainer. What is left between the engine and the row alone is rounding. See TRL #6789.

Each of the R rows of a step takes a forward pass, and a backward pass that costs two of them. So one row in EVERY steps
costs 1 / (3 * R * EVERY) of what the passes cost: 0.02% with 8 rows to a rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..kept_tokens import BOUNDS, WORDS
from ..weights.verify import disagreement
from .routing import EXPERTS

EVERY = 250
"""Optimizer steps from one that is measured to the next. The first step is."""

SHAPE, ROUNDING = (tuple(f"ratio/{part}/{name}" for name in ("mean", "max")) for part in ("shape", "rounding"))
"""The metrics: absolute differences of a token's log-probs, in nats. SHAPE is between a row in its micro-batch and the
row alone, ROUNDING between the engine and the row alone."""

OLD, SAMPLED = "old_per_token_logps", "sampling_per_token_logps"
"""In TRL's batches: log-probs of the trainer and of the engine, (B, T) float."""

PICTURES = ("pixel_values", "image_grid_thw", "num_images", "token_type_ids", "mm_token_type_ids")
"""In TRL's batches of rows with images, which are not one to a row."""


UNMEASURED = "log-probs not compared"
"""In what a recording says of its run: that `max_logprob_gap` had switched this off."""


def switched_off(trainer: Any) -> bool:
    """Return whether this run, or the one that it replays, holds no log-probs against each other."""
    facts = (trainer._replay.facts or {}) if trainer._replay is not None else {}
    return trainer.session.config.max_logprob_gap == math.inf or bool(facts.get(UNMEASURED))


def measurable(batch: Mapping[str, Any]) -> bool:
    """Return whether rows of a batch can be scored alone, and have log-probs of both sides."""
    return {OLD, SAMPLED, "prompt_ids"} <= batch.keys() and not batch.keys() & set(PICTURES)


def alone(batch: Mapping[str, Any], row: int) -> dict[str, Any]:
    """Return one row as a batch of its own, without padding.

    Args:
        batch: of TRL's, see `measurable`.
    """
    prompt, mask = batch["prompt_mask"][row].bool(), batch["completion_mask"][row]
    tokens = max(1, int(mask.count_nonzero()))
    found = {
        "prompt_ids": batch["prompt_ids"][row, prompt][None],
        "prompt_mask": batch["prompt_mask"][row, prompt][None],
        "completion_ids": batch["completion_ids"][row, :tokens][None],
        "completion_mask": mask[:tokens][None],
    }
    for name in ("tool_mask", OLD, SAMPLED, BOUNDS):
        if name in batch:
            found[name] = batch[name][row, :tokens][None]
    if WORDS in batch:
        found[WORDS] = batch[WORDS][row][None]
    if EXPERTS in batch:
        kept = torch.cat([prompt, torch.arange(len(mask), device=prompt.device) < tokens])
        found[EXPERTS] = batch[EXPERTS][row, kept][None]
    return found


def compared(batch: Mapping[str, Any]) -> Tensor:
    """Return which tokens the engine sampled, and says how probably: (B, T) bool."""
    sampled = batch["completion_mask"] * batch.get("tool_mask", 1)
    return sampled.bool() & ~batch[SAMPLED].isnan()  # type: ignore[no-any-return]


def parts(one: Mapping[str, Any], scored: Tensor) -> Tensor:
    """Return (5,) float64 of a row: the sum and the largest of SHAPE, the same of ROUNDING, and how many tokens.

    Args:
        one: see `alone`.
        scored: (1, T), the trainer's log-probs of the row alone.
    """
    tokens = compared(one)
    found = [(one[name] - scored)[tokens].abs().double() for name in (OLD, SAMPLED)]
    none = torch.zeros((), dtype=torch.float64, device=scored.device)
    values = [value for gap in found for value in ((gap.sum(), gap.max()) if len(gap) else (none, none))]
    return torch.stack([*values, tokens.sum().double()])


def log(metrics: dict[str, list[float]], of_ranks: Tensor) -> None:
    """Log what was measured; nothing where no rank has a token that can be compared.

    Args:
        metrics: TRL's, of training.
        of_ranks: (ranks, 5), see `parts`.
    """
    sums, largest = of_ranks.sum(0).tolist(), of_ranks.max(0).values.tolist()
    if sums[4]:
        for names, at in ((SHAPE, 0), (ROUNDING, 2)):
            metrics[names[0]].append(sums[at] / sums[4])
            metrics[names[1]].append(largest[at + 1])


def furthest(batch: Mapping[str, Any], nats: float) -> int:
    """Return the row with the most tokens of which engine and trainer are further apart than `nats`."""
    beyond = compared(batch) & ~((batch[SAMPLED] - batch[OLD]).abs() <= nats)
    return int(beyond.sum(1).argmax())


def fault(one: Mapping[str, Any], scored: Tensor, row: int, allowed: tuple[float, float]) -> str | None:
    """Return how a row shows that the shape of its micro-batch parts the trainer from the engine, or None.

    Args:
        one: see `alone`.
        scored: (1, T), the trainer's log-probs of the row alone.
        row: its number, for the message.
        allowed: see `weights.verify.allowed_gap`. The row must be beyond it in its micro-batch, and within it alone.
    """
    tokens, ids = compared(one), one["completion_ids"]
    within = disagreement(one[SAMPLED], scored, tokens, ids, allowed) is None
    if not within or disagreement(one[SAMPLED], one[OLD], tokens, ids, allowed) is None:
        return None
    token = int((one[OLD] - scored).abs().masked_fill(~tokens, 0).argmax())
    return (
        f"token {token} of completion {row} (id {int(ids[0, token])}) has {float(one[OLD][0, token]):.6g} beside other "
        f"rows and {float(scored[0, token]):.6g} alone, and the engine says {float(one[SAMPLED][0, token]):.6g}"
    )
