"""In what ranks differ that must not: told by what each of them has, in the order of the ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def of_models(theirs: Sequence[Mapping[str, Any]]) -> str | None:
    """Which rank trains another model than the first, and where it differs; None where all train the same.

    Args:
        theirs: the shape of every parameter, by name.
    """
    for rank, other in enumerate(theirs):
        odd = [name for name in {**theirs[0], **other} if theirs[0].get(name) != other.get(name)]
        if odd:
            return (
                f"Rank {rank} trains another model than rank 0: {odd[0]} is {other.get(odd[0], 'missing')} there "
                f"and {theirs[0].get(odd[0], 'missing')} on rank 0 ({len(odd)} such parameters). Load one revision "
                "on all ranks."
            )
    return None


def of_plans(theirs: Sequence[Sequence[int]]) -> str:
    """Which rank means to sync something else than the first.

    Args:
        theirs: the weight version, and digests of plans.
    """
    other = next(rank for rank, numbers in enumerate(theirs) if numbers != theirs[0])
    return (
        f"The ranks disagree on the weight sync: rank 0 is at weight version {theirs[0][0]} with plan "
        f"{_text(theirs[0][1:])}, rank {other} at version {theirs[other][0]} with plan {_text(theirs[other][1:])}. "
        "All ranks must load, freeze and sync alike."
    )


def _text(digests: Sequence[int]) -> str:
    return "/".join(f"{digest & (2**64 - 1):016x}" for digest in digests)
