"""Rows of several branches: an episode whose agent rewrote its history, or asked two things at a time.

What is said after another history than before is a branch of its own. TRL has one row for an episode, so the row's
completion holds all branches one after the other, each with its prompt, which is masked as an observation is. The
model must not see one branch from another. So each branch is scored as a row of its own, and its scores are put back
where its tokens are. Rewards, advantages and losses are those of TRL's row: a branch counts by its number of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...contract.protocols import Scores

if TYPE_CHECKING:
    from ..stock import StockTrainer

BRANCHES = "branch_prompts"
"""The key in a batch, (B, T) int32: at the first token of each later branch, the number of its prompt's tokens; else
0."""


def of_rollout(trainer: StockTrainer, generated: Any, completion_length: int) -> dict[str, Tensor]:
    """Return where the branches of a rollout's rows begin, as a tensor to be added to the batch; an empty dict where
    rows have no branches, because the trainer's `rollout_func` has no method `branches`.

    This method takes prompt ids and completion ids of a row. For each of its later branches, it returns the place in
    the completion at which the branch begins, and the number of its prompt's tokens.

    Args:
        generated: the result of GRPO's `_generate`; None where the rows were not sampled.
        completion_length: T.
    """
    find = getattr(getattr(trainer, "rollout_func", None), "branches", None)
    if find is None or generated is None:
        return {}
    prompt_ids, completion_ids, *_ = generated
    begins = torch.zeros((len(completion_ids), completion_length), dtype=torch.int32)
    for row, ids in enumerate(zip(prompt_ids, completion_ids, strict=True)):
        for at, tokens in find(*ids):
            begins[row, at] = tokens
    return {BRANCHES: begins.to(trainer.accelerator.device)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The branches of B rows with completions of length T, as R rows of their own with completions of length t.

    Attributes:
        input_ids, attention_mask: (R, p + t) int64; prompts are padded on the left, completions on the right.
        completion_length: t.
        places: (B, T) int64, the place of each token's scores among all scores of the parts; R * t where a token has
            none, such as one of a branch's prompt.
    """

    input_ids: Tensor
    attention_mask: Tensor
    completion_length: int
    places: Tensor

    @classmethod
    def of(cls, input_ids: Tensor, attention_mask: Tensor, begins: Tensor) -> Parts:
        """Return the branches of some rows.

        Args:
            input_ids, attention_mask: (B, P + T) int64.
            begins: (B, T), the value of BRANCHES.
        """
        length = begins.shape[1]
        given = zip(input_ids.tolist(), attention_mask.tolist(), begins.tolist(), strict=True)
        parts: list[tuple[list[int], list[int], int, int]] = []  # prompt, completion, row, and where it is in the row
        for row, (ids, mask, of_row) in enumerate(given):
            prompt = [token for token, seen in zip(ids[:-length], mask[:-length], strict=True) if seen]
            completion = ids[-length:][: sum(mask[-length:])]
            later = [(at, at + of_row[at]) for at in range(len(completion)) if of_row[at]]
            ends = [at for at, _ in later] + [len(completion)]
            parts.append((prompt, completion[: ends[0]], row, 0))
            for (begin, at), end in zip(later, ends[1:], strict=True):
                parts.append((completion[begin:at], completion[at:end], row, at))
        widest = max(len(prompt) for prompt, *_ in parts)
        longest = max(1, *(len(completion) for _, completion, *_ in parts))
        none = len(parts) * longest
        places = torch.full(begins.shape, none)
        for number, (_, completion, row, at) in enumerate(parts):
            first = number * longest
            places[row, at : at + len(completion)] = torch.arange(first, first + len(completion))
        found = torch.tensor([_padded(prompt, completion, widest, longest) for prompt, completion, *_ in parts])
        ids, mask = found.to(input_ids.device).unbind(1)
        return cls(input_ids=ids, attention_mask=mask, completion_length=longest, places=places.to(input_ids.device))

    def rows(self, scores: Scores) -> Scores:
        """Return the scores of the parts, (R, t), as scores of the rows, (B, T): 0 where a token has none."""

        def placed(of_parts: Tensor) -> Tensor:
            return torch.cat([of_parts.flatten(), of_parts.new_zeros(1)])[self.places]

        entropies = None if scores.entropies is None else placed(scores.entropies)
        return Scores(placed(scores.log_probs), entropies, scores.router_loss)


def _padded(prompt: Sequence[int], completion: Sequence[int], widest: int, longest: int) -> list[list[int]]:
    """Return token ids and attention mask of a part, padded on both sides."""
    before, after = [0] * (widest - len(prompt)), [0] * (longest - len(completion))
    seen = [1] * (len(prompt) + len(completion))
    return [[*before, *prompt, *completion, *after], [*before, *seen, *after]]
