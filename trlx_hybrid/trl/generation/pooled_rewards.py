"""Rewards of groups in flight, which begin as soon as a group is complete, before its batch is known."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ...contract.conversation import PooledConversation
from ...episodes.unparsed import ParsingTokenizer
from ...interprocess.copies import copied
from .reward_arguments import arguments_of, completion_of, early_functions

if TYPE_CHECKING:
    from ...rollout.pool import PooledGroup
    from ..stock import StockTrainer


class PooledRewards:
    """The reward functions of a run with rows in flight.

    Args:
        trainer: the trainer.
        of_dataset: returns the row of the dataset with a number.
    """

    def __init__(self, trainer: StockTrainer, of_dataset: Callable[[int], dict[str, Any]]) -> None:
        self._trainer: Callable[[], Any] = weakref.ref(trainer)
        self._of_dataset = of_dataset

    def begin(self, group: PooledGroup) -> None:
        """Call the reward functions' `begin` for a group that is complete."""
        trainer = self._trainer()
        row = self._of_dataset(group.index)
        rows, scored = [row] * len(group.rows), []
        for each in group.rows:
            if isinstance(each, PooledConversation):
                scored.append((each.conversation.messages, each.conversation.completion_ids))
            else:
                completion = completion_of(trainer, self._parsed, row["prompt"], group.prompt_ids, each.token_ids)
                scored.append((completion, each.token_ids))
        arguments = arguments_of(trainer, rows, [row["prompt"]] * len(rows), scored)
        for function in early_functions(trainer):
            function.begin(group.numbers, **copied(arguments))

    def _parsed(self, tokenizer: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Parse a completion as TRL will: one that the tokenizer cannot parse is plain text."""
        message: dict[str, Any] = self._trainer()._run.borrowed.parse_response(
            ParsingTokenizer(tokenizer), *args, **kwargs
        )
        return message
