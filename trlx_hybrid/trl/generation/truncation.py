"""Truncated completions: which rows of a batch the engine reports as cut at their limit, and how they are masked and
counted.

TRL 1.16 takes a completion for truncated unless its last token is an end token or padding. With `stop`,
`stop_token_ids` or `ignore_eos` that is wrong: every row that ended properly counts as truncated, and
`mask_truncated_completions` removes all of them from the loss. Here a row is truncated if its last turn has
`finish_reason == "length"`. If no finish reason is known for a row, TRL's rule stays.

Where both rules agree on all rows, TRL does everything itself. Otherwise TRL's own masking is switched off for the
batch and done here in the same three places: the loss mask before tokens are counted, the attention mask in scoring,
and the finished batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..stock import mode_of
from .truncation_rule import MASKS, by_last_token

if TYPE_CHECKING:
    from ..state import Batch, RunState
    from ..stock import StockTrainer

TERMINATED = tuple(f"completions/{name}_terminated_length" for name in ("mean", "min", "max"))


def correct_metrics(trainer: StockTrainer, lengths: Sequence[int], rule: Sequence[bool], rows: Sequence[bool]) -> None:
    """Replace TRL's metrics of truncated and terminated completions, if TRL's rule and the finish reasons differ for
    some row. Collective.

    Args:
        lengths: lengths of this rank's completions, as TRL counts them.
        rule: whether each completion is truncated by TRL's rule.
        rows: whether each completion is truncated by its finish reason.
    """
    device = trainer.accelerator.device
    numbers = torch.tensor([lengths, rule, rows], dtype=torch.long, device=device).T.contiguous()
    length, theirs, ours = trainer.accelerator.gather(numbers).T
    if bool((theirs == ours).all()):
        return
    metrics = trainer._metrics[mode_of(trainer)]
    if not metrics["completions/clipped_ratio"]:  # a user's own `_generate` logs nothing
        return
    metrics["completions/clipped_ratio"][-1] = ours.float().mean().item()
    ended = length[ours == 0].float()
    ended = ended if ended.numel() else torch.zeros(1, device=device)
    for name, value in zip(TERMINATED, (ended.mean(), ended.min(), ended.max()), strict=True):
        metrics[name][-1] = value.item()


def note_truncated(trainer: StockTrainer, run: RunState) -> None:
    """Store which rows of the run's batch were cut at their length limit, and correct TRL's metrics of truncated rows.
    Collective."""
    if not hasattr(trainer, "eos_token_ids"):
        return
    session, batch = run.session, run.batch
    prompt_ids, ids, *rest = batch.generated
    rule = by_last_token(trainer, ids)
    told = [session.endings.truncated(*row) for row in zip(prompt_ids, ids, strict=True)]
    batch.truncated = [by_rule if known is None else known for known, by_rule in zip(told, rule, strict=True)]
    if session.selection.stock:
        return
    unknown = sum(known is None for known in told)
    if getattr(trainer, MASKS, False) and unknown:
        run.say_once(
            "unknown endings",
            "The rollout does not say how %d of %d completions ended: whether they are truncated is told by their last "
            "token, as in TRL. A completion needs the engine's `finish_reason`.",
            unknown,
            len(told),
        )
    mask = rest[0] if trainer._base_name != "RLOO" else None
    lengths = [len(row) for row in ids] if mask is None else [sum(row) for row in mask]
    correct_metrics(trainer, lengths, rule, batch.truncated)


def handed_on(trainer: StockTrainer, batch: Batch) -> Any:
    """Return a rollout's result in the form in which TRL's `_generate` must return it.

    TRL counts a row as truncated if it does not end with an end token. If the engine cut other rows at their limit than
    these, TRL's own masking is switched off for the batch. For GRPO, the loss masks of the rows that the engine cut are
    then set to 0. The caller must restore the trainer's attribute `mask_truncated_completions` after the batch.
    """
    batch.masked = None
    generated, rows = batch.generated, batch.truncated
    if rows is None or not getattr(trainer, MASKS, False) or rows == by_last_token(trainer, generated[1]):
        return generated
    setattr(trainer, MASKS, False)
    batch.masked = torch.tensor(rows, device=trainer.accelerator.device)
    if trainer._base_name != "GRPO":
        return generated
    prompts, ids, mask, *rest = generated
    batch.made_mask = mask is None
    known = [[1] * len(row) for row in ids] if mask is None else mask
    return (prompts, ids, [[0] * len(m) if cut else m for m, cut in zip(known, rows, strict=True)], *rest)


def attended(batch: Batch, attention_mask: Tensor, completion_length: int) -> Tensor:
    """Return the attention mask with which a batch is scored: 0 over the completions of the truncated rows, where this
    package masks them instead of TRL (`batch.masked`).

    Args:
        attention_mask: (B, P + T).
        completion_length: T.
    """
    if batch.masked is None or len(batch.masked) != len(attention_mask):
        return attention_mask
    seen = attention_mask.clone()
    seen[:, -completion_length:] *= ~batch.masked[:, None]
    return seen


def exclude(batch: Batch, values: dict[str, Any]) -> None:
    """Exclude the truncated rows from the loss, where this package masks them instead of TRL (`batch.masked`).

    Args:
        values: the batch as TRL trains on it; changed in place.
    """
    if batch.masked is not None:
        values["completion_mask"] = values["completion_mask"] * (~batch.masked)[:, None]
        if batch.made_mask:
            values.pop("tool_mask", None)
    batch.masked = None
