"""Which completions are truncated, by the engine's word.

TRL 1.16 takes a completion for truncated unless its last token is an end token or padding. With `stop`,
`stop_token_ids` or `ignore_eos` that is wrong: every row that ended properly counts as truncated, and
`mask_truncated_completions` takes all of them out of the loss. Here a row is truncated where its last turn has
`finish_reason == "length"`. Where nobody says how a row ended, TRL's rule stays.

Where both agree on all rows, TRL does everything itself. Else its own masking is switched off for the batch, and done
here in the same places: the loss mask before tokens are counted, the attention mask in scoring, the batch at last.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

MASKS = "mask_truncated_completions"
"""TRL's setting, an attribute of its GRPO and RLOO trainers."""

BY_ENGINE, BY_TOKEN = "those whose finish_reason is 'length'", "those that end with no end token, as in TRL"
"""Truncated completions, as a header and a recording say it."""

TERMINATED = tuple(f"completions/{name}_terminated_length" for name in ("mean", "min", "max"))


def by_last_token(trainer: Any, completion_ids: Sequence[Sequence[int]]) -> list[bool]:
    """Return TRL's answer for each row."""
    ends = {*trainer.eos_token_ids, trainer._tokenizer.pad_token_id}
    return [not row or row[-1] not in ends for row in completion_ids]


def rule_of(trainer: Any) -> str:
    """Return which completions are truncated in this run, as far as one can know before it samples."""
    custom = getattr(trainer, "rollout_func", None)
    replays = trainer.session.config.replay is not None
    ours = replays or not trainer.session.selection.stock
    if ours and trainer.use_vllm and (custom is None or getattr(custom, "samples_from_session", False)):
        return BY_ENGINE
    return BY_TOKEN


def truncated_rows(trainer: Any, prompt_ids: Sequence[Any], completion_ids: Sequence[Any]) -> list[bool]:
    """Return whether each row was cut at its limit, as the rollout says, else by TRL's rule."""
    rows, endings = by_last_token(trainer, completion_ids), trainer.session.endings
    said = [endings.truncated(*row) for row in zip(prompt_ids, completion_ids, strict=True)]
    if getattr(trainer, MASKS, False) and not trainer.session.selection.stock and any(known is None for known in said):
        _say_unknown(trainer, sum(known is None for known in said), len(said))
    return [rule if known is None else known for known, rule in zip(said, rows, strict=True)]


def correct_metrics(trainer: Any, lengths: Sequence[int], rule: Sequence[bool], rows: Sequence[bool]) -> None:
    """Put the numbers of truncated rows in the place of TRL's, where they differ. Collective.

    Args:
        lengths: of this rank's completions, as TRL counts them.
        rule: TRL's answer for each of them.
        rows: the true one.
    """
    device = trainer.accelerator.device
    numbers = torch.tensor([lengths, rule, rows], dtype=torch.long, device=device).T.contiguous()
    length, theirs, ours = trainer.accelerator.gather(numbers).T
    if bool((theirs == ours).all()):
        return
    metrics = trainer._metrics["train" if trainer.model.training else "eval"]
    if not metrics["completions/clipped_ratio"]:  # of a user's own `_generate`, which logs nothing
        return
    metrics["completions/clipped_ratio"][-1] = ours.float().mean().item()
    ended = length[ours == 0].float()
    ended = ended if ended.numel() else torch.zeros(1, device=device)
    for name, value in zip(TERMINATED, (ended.mean(), ended.min(), ended.max()), strict=True):
        metrics[name][-1] = value.item()


class Truncation:
    """Stands in front of TRL's trainer, behind all else: masks truncated rows where TRL would mask others."""

    _truncated: list[bool] | None = None  # of the rows that were generated last
    _masked: Tensor | None = None  # (B,) bool: the truncated rows of the batch that is scored, where TRL is wrong
    _made_mask = False  # the batch's loss mask was made for this

    def _hands_on(self, generated: Any) -> Any:
        """Return what TRL is to take for the result of `_generate`, for the batch that it is about to score."""
        trainer: Any = self
        self._masked = None
        ids, rows = generated[1], self._truncated
        if rows is None or not getattr(trainer, MASKS, False) or rows == by_last_token(trainer, ids):
            return generated
        setattr(trainer, MASKS, False)  # which the trainer puts back when the batch is there
        self._masked = torch.tensor(rows, device=trainer.accelerator.device)
        if trainer._base_name != "GRPO":
            return generated
        prompts, ids, mask, *rest = generated
        self._made_mask = mask is None
        known = [[1] * len(row) for row in ids] if mask is None else mask
        return (prompts, ids, [[0] * len(m) if cut else m for m, cut in zip(known, rows, strict=True)], *rest)

    def _attended(self, attention_mask: Tensor, completion_length: int) -> Tensor:
        """Return the mask without the completions of truncated rows, while a batch is scored.

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
    """Once per run."""
    if not trainer.__dict__.get("_said_unknown_endings"):
        trainer._said_unknown_endings = True
        logger.warning(
            "The rollout does not say how %d of %d completions ended: whether they are truncated is told by their last "
            "token, as in TRL. A completion needs the engine's `finish_reason`.",
            rows,
            of,
        )
