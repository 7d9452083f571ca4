"""The divergence of trainer and sampler: TRL's importance-sampling correction and its metrics, and the tokens for which
the sampler returned no log-prob.

TRL 1.16 gives such tokens an importance ratio of 1, as if sampler and trainer agreed on them. Here they are counted,
and left out of training.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..stock import mode_of
from .shape import OLD, SAMPLED, STALENESS

if TYPE_CHECKING:
    from ...interprocess.ranks import Ranks
    from ..stock import StockTrainer

DIVERGENCE = tuple(f"sampling/sampling_logp_difference/{name}" for name in ("mean", "max"))
RATIO = tuple(f"sampling/importance_sampling_ratio/{name}" for name in ("min", "mean", "max"))
"""Names of TRL's metrics that are computed from the old log-probs of a rollout."""

OF_SEQUENCES = ("sequence_mask", "sequence_truncate")
"""Modes of TRL's importance-sampling correction (`vllm_importance_sampling_mode`) that compute one ratio per
sequence."""

CURRENT_GAP, STALE_GAP = "sampling/current_logp_difference", "sampling/stale_logp_difference"
PARTS = ("staleness_0", "staleness_1", "staleness_2_up", "short", "medium", "long")
"""Names of the metrics of rows in flight: differences of log-probs; and parts of a batch's tokens, whose mean
importance ratio is logged as `sampling/ratio/…`, and the share of tokens whose ratio was cut as `sampling/cut/…`."""

UNSCORED = "ratio/unscored_tokens"
"""The metric: number of a rollout's tokens without a log-prob, over all ranks. Logged only where there are any."""


def corrects(trainer: StockTrainer) -> bool:
    """Return whether TRL corrects for differences between sampler and trainer (importance sampling)."""
    return bool(trainer.use_vllm and getattr(trainer, "vllm_importance_sampling_correction", False))


def unscored(batch: Mapping[str, Any]) -> Tensor:
    """Return a (B, T) bool mask of the tokens that are trained on but have no log-prob from the sampler."""
    trained = batch["completion_mask"] * batch.get("tool_mask", 1)
    sampled: Tensor = batch["sampling_per_token_logps"]
    without: Tensor = sampled.isnan() & trained.bool()
    return without


def left_out(ratio: Tensor, without: Tensor) -> Tensor:
    """Return the importance ratio of each token, with 0 for tokens without a log-prob, so that they do not count in the
    loss.

    Args:
        ratio: (B, T), or (B, 1) for whole sequences.
        without: (B, T) bool, the tokens without a log-prob; if there are none, `ratio` is returned unchanged.
    """
    return ratio.masked_fill(without, 0.0) if bool(without.any()) else ratio


def leave_out_unscored(trainer: StockTrainer, ranks: Ranks, batch: dict[str, Any]) -> None:
    """Exclude from training the tokens whose log-prob the sampler did not return, and log their number. Collective.

    Args:
        batch: the batch as TRL trains on it; changed in place.
    """
    if not corrects(trainer) or "sampling_per_token_logps" not in batch:
        return
    without = unscored(batch)
    tokens = ranks.sum(int(without.sum()))
    if tokens:
        trainer._metrics[mode_of(trainer)][UNSCORED].append(tokens)
    if "importance_sampling_ratio" in batch:  # else the first loss forward computes it
        batch["importance_sampling_ratio"] = left_out(batch["importance_sampling_ratio"], without)


def importance_ratio(trainer: StockTrainer, old: Tensor, sampled: Tensor, mask: Tensor) -> Tensor:
    """Return TRL's importance-sampling ratio between trainer and sampler, as
    `GRPOTrainer._generate_and_score_completions` computes it.

    Args:
        old, sampled: log-probs of trainer and sampler, (B, T) float; NaN where the sampler has none.
        mask: (B, T), 0 where no token is trained.

    Returns:
        (B, T), or (B, 1) for the modes that take whole sequences.
    """
    return _cut(trainer, _whole_ratio(trainer, old, sampled, mask))


def _cut(trainer: StockTrainer, ratio: Tensor) -> Tensor:
    """Return a ratio, cut at its bounds in the way of TRL's `vllm_importance_sampling_mode`."""
    low, high = trainer.vllm_importance_sampling_clip_min, trainer.vllm_importance_sampling_clip_max
    if trainer.vllm_importance_sampling_mode in ("sequence_truncate", "token_truncate"):
        return torch.clamp(ratio, min=low, max=high)
    low, high = -math.inf if low is None else low, math.inf if high is None else high
    return ratio.masked_fill((ratio < low) | (ratio > high), value=0.0)


