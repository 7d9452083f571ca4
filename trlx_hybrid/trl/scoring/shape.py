"""A measurement of how far the trainer's log-probs depend on the micro-batch's shape (rows and padding), apart from
rounding differences between engine and trainer.

Kernels sum in an order that depends on how many rows and how much padding they get, and a model may let rows see each
other. Engine and trainer then differ, though the engine is not the cause. So one row of a rank is scored once more,
alone and without padding, with the weights that scored it in its micro-batch. The difference between these two trainer
scores comes from the shape. The difference between the engine and the row alone is rounding. See TRL #6789.

Each of the R rows of a step takes a forward pass, and a backward pass that costs as much as two. So one row in EVERY
steps costs 1 / (3 * R * EVERY) of what the passes cost: 0.02% with 8 rows to a rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...contract.support import BOUNDS, WORDS
from ...routing import EXPERTS
from ...weights.verify import disagreement
from .branches import BRANCHES

EVERY = 250
"""The number of optimizer steps from one step with a measurement to the next. The first step is measured."""

SHAPE, ROUNDING = (tuple(f"ratio/{part}/{name}" for name in ("mean", "max")) for part in ("shape", "rounding"))
"""The metrics: mean and maximum of the absolute difference of a token's log-probs, in nats. SHAPE compares a row in its
micro-batch with the row alone, ROUNDING the engine with the row alone."""

OLD, SAMPLED = "old_per_token_logps", "sampling_per_token_logps"
"""Keys in TRL's batches for the log-probs of the trainer and of the engine, (B, T) float."""

STALENESS = "token_staleness"
"""The key in batches of rows in flight: for each token, (B, T), the optimizer steps between its sampling and the
batch."""

PICTURES = ("pixel_values", "image_grid_thw", "num_images", "token_type_ids", "mm_token_type_ids")
"""Keys in TRL's batches of rows with images, whose values do not have one entry per row."""


UNMEASURED = "log-probs not compared"
"""The key in a recording's facts (`recording.json`) that is set where the recorded run compared no log-probs, because
`max_logprob_gap` was infinite."""


def switched_off(max_logprob_gap: float | None, replayed: Mapping[str, Any] | None) -> bool:
    """Return whether the engine's log-probs are not compared with the trainer's, because `max_logprob_gap` is infinite
    in this run, or was infinite in the recorded run that this run replays.

    Args:
        max_logprob_gap: the option of this run, in nats; None for the default.
        replayed: the facts of the recording (`recording.json`) that this run replays; None if it replays none.
    """
    return max_logprob_gap == math.inf or bool((replayed or {}).get(UNMEASURED))


def measurable(batch: Mapping[str, Any]) -> bool:
    """Return whether rows of a batch can be scored alone (which rows with images cannot), and have log-probs of both
    trainer and engine."""
    return {OLD, SAMPLED, "prompt_ids"} <= batch.keys() and not batch.keys() & set(PICTURES)


def alone(batch: Mapping[str, Any], row: int) -> dict[str, Any]:
    """Return one row of a batch as a batch of size 1, without padding, so that it can be scored alone.

    Args:
        batch: a batch of TRL's for which `measurable` is True.
        row: the row's number.
    """
    prompt, mask = batch["prompt_mask"][row].bool(), batch["completion_mask"][row]
    tokens = max(1, int(mask.count_nonzero()))
    found = {
        "prompt_ids": batch["prompt_ids"][row, prompt][None],
        "prompt_mask": batch["prompt_mask"][row, prompt][None],
        "completion_ids": batch["completion_ids"][row, :tokens][None],
        "completion_mask": mask[:tokens][None],
    }
    for name in ("tool_mask", OLD, SAMPLED, BOUNDS, STALENESS, BRANCHES):
        if name in batch:
            found[name] = batch[name][row, :tokens][None]
    if WORDS in batch:
        found[WORDS] = batch[WORDS][row][None]
    if EXPERTS in batch:
        kept = torch.cat([prompt, torch.arange(len(mask), device=prompt.device) < tokens])
        found[EXPERTS] = batch[EXPERTS][row, kept][None]
    return found


def compared(batch: Mapping[str, Any]) -> Tensor:
    """Return a (B, T) bool mask of the tokens that the engine sampled with the batch's weights, and whose log-probs it
    returned."""
    trained: Tensor = current(batch).bool() & ~batch[SAMPLED].isnan()
    return trained


def current(batch: Mapping[str, Any]) -> Tensor:
    """Return a (B, T) mask of the tokens that the engine sampled with the batch's weights, not with earlier ones."""
    sampled: Tensor = batch["completion_mask"] * batch.get("tool_mask", 1)
    return sampled * (batch[STALENESS] == 0) if STALENESS in batch else sampled


def parts(one: Mapping[str, Any], scored: Tensor) -> Tensor:
    """Return how far one row's log-probs differ from the trainer's log-probs of the row alone.

    Args:
        one: the row as a batch of size 1, which `alone` returns, with the trainer's log-probs of the row in its
            micro-batch and the engine's.
        scored: (1, T), the trainer's log-probs of the row alone.

    Returns:
        (5,) float64: sum and maximum of the trainer's absolute differences (SHAPE), sum and maximum of the engine's
        (ROUNDING), and the number of tokens.
    """
    tokens = compared(one)
    found = [(one[name] - scored)[tokens].abs().double() for name in (OLD, SAMPLED)]
    none = torch.zeros((), dtype=torch.float64, device=scored.device)
    values = [value for gap in found for value in ((gap.sum(), gap.max()) if len(gap) else (none, none))]
    return torch.stack([*values, tokens.sum().double()])


def log(metrics: dict[str, list[float]], of_ranks: Tensor) -> None:
    """Log the mean and the largest value, over all ranks, of two differences of log-probs: between a row in its
    micro-batch and the row alone (SHAPE), and between the engine and the row alone (ROUNDING). Nothing is logged where
    no rank has a token that can be compared.

    Args:
        metrics: TRL's training metrics.
        of_ranks: (ranks, 5), what `parts` returned on each rank: sum and maximum of SHAPE, sum and maximum of ROUNDING,
            and the number of tokens.
    """
    sums, largest = of_ranks.sum(0).tolist(), of_ranks.max(0).values.tolist()
    if sums[4]:
        for names, at in ((SHAPE, 0), (ROUNDING, 2)):
            metrics[names[0]].append(sums[at] / sums[4])
            metrics[names[1]].append(largest[at + 1])


def furthest(batch: Mapping[str, Any], nats: float) -> int:
    """Return the number of the row that has the most tokens whose log-probs of engine and trainer differ by more than
    `nats`."""
    beyond = compared(batch) & ~((batch[SAMPLED] - batch[OLD]).abs() <= nats)
    return int(beyond.sum(1).argmax())


def fault(one: Mapping[str, Any], scored: Tensor, row: int, allowed: tuple[float, float]) -> str | None:
    """Return a text if a row shows that engine and trainer differ because of the micro-batch's shape, else None. A row
    shows this if the trainer's log-probs of the row in its micro-batch differ too much from the engine's, and the
    trainer's log-probs of the row alone do not.

    Args:
        one: the row as a batch of size 1, from `alone`, with the engine's log-probs and those from the micro-batch.
        scored: (1, T), the trainer's log-probs of the row alone.
        row: the row's number, for the text.
        allowed: the largest difference of one token's log-probs that is allowed, in nats, and the share of tokens that
            may differ by more.
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
