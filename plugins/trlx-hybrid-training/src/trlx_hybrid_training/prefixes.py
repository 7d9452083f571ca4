"""The choice of which tokens of a pack are computed once for several rows: those of equal prompts, or, as in a trie,
all tokens with which a prompt begins and that another row has.

Branches of an episode begin with what was said before them, and rows with different prompts may begin with the same
system prompt. Each row takes the tokens before its own from one other row, which may have taken some of them from a
third.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from .micro_batches import RowLengths

Prefixes = tuple[tuple[int, int], ...]
"""The prefix of each row: the number of the row that begins with it, and its length in tokens; the row's own number and
0 where it has none."""


def of_prompts(lengths: RowLengths, below: float) -> Prefixes:
    """Return the prefixes of rows that share whole prompts, all but the last token.

    Args:
        lengths: the lengths and prompts of the rows.
        below: a fraction. Prompts are shared only if this brings the number of tokens below this fraction of the number
            without sharing.
    """
    rows = range(len(lengths.tokens))
    share = lengths.packed(rows, below) < sum(lengths.tokens)
    alike, prefixes = lengths.alike, lengths.prefixes
    return tuple((alike[row], prefixes[row]) if share and alike[row] != row else (row, 0) for row in rows)


def of_trie(rows: Sequence[npt.NDArray[np.int32]], prompts: Sequence[int]) -> Prefixes:
    """Return the longest prefixes that rows can share. A prefix never reaches the last token of the row's prompt, which
    each row needs for itself, because the token that follows is the first of its own completion.

    Rows with shorter prompts come first: a row can continue the completion of a row with a shorter prompt, and not of
    one with a longer. Among the rows before it, the one with the longest common prefix is a neighbour in the order of
    the dictionary.

    Args:
        rows: token ids of each row, prompt and completion.
        prompts: the number of tokens of each row's prompt.
    """
    count = len(rows)
    sorted_rows = sorted(range(count), key=lambda row: (rows[row].astype(">i4").tobytes(), row))
    place = {row: at for at, row in enumerate(sorted_rows)}
    with_next = [_common(rows[one], rows[other]) for one, other in itertools.pairwise(sorted_rows)]
    known: set[int] = set()
    prefixes = [(row, 0) for row in range(count)]
    for row in sorted(range(count), key=lambda row: (prompts[row], row)):
        best, other = 0, row
        for step in (-1, 1):
            at, common = place[row], len(rows[row])
            while 0 <= at + step < count and common > best:
                common = min(common, with_next[min(at, at + step)])
                at += step
                if common > best and sorted_rows[at] in known:
                    best, other = common, sorted_rows[at]
        known.add(row)
        if tokens := min(best, prompts[row] - 1):
            prefixes[row] = other, tokens
    return tuple(prefixes)


def _common(one: npt.NDArray[np.int32], other: npt.NDArray[np.int32]) -> int:
    """Return the number of tokens that two rows have in common at their beginnings."""
    shorter = min(len(one), len(other))
    differ = np.flatnonzero(one[:shorter] != other[:shorter])
    return int(differ[0]) if len(differ) else shorter
