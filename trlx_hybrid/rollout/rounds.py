"""The plan of a batch that is sampled in several rounds: which groups belong to it, the same on every rank.

TRL needs exactly as many rows on each rank as its data loader returned, with the completions of a prompt next to each
other in the order of the ranks. So each round has equally many rows on every rank, and whole groups over all of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Place:
    """A group of the batch: where it was sampled, and whether it is trained on or only fills the batch up."""

    round: int
    group: int
    kept: bool


def rows_per_rank(groups: int, size: int, world: int) -> int:
    """Return the smallest number of rows on each of `world` ranks that holds `groups` groups of `size` rows, and whole
    groups only."""
    step = size // math.gcd(size, world)
    return step * -(-groups * size // (step * world))


def batch_of(rounds: Sequence[Sequence[bool]], needed: int) -> list[Place]:
    """Return the batch's groups: the kept ones, in the order of their sampling, then others if the kept ones are too
    few.

    Args:
        rounds: for each round, which of its groups are kept; it has at least `needed` groups in all.
    """
    places = [Place(r, g, kept) for r, groups in enumerate(rounds) for g, kept in enumerate(groups)]
    return sorted(places, key=lambda place: not place.kept)[:needed]
