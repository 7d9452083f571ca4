"""The supports of a batch's tokens (the ids that each token was sampled from) as tensors with one row per completion,
in a form that TRL can shuffle and split."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .support import UNSAMPLED, WORD, Support, mask_words

WORDS = "support_words"
"""The key in a batch of a (B, L) int32 tensor: `Support.words` of each completion, padded to the longest length L."""

BOUNDS = "support_bounds"
"""The key in a batch of a (B, C, 2) int32 tensor: where the words of each token begin and end in the completion's row
of words; UNSAMPLED for a token that was not sampled."""


@dataclass(frozen=True, slots=True, eq=False)
class KeptTokens:
    """The ids from which the next token of each position of some rows was sampled; all ids where it was not sampled.
    It is the tensor form of `Support`, used to compute log-probs over only these ids.

    Attributes:
        words: (n,) int32, the ids in the encoding of `Support.words`.
        bounds: (…, 2) int64, for each position where the words of its next token begin and end.
        vocabulary: number of ids.
    """

    words: Tensor
    bounds: Tensor
    vocabulary: int

    @classmethod
    def of(cls, batch: Mapping[str, Any], prompt_length: int, vocabulary: int) -> KeptTokens:
        """Make the kept tokens of a batch's rows, of shape (B, P + C). A completion's first token is the next token of
        position P - 1, counted from 0.

        Args:
            batch: a batch with the keys WORDS and BOUNDS.
            prompt_length: P, the padded length of the prompts.
            vocabulary: number of ids.
        """
        words, bounds = batch[WORDS], batch[BOUNDS].long()
        first = torch.arange(len(words), device=words.device)[:, None, None] * words.shape[1]
        bounds = torch.where(bounds == UNSAMPLED, bounds, bounds + first)
        before = bounds.new_full((len(bounds), prompt_length - 1, 2), UNSAMPLED)
        return cls(
            words.flatten(), torch.cat([before, bounds, bounds.new_full((len(bounds), 1, 2), UNSAMPLED)], 1), vocabulary
        )

    def __getitem__(self, rows: slice | Tensor) -> KeptTokens:
        """Return the kept tokens of some rows; of some positions where the shape has one dimension, the positions."""
        return replace(self, bounds=self.bounds[rows])

    def but_last(self) -> KeptTokens:
        """Return the kept tokens of all positions but the last of each row."""
        return replace(self, bounds=self.bounds[:, :-1])

    def at(self, places: Tensor) -> KeptTokens:
        """Return the kept tokens of some positions as one row, of shape (1, N).

        Args:
            places: (N,) int64, numbers of positions, counted through all rows.
        """
        return replace(self, bounds=self.bounds.flatten(0, -2)[places.to(self.bounds.device)][None])

    def on(self, device: torch.device) -> KeptTokens:
        """Return the kept tokens with their tensors on a device. Leading and trailing words that no position uses are
        not copied."""
        known = self.bounds[self.bounds[..., 0] != UNSAMPLED]
        first, last = (int(known[:, 0].min()), int(known[:, 1].max())) if len(known) else (0, 0)
        bounds = torch.where(self.bounds == UNSAMPLED, UNSAMPLED, self.bounds - first)
        return replace(self, words=self.words[first:last].to(device), bounds=bounds.to(device))

    def repeated(self, times: int) -> KeptTokens:
        """Return the kept tokens of rows that are each repeated `times` times, one after the other."""
        return replace(self, bounds=self.bounds.repeat_interleave(times, dim=0))

    def masks(self) -> Tensor:
        """Return a bit mask of the kept ids for each position, (positions, ceil(vocabulary / 32)) int32; the first id
        is the least significant bit.

        Bits are added instead of combined by OR, which is the same, since no two ids of a position have the same bit.
        """
        bounds = self.bounds.flatten(0, -2).clamp(min=0)
        counts, longest = bounds[:, 1] - bounds[:, 0], mask_words(self.vocabulary)
        position = torch.repeat_interleave(counts)
        within = torch.arange(len(position), device=counts.device) - (counts.cumsum(0) - counts)[position]
        words = self.words[bounds[position, 0] + within]
        whole, left_out = counts[position] == longest, words < 0
        ids = torch.where(left_out, ~words, words)
        bits = torch.where(left_out, -1, 1).int() * (1 << (ids % WORD)).int()
        added, places = torch.where(whole, words, bits), torch.where(whole, within, ids // WORD)
        listed_out = torch.zeros_like(counts, dtype=torch.bool).index_put_((position,), left_out & ~whole)
        start = torch.where((counts == 0) | listed_out, -1, 0).int()
        masks = start[:, None].repeat(1, longest).flatten()
        return masks.index_add_(0, position * longest + places, added).view(-1, longest)


def tensors_of(supports: Sequence[Support], completion_length: int) -> dict[str, Tensor]:
    """Return the tensors that a batch holds under WORDS and BOUNDS. They stay in host memory: each forward pass copies
    the part of its own rows to the device.

    Args:
        supports: the support of each completion, in the batch's order.
        completion_length: C, at least the length of the longest completion.
    """
    words = np.zeros((len(supports), max(1, *(len(support.words) for support in supports))), np.int32)
    bounds = np.full((len(supports), completion_length, 2), UNSAMPLED, np.int32)
    for row, support in enumerate(supports):
        words[row, : len(support.words)] = support.words
        bounds[row, : len(support)] = support.bounds
    return {WORDS: torch.from_numpy(words), BOUNDS: torch.from_numpy(bounds)}
