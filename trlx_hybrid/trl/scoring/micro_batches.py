"""Micro-batches whose rows were regrouped after TRL drew them, and TRL's metrics as they would be without the
regrouping.

TRL computes some numbers for single micro-batches (minima, maxima, and means over tokens), and logs their mean over an
optimizer step. In this mean, all micro-batches have equal weight, whatever the number of their tokens. With other rows
in each micro-batch these numbers change (the KL divergence of one step was 4.59 instead of 3.48), although the gradient
of the step does not. So after the last loss of a rollout, TRL computes all losses once more for the micro-batches as
they were drawn, from stored scores, and its metrics are taken from there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...contract.protocols import Scores
from ...errors import ComponentError

ROW = "drawn_row"
"""The key in a regrouped batch for each row's position among all rows that were drawn, (b,) int64."""

LOG_PROBS, ENTROPIES = "drawn_log_probs", "drawn_entropies"
"""The keys in a regrouped batch for the scores that its loss was computed from, (b, T) float, without a graph."""


def regrouped(
    micro_batches: Sequence[dict[str, Any]], groups: Sequence[Sequence[int]], by: str = "scoring"
) -> list[dict[str, Any]]:
    """Return the rows of some micro-batches, put together into other micro-batches of the same size.

    Args:
        groups: for each new micro-batch, the numbers of its rows, counted from 0 through all the given micro-batches.
        by: name of the component that chose the groups, for the error.

    Raises:
        ComponentError: the groups do not contain each row once, or differ in size.
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
    """Store in each micro-batch, under ROW, the positions of its rows among all rows that TRL drew. After rows are
    regrouped, `as_drawn` restores the order from them."""
    size, device = len(micro_batches[0]["prompt_ids"]), micro_batches[0]["prompt_ids"].device
    for first, micro_batch in enumerate(micro_batches):
        micro_batch[ROW] = torch.arange(first * size, (first + 1) * size, device=device)


def keep(micro_batch: dict[str, Any], scores: Scores) -> None:
    """Store scores in the micro-batch whose loss is computed from them, so that `as_drawn` can give them to the
    micro-batches that TRL drew. Does nothing unless rows were put into other micro-batches than TRL drew them in."""
    if ROW in micro_batch:
        micro_batch[LOG_PROBS] = scores.log_probs.detach()
        if scores.entropies is not None:
            micro_batch[ENTROPIES] = scores.entropies.detach()


def kept(micro_batch: Mapping[str, Any]) -> Scores:
    """Return the scores that `keep` has stored in a micro-batch."""
    return Scores(micro_batch[LOG_PROBS], micro_batch.get(ENTROPIES), None)


def as_drawn(micro_batches: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the micro-batches as TRL drew them, with their rows in the order before regrouping. Each holds the scores
    that `keep` stored when the losses of the regrouped ones were computed.

    Args:
        micro_batches: all regrouped micro-batches of a rollout; the scores are removed from them.

    Returns:
        The micro-batches; an empty list if `keep` was not called for one of them.
    """
    if not all(LOG_PROBS in micro_batch for micro_batch in micro_batches):
        return []
    places = torch.cat([micro_batch[ROW] for micro_batch in micro_batches]).argsort()
    drawn = regrouped(micro_batches, places.view(len(micro_batches), -1).tolist())
    for micro_batch in micro_batches:
        for name in (LOG_PROBS, ENTROPIES):
            micro_batch.pop(name, None)
    return drawn


def replace_last(metrics: Mapping[str, list[float]], lengths: Mapping[str, int], count: int) -> None:
    """Remove from TRL's metrics the values that the losses of regrouped micro-batches have logged. Called after the
    losses of the micro-batches that TRL drew have appended their own values. A metric to which the latter losses have
    appended nothing stays as it is.

    Args:
        metrics: TRL's metrics since its last log line, changed in place.
        lengths: length of each metric's list before the drawn micro-batches logged; the `count` values just before
            this index are removed.
        count: number of micro-batches, each of which logs one value.
    """
    for name, values in metrics.items():
        before = lengths.get(name, 0)
        if len(values) > before:
            del values[max(0, before - count) : before]
