"""Rows in other micro-batches than TRL drew, and TRL's metrics of those that it drew.

TRL logs the mean over an optimizer step of numbers that it computes of single micro-batches: means over tokens, which
count alike however many tokens they are of, smallest and largest ones. With other rows in each, these are other numbers
(the KL divergence of one step was 4.59 for 3.48), although the gradient of the step is the same. So where all losses of
a rollout are computed, TRL computes them once more of the micro-batches as they were drawn, from scores that were kept,
and its metrics are taken from there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import ComponentError
from ..protocols import Scores

ROW = "drawn_row"
"""In a batch whose rows were regrouped: where each stood among all that were drawn, (b,) int64."""

LOG_PROBS, ENTROPIES = "drawn_log_probs", "drawn_entropies"
"""In such a batch whose loss was computed: what it was computed from, (b, T) float, without a graph."""


def regrouped(
    micro_batches: Sequence[dict[str, Any]], groups: Sequence[Sequence[int]], by: str = "scoring"
) -> list[dict[str, Any]]:
    """Return the same rows in other micro-batches.

    Args:
        groups: the rows of each, counted through all the micro-batches as they were.
        by: who chose them.

    Raises:
        ComponentError: they do not hold each row once, or not equally many.
    """
    size = len(micro_batches[0]["prompt_ids"])
    rows, sizes = size * len(micro_batches), [len(group) for group in groups]
    if sorted(row for group in groups for row in group) != list(range(rows)) or set(sizes) != {size}:
        raise ComponentError(
            f"The {by} put the {rows} rows of {len(micro_batches)} micro-batches into groups of "
            f"{', '.join(map(str, sizes))}, where each row once and {size} to a group were expected. Report it to its "
            "author."
        )
    whole: dict[str, Any] = {}
    for name, value in micro_batches[0].items():
        if isinstance(value, Tensor) and value.ndim:
            whole[name] = torch.cat([micro[name] for micro in micro_batches])
    return [
        {name: whole[name][list(group)] if name in whole else value for name, value in micro_batches[0].items()}
        for group in groups
    ]


def number(micro_batches: Sequence[dict[str, Any]]) -> None:
    """Note in micro-batches where their rows stand, for `as_drawn`."""
    size, device = len(micro_batches[0]["prompt_ids"]), micro_batches[0]["prompt_ids"].device
    for first, micro_batch in enumerate(micro_batches):
        micro_batch[ROW] = torch.arange(first * size, (first + 1) * size, device=device)


def keep(micro_batch: dict[str, Any], scores: Scores) -> None:
    """Keep what a loss is computed from, where the rows were regrouped."""
    if ROW in micro_batch:
        micro_batch[LOG_PROBS] = scores.log_probs.detach()
        if scores.entropies is not None:
            micro_batch[ENTROPIES] = scores.entropies.detach()


def kept(micro_batch: Mapping[str, Any]) -> Scores:
    """Return what `keep` has kept."""
    return Scores(micro_batch[LOG_PROBS], micro_batch.get(ENTROPIES), None)


def as_drawn(micro_batches: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return regrouped rows as they were drawn, with their scores, which the given micro-batches lose; nothing where
    some have none, for a loss that was computed without them."""
    if not all(LOG_PROBS in micro_batch for micro_batch in micro_batches):
        return []
    places = torch.cat([micro_batch[ROW] for micro_batch in micro_batches]).argsort()
    drawn = regrouped(micro_batches, places.view(len(micro_batches), -1).tolist())
    for micro_batch in micro_batches:
        for name in (LOG_PROBS, ENTROPIES):
            micro_batch.pop(name, None)
    return drawn


def replace_last(metrics: Mapping[str, list[float]], lengths: Mapping[str, int], count: int) -> None:
    """Take the last numbers of each metric in the place of as many before them, where both are of the same losses.

    Args:
        metrics: TRL's, since its last line.
        lengths: of the lists in it, before the last numbers came.
        count: how many losses there are.
    """
    for name, values in metrics.items():
        before = lengths.get(name, 0)
        if len(values) > before:
            del values[max(0, before - count) : before]
