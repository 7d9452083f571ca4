"""Supports of sampled tokens (for each token the set of ids that truncated sampling chose it from): of one completion,
and of a batch as tensors, in a form that TRL can shuffle and split."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

WORD = 32
"""The number of ids that one 32-bit word of a bit mask covers."""

UNSAMPLED = -1
"""The value of both numbers in `Support.bounds` for a token that no engine sampled, such as a tool's answer or
padding."""

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True, eq=False)
class Support:
    """The ids from which the engine sampled each token of one completion.

    Truncated sampling (top-k, top-p, min-p), grammars and forbidden words leave ids out, and distribute their
    probability among the others. A token's ids are kept as 32-bit words, in the shortest of four forms:

    - no words: every id of the vocabulary;
    - the ids, ascending;
    - the ids that were left out, ascending, each as `~id`, which is negative;
    - a mask: as many words as are needed for one bit per id, the least significant bit first. A list of ids is always
      shorter than a mask.

    Attributes:
        words: (n,) int32, the words of all tokens, one after the other.
        bounds: (tokens, 2) int64, where the words of each token begin and end; UNSAMPLED twice where the token was not
            sampled.
        vocabulary: number of ids.
    """

    words: Array
    bounds: Array
    vocabulary: int

    @classmethod
    def of(cls, tokens: Sequence[Array | None], vocabulary: int) -> Support:
        """Make a `Support` for the tokens of one completion.

        Args:
            tokens: for each token, the ids that it could be sampled from, encoded by `words_of`; None for a token that
                was not sampled.
            vocabulary: number of ids.
        """
        known = [words for words in tokens if words is not None]
        sampled = np.array([words is not None for words in tokens], dtype=bool)
        ends = np.cumsum([0 if words is None else len(words) for words in tokens], dtype=np.int64)
        bounds = np.stack([ends - [0 if words is None else len(words) for words in tokens], ends], axis=1)
        bounds = np.where(sampled[:, None], bounds, UNSAMPLED).astype(np.int64) if tokens else NO_BOUNDS
        return cls(np.concatenate(known, dtype=np.int32) if known else NO_WORDS, bounds, vocabulary)

    @classmethod
    def unsampled(cls, tokens: int, vocabulary: int) -> Support:
        """Make the `Support` of a number of tokens that no engine sampled, such as a tool's answer."""
        return cls(NO_WORDS, np.full((tokens, 2), UNSAMPLED, np.int64), vocabulary)

    def __len__(self) -> int:
        return len(self.bounds)

    def __add__(self, other: Support) -> Support:
        """Return one `Support` for the tokens of this object, followed by the tokens of `other`."""
        moved = np.where(other.bounds == UNSAMPLED, UNSAMPLED, other.bounds + len(self.words))
        return Support(np.concatenate([self.words, other.words]), np.concatenate([self.bounds, moved]), self.vocabulary)

    def __getitem__(self, tokens: slice) -> Support:
        """Return the `Support` of a slice of the tokens."""
        bounds = self.bounds[tokens]
        sampled = bounds[bounds[:, 0] != UNSAMPLED]
        first, last = (int(sampled[0, 0]), int(sampled[-1, 1])) if len(sampled) else (0, 0)
        moved = np.where(bounds == UNSAMPLED, UNSAMPLED, bounds - first)
        return Support(self.words[first:last], moved, self.vocabulary)

    @property
    def sampled(self) -> Array:
        """Flags of the tokens, bool of shape (tokens,): whether an engine sampled each token. False for all other
        tokens, such as a tool's answer within a conversation's completion."""
        return cast("Array", self.bounds[:, 0] != UNSAMPLED)

    @property
    def nbytes(self) -> int:
        """The bytes that the arrays of this object take."""
        return self.words.nbytes + self.bounds.nbytes

    def ids(self, token: int) -> Array | None:
        """Return the ids from which the token with this index was sampled, ascending, int64; None where it was not
        sampled."""
        start, end = self.bounds[token].tolist()
        return None if start == UNSAMPLED else ids_of(self.words[start:end], self.vocabulary)


NO_WORDS = np.zeros(0, np.int32)
NO_BOUNDS = np.zeros((0, 2), np.int64)


def mask_words(vocabulary: int) -> int:
    """Return the number of 32-bit words in a bit mask that has one bit for each id of a vocabulary."""
    return -(-vocabulary // WORD)


def words_of(kept: Array) -> Array:
    """Encode the ids that one token could be sampled from as int32 words, in the shortest of the forms that `Support`
    lists: no words (all ids), the ids, the ids that were left out, or a bit mask.

    Args:
        kept: (vocabulary,) bool, whether each id could be sampled. Where all are False, the logits were NaN, and all
            ids count as possible: the token's log-prob is NaN, too, which shows the fault.
    """
    number, vocabulary = int(np.count_nonzero(kept)), len(kept)
    left_out, longest = vocabulary - number, mask_words(vocabulary)
    if number == 0 or left_out == 0:
        return NO_WORDS
    if min(number, left_out) < longest:
        ids = np.flatnonzero(kept) if number <= left_out else ~np.flatnonzero(~kept)
        return ids.astype(np.int32)
    bits = np.zeros(longest * WORD, bool)
    bits[:vocabulary] = kept
    return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32, copy=False)


