"""Token sequences of conversations that begin alike."""

from __future__ import annotations

from collections.abc import Sequence


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the number of tokens with which two sequences begin alike."""
    differ = (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(differ, min(len(one), len(other)))