def _whole_ratio(trainer: StockTrainer, old: Tensor, sampled: Tensor, mask: Tensor) -> Tensor:
    """Return the ratio before it is cut at its bounds."""
    difference = torch.nan_to_num((old - sampled) * mask, nan=0.0)
    if trainer.vllm_importance_sampling_mode in OF_SEQUENCES:
        difference = difference.sum(dim=-1, keepdim=True)
    return torch.exp(difference)


def log_staleness(trainer: StockTrainer, ranks: Ranks, batch: Mapping[str, Any]) -> None:
    """Log how far engine and trainer differ for parts of a batch of rows in flight. The parts are the tokens by their
    staleness, and the tokens of the rows by their length (`thirds`). Collective; it waits for the device once.

    Args:
        batch: this rank's rows, with the log-probs of trainer and engine and the staleness of each token.
    """
    old, sampled, age = batch[OLD], batch[SAMPLED], batch[STALENESS]
    mask = (batch["completion_mask"] * batch.get("tool_mask", 1)).bool() & ~sampled.isnan()
    whole = _whole_ratio(trainer, old, sampled, mask).expand_as(old)
    ratio = _cut(trainer, whole)
    values = [(old - sampled).abs().nan_to_num(), ratio, ratio != whole, mask]
    third = thirds(trainer.accelerator.gather(mask.sum(1)))[ranks.rank * len(mask) :][: len(mask), None]
    of_rows = ((third == place).expand_as(mask) for place in range(3))
    parts = torch.stack([age == 0, age == 1, age > 1, *of_rows]) & mask
    sums = torch.einsum("pbt,vbt->pv", parts.double(), torch.stack([value.double() for value in values]))
    found = ranks.total(sums).tolist()
    metrics = trainer._metrics[mode_of(trainer)]
    stale = [one + other for one, other in zip(found[1], found[2], strict=True)]
    for name, (gap, _, _, tokens) in ((CURRENT_GAP, found[0]), (STALE_GAP, stale)):
        if tokens:
            metrics[name].append(gap / tokens)
    for part, (_, ratios, cut, tokens) in zip(PARTS, found, strict=True):
        if tokens:
            metrics[f"sampling/ratio/{part}"].append(ratios / tokens)
            metrics[f"sampling/cut/{part}"].append(cut / tokens)


def thirds(lengths: Tensor) -> Tensor:
    """Return for each row of a batch the third that it belongs to, 0 for the short, 1 for the medium and 2 for the long
    rows. Rows are ordered by length, and rows of one length by their place in the batch. Rows without a token do not
    count.

    Args:
        lengths: (rows,) int, the number of trained tokens of each row of all ranks.
    """
    places = torch.empty_like(lengths)
    places[lengths.argsort(stable=True)] = torch.arange(len(lengths), device=lengths.device)
    empty = (lengths == 0).sum()
    return ((places - empty) * 3 // (len(lengths) - empty).clamp(min=1)).clamp(min=0)


def log_divergence(
    trainer: StockTrainer, metrics: dict[str, list[float]], old: Tensor, sampled: Tensor, mask: Tensor, ratio: Tensor
) -> None:
    """Log TRL's metrics of how far the log-probs of sampler and trainer differ, as
    `GRPOTrainer._generate_and_score_completions` does. Collective.

    Args:
        metrics: TRL's metrics of training or of evaluation, to be appended to.
        old, sampled: log-probs of trainer and sampler, (B, T) float; NaN where the sampler has none.
        mask: (B, T) bool, the trained tokens.
        ratio: the importance-sampling ratio, (B, T), or (B, 1) for whole sequences.
    """
    gather = trainer.accelerator.gather
    difference = torch.abs(old - sampled)
    difference = difference[mask & ~torch.isnan(difference)]
    none = torch.tensor(0.0, device=old.device)
    mean, largest = (difference.mean(), difference.max()) if difference.numel() else (none, none)
    metrics[DIVERGENCE[0]].append(gather(mean).mean().item())
    metrics[DIVERGENCE[1]].append(gather(largest).max().item())
    flat = ratio.flatten() if trainer.vllm_importance_sampling_mode in OF_SEQUENCES else ratio[mask]
    low, mean, high = (flat.min(), flat.mean(), flat.max()) if flat.numel() else (none, none, none)
    metrics[RATIO[0]].append(_finite(gather(low)).min().item())
    metrics[RATIO[1]].append(gather(mean).nanmean().item())
    metrics[RATIO[2]].append(_finite(gather(high)).max().item())


def _finite(gathered: Tensor) -> Tensor:
    """Return the values without NaN, to take a minimum or maximum of them; all of them if every value is NaN."""
    kept = gathered[~torch.isnan(gathered)]
    return kept if kept.numel() else gathered