def words_of_ids(ids: Array, vocabulary: int) -> Array:
    """Encode the ids that one token could be sampled from as int32 words, like `words_of`, which takes them as a mask.

    Args:
        ids: the ids, ascending.
        vocabulary: number of ids in the vocabulary.
    """
    if 0 < len(ids) < min(mask_words(vocabulary), vocabulary - len(ids) + 1):
        return ids.astype(np.int32, copy=False)
    kept = np.zeros(vocabulary, bool)
    kept[ids] = True
    return words_of(kept)


def ids_of(words: Array, vocabulary: int) -> Array:
    """Decode what `words_of` returned for one token: return the ids that it could be sampled from, ascending, int64."""
    if len(words) == 0:
        return np.arange(vocabulary)
    if len(words) == mask_words(vocabulary):
        return np.flatnonzero(np.unpackbits(words.astype("<i4").view(np.uint8), bitorder="little")[:vocabulary])
    if words[0] < 0:
        return np.setdiff1d(np.arange(vocabulary), ~words.astype(np.int64), assume_unique=True)
    return words.astype(np.int64)


WORDS = "support_words"
"""The key in a batch of a (B, L) int32 tensor: `Support.words` of each completion, padded to the longest length L."""

BOUNDS = "support_bounds"
"""The key in a batch of a (B, C, 2) int32 tensor: where the words of each completion token begin and end in its row of
the tensor under WORDS; UNSAMPLED for a token that was not sampled."""


@dataclass(frozen=True, slots=True, eq=False)
class KeptTokens:
    """The ids that could be sampled as the next token (those that top-k, top-p and the like did not exclude), for each
    position of some rows. Log-probs are computed over only these ids. This class is the tensor form of `Support`. For a
    next token that was not sampled, such as a prompt's token, it contains all ids.

    Attributes:
        words: (n,) int32, the ids: for each token as a list, as a list of the ids left out, or as a bit mask. `Support`
            describes the encoding.
        bounds: (…, 2) int64, for each position, where the words of its next token begin and end; UNSAMPLED
            twice where the next token was not sampled.
        vocabulary: number of ids.
    """

    words: Tensor
    bounds: Tensor
    vocabulary: int

    @classmethod
    def of(cls, batch: Mapping[str, Any], prompt_length: int, vocabulary: int) -> KeptTokens:
        """Make the `KeptTokens` of a batch's rows, with one position for each of the P + C tokens of a row. Position i,
        counted from 0, has the ids that token i + 1 could be sampled from, so a completion's first token belongs to
        position P - 1.

        Args:
            batch: a batch with the tensors that `tensors_of` returned, under WORDS and BOUNDS.
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
        """Return a `KeptTokens` for some of the rows. Where `bounds` is (positions, 2), without a dimension for rows,
        the index selects positions instead."""
        return replace(self, bounds=self.bounds[rows])

    def but_last(self) -> KeptTokens:
        """Return a `KeptTokens` for all positions but the last of each row."""
        return replace(self, bounds=self.bounds[:, :-1])

    def at(self, places: Tensor) -> KeptTokens:
        """Return a `KeptTokens` for some of the positions, as one row of N positions.

        Args:
            places: (N,) int64, numbers of the positions, counted through all rows.
        """
        return replace(self, bounds=self.bounds.flatten(0, -2)[places.to(self.bounds.device)][None])

    def on(self, device: torch.device) -> KeptTokens:
        """Return a copy of this object with its tensors on a device. Of `words`, which encodes the ids, only the range
        that the positions in `bounds` use is copied, for instance after rows were selected."""
        known = self.bounds[self.bounds[..., 0] != UNSAMPLED]
        first, last = (int(known[:, 0].min()), int(known[:, 1].max())) if len(known) else (0, 0)
        bounds = torch.where(self.bounds == UNSAMPLED, UNSAMPLED, self.bounds - first)
        return replace(self, words=self.words[first:last].to(device), bounds=bounds.to(device))

    def repeated(self, times: int) -> KeptTokens:
        """Return a `KeptTokens` with each row repeated `times` times in succession (a, a, b, b), as `repeat_interleave`
        does."""
        return replace(self, bounds=self.bounds.repeat_interleave(times, dim=0))

    def masks(self) -> Tensor:
        """Return for each position a bit mask of the ids that its next token could be sampled from: (positions,
        ceil(vocabulary / 32)) int32. Id 0 is the least significant bit of the first word.

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
    """Return tensors that say which ids each token of a batch could be sampled from, by the keys that they have in the
    batch. The tensors stay in host memory: each forward pass copies only its own rows to the device.

    Args:
        supports: for each of the B completions, in order, the ids that its tokens could be sampled from.
        completion_length: C, at least the length of the longest completion.

    Returns:
        WORDS: (B, L) int32, each completion's ids as `Support.words` encodes them, padded to the longest; and BOUNDS:
        (B, C, 2) int32, where each token's words begin and end in its row, UNSAMPLED for a token that was not sampled.
    """
    words = np.zeros((len(supports), max(1, *(len(support.words) for support in supports))), np.int32)
    bounds = np.full((len(supports), completion_length, 2), UNSAMPLED, np.int32)
    for row, support in enumerate(supports):
        words[row, : len(support.words)] = support.words
        bounds[row, : len(support)] = support.bounds
    return {WORDS: torch.from_numpy(words), BOUNDS: torch.from_numpy(bounds)}
