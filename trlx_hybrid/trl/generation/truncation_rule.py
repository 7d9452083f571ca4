"""The rule by which completions count as truncated: TRL's, or the engine's finish reasons."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..refusals import own_rollout

if TYPE_CHECKING:
    from ..stock import StockTrainer

MASKS = "mask_truncated_completions"
"""The name of TRL's setting, and of the attribute of its GRPO and RLOO trainers, that excludes truncated completions
from the loss."""

BY_ENGINE, BY_TOKEN = "those whose finish_reason is 'length'", "those that end with no end token, as in TRL"
"""The two rules for which completions count as truncated, in the words that a run prints when it starts and that a
recording stores."""


def by_last_token(trainer: StockTrainer, completion_ids: Sequence[Sequence[int]]) -> list[bool]:
    """Return whether each row is truncated by TRL's rule: its last token is neither an end token nor padding."""
    ends = {*trainer.eos_token_ids, trainer._tokenizer.pad_token_id}
    return [not row or row[-1] not in ends for row in completion_ids]


def rule_of(trainer: StockTrainer) -> str:
    """Return the rule by which this run takes completions for truncated, as far as it is known before sampling:
    BY_ENGINE (the engine's finish reasons) or BY_TOKEN (the last token, as in TRL)."""
    replays = trainer.session.config.replay is not None
    ours = replays or not trainer.session.selection.stock
    if ours and trainer.use_vllm and not own_rollout(trainer):
        return BY_ENGINE
    return BY_TOKEN
