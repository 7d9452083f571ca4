"""A comparison of token sequences: the number of tokens with which two conversations begin alike.

A chat template turns all messages into one sequence. To find the token at which a message begins, the sequences of two
conversations are compared that differ only from this message on.
"""

from __future__ import annotations

from collections.abc import Sequence


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the number of tokens with which two sequences begin alike."""
    differ = (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(differ, min(len(one), len(other)))
