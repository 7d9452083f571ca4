"""Supports of sampled tokens: for each token the set of ids that truncated sampling (top-k, top-p) chose it from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

WORD = 32
"""The number of bits in one 32-bit word of a bit mask of ids."""

UNSAMPLED = -1
"""The value of both bounds of a token that no engine sampled, such as a tool's answer or padding; see `Support`."""

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
        """Make a support from the words of each token, which `words_of` returns; None for a token that was not
        sampled."""
        known = [words for words in tokens if words is not None]
        sampled = np.array([words is not None for words in tokens], dtype=bool)
        ends = np.cumsum([0 if words is None else len(words) for words in tokens], dtype=np.int64)
        bounds = np.stack([ends - [0 if words is None else len(words) for words in tokens], ends], axis=1)
        bounds = np.where(sampled[:, None], bounds, UNSAMPLED).astype(np.int64) if tokens else NO_BOUNDS
        return cls(np.concatenate(known, dtype=np.int32) if known else NO_WORDS, bounds, vocabulary)

    @classmethod
    def unsampled(cls, tokens: int, vocabulary: int) -> Support:
        """Return the support of `tokens` tokens that no engine sampled."""
        return cls(NO_WORDS, np.full((tokens, 2), UNSAMPLED, np.int64), vocabulary)

    def __len__(self) -> int:
        return len(self.bounds)

    def __add__(self, other: Support) -> Support:
        """Return the support of the tokens of this completion followed by the other's tokens."""
        moved = np.where(other.bounds == UNSAMPLED, UNSAMPLED, other.bounds + len(self.words))
        return Support(np.concatenate([self.words, other.words]), np.concatenate([self.bounds, moved]), self.vocabulary)

    def __getitem__(self, tokens: slice) -> Support:
        """Return the support of a slice of the tokens."""
        bounds = self.bounds[tokens]
        sampled = bounds[bounds[:, 0] != UNSAMPLED]
        first, last = (int(sampled[0, 0]), int(sampled[-1, 1])) if len(sampled) else (0, 0)
        moved = np.where(bounds == UNSAMPLED, UNSAMPLED, bounds - first)
        return Support(self.words[first:last], moved, self.vocabulary)

    @property
    def sampled(self) -> Array:
        """A bool for each token, (tokens,): whether it was sampled."""
        return cast("Array", self.bounds[:, 0] != UNSAMPLED)

    @property
    def nbytes(self) -> int:
        """The memory that the support takes, in bytes."""
        return self.words.nbytes + self.bounds.nbytes

    def ids(self, token: int) -> Array | None:
        """Return the ids from which the token with this index was sampled, ascending, int64; None where it was not
        sampled."""
        start, end = self.bounds[token].tolist()
        return None if start == UNSAMPLED else ids_of(self.words[start:end], self.vocabulary)


NO_WORDS = np.zeros(0, np.int32)
NO_BOUNDS = np.zeros((0, 2), np.int64)


def mask_words(vocabulary: int) -> int:
    """Return how many 32-bit words a bit mask with one bit per id of a vocabulary has."""
    return -(-vocabulary // WORD)


def words_of(kept: Array) -> Array:
    """Encode the ids from which one token was sampled as int32 words, in the shortest form that `Support` describes.

    Args:
        kept: (vocabulary,) bool, whether each id could be sampled. Where no id was kept, the logits were NaN, and all
            ids count as kept: the token's log-prob is NaN, too, which shows the fault.
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
    """Encode the ids from which one token was sampled as int32 words, as `words_of` does.

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
    """Decode the words of one token, see `words_of`: return the ids, ascending, int64."""
    if len(words) == 0:
        return np.arange(vocabulary)
    if len(words) == mask_words(vocabulary):
        return np.flatnonzero(np.unpackbits(words.astype("<i4").view(np.uint8), bitorder="little")[:vocabulary])
    if words[0] < 0:
        return np.setdiff1d(np.arange(vocabulary), ~words.astype(np.int64), assume_unique=True)
    return words.astype(np.int64)
