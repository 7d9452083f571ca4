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

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

MASKS = "mask_truncated_completions"
"""The name of TRL's setting, and of the attribute of its GRPO and RLOO trainers, that excludes truncated completions
from the loss."""

BY_ENGINE, BY_TOKEN = "those whose finish_reason is 'length'", "those that end with no end token, as in TRL"
"""The two rules for which completions count as truncated, in the words of the run's header and of recordings."""

TERMINATED = tuple(f"completions/{name}_terminated_length" for name in ("mean", "min", "max"))


def by_last_token(trainer: Any, completion_ids: Sequence[Sequence[int]]) -> list[bool]:
    """Return whether each row is truncated by TRL's rule: its last token is neither an end token nor padding."""
    ends = {*trainer.eos_token_ids, trainer._tokenizer.pad_token_id}
    return [not row or row[-1] not in ends for row in completion_ids]


def rule_of(trainer: Any) -> str:
    """Return which of BY_ENGINE and BY_TOKEN decides about truncated completions in this run, as far as it is known
    before sampling."""
    custom = getattr(trainer, "rollout_func", None)
    replays = trainer.session.config.replay is not None
    ours = replays or not trainer.session.selection.stock
    if ours and trainer.use_vllm and (custom is None or getattr(custom, "samples_from_session", False)):
        return BY_ENGINE
    return BY_TOKEN


def truncated_rows(trainer: Any, prompt_ids: Sequence[Any], completion_ids: Sequence[Any]) -> list[bool]:
    """Return whether each row was cut at its limit: as its finish reason says, or by TRL's rule where that is not
    known.

    Args:
        prompt_ids, completion_ids: ids of each row.
    """
    rows, endings = by_last_token(trainer, completion_ids), trainer.session.endings
    said = [endings.truncated(*row) for row in zip(prompt_ids, completion_ids, strict=True)]
    if getattr(trainer, MASKS, False) and not trainer.session.selection.stock and any(known is None for known in said):
        _say_unknown(trainer, sum(known is None for known in said), len(said))
    return [rule if known is None else known for known, rule in zip(said, rows, strict=True)]


def correct_metrics(trainer: Any, lengths: Sequence[int], rule: Sequence[bool], rows: Sequence[bool]) -> None:
    """Replace TRL's metrics of truncated and terminated completions, if TRL's rule and the finish reasons differ for
    some row. Collective.

    Args:
        lengths: lengths of this rank's completions, as TRL counts them.
        rule: whether each completion is truncated by TRL's rule.
        rows: whether each completion is truncated in fact.
    """
    device = trainer.accelerator.device
    numbers = torch.tensor([lengths, rule, rows], dtype=torch.long, device=device).T.contiguous()
    length, theirs, ours = trainer.accelerator.gather(numbers).T
    if bool((theirs == ours).all()):
        return
    metrics = trainer._metrics["train" if trainer.model.training else "eval"]
    if not metrics["completions/clipped_ratio"]:  # a user's own `_generate` logs nothing
        return
    metrics["completions/clipped_ratio"][-1] = ours.float().mean().item()
    ended = length[ours == 0].float()
    ended = ended if ended.numel() else torch.zeros(1, device=device)
    for name, value in zip(TERMINATED, (ended.mean(), ended.min(), ended.max()), strict=True):
        metrics[name][-1] = value.item()


class Truncation:
    """A mixin that excludes truncated rows from the loss (`mask_truncated_completions`) by their finish reason, where
    TRL's rule would mask other rows. It comes right before TRL's trainer, after all other mixins."""

    _truncated: list[bool] | None = None  # for each row that was generated last
    _masked: Tensor | None = None  # (B,) bool: truncated rows of the batch being scored, if TRL's rule gives others
    _made_mask = False  # the batch had no loss mask, and got one for this masking

    def _hands_on(self, generated: Any) -> Any:
        """Return a rollout's result as TRL should go on with it. If the truncated rows are others than by TRL's rule,
        TRL's own masking is switched off for the batch, and for GRPO the rows' loss masks are set to 0.

        Args:
            generated: the result of TRL's `_generate`.
        """
        trainer: Any = self
        self._masked = None
        ids, rows = generated[1], self._truncated
        if rows is None or not getattr(trainer, MASKS, False) or rows == by_last_token(trainer, ids):
            return generated
        setattr(trainer, MASKS, False)  # the trainer restores it after the batch
        self._masked = torch.tensor(rows, device=trainer.accelerator.device)
        if trainer._base_name != "GRPO":
            return generated
        prompts, ids, mask, *rest = generated
        self._made_mask = mask is None
        known = [[1] * len(row) for row in ids] if mask is None else mask
        return (prompts, ids, [[0] * len(m) if cut else m for m, cut in zip(known, rows, strict=True)], *rest)

    def _attended(self, attention_mask: Tensor, completion_length: int) -> Tensor:
        """Return the attention mask with which a batch is scored: 0 over the completions of truncated rows that are
        masked here.

        Args:
            attention_mask: (B, P + T).
            completion_length: T.
        """
        if self._masked is None or len(self._masked) != len(attention_mask):
            return attention_mask
        seen = attention_mask.clone()
        seen[:, -completion_length:] *= ~self._masked[:, None]
        return seen

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        batch = super()._generate_and_score_completions(inputs)  # type: ignore[misc]
        masked, self._masked = self._masked, None
        if masked is not None:
            batch["completion_mask"] = batch["completion_mask"] * (~masked)[:, None]
            if self._made_mask:
                batch.pop("tool_mask", None)
            self._made_mask = False
        return batch


def _say_unknown(trainer: Any, rows: int, of: int) -> None:
    """Warn, once per run, that the rollout does not say how some completions ended."""
    if not trainer.__dict__.get("_said_unknown_endings"):
        trainer._said_unknown_endings = True
        logger.warning(
            "The rollout does not say how %d of %d completions ended: whether they are truncated is told by their last "
            "token, as in TRL. A completion needs the engine's `finish_reason`.",
            rows,
            of,
        )
