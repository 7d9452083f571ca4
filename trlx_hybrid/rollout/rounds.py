"""Which groups make a batch that is sampled in several rounds: planning alone, the same on every rank.

TRL wants exactly as many rows of each rank as its data loader brought, with the completions of a prompt next to each
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
    """The fewest rows on each of `world` ranks that hold so many groups of `size` rows, and whole groups only."""
    step = size // math.gcd(size, world)
    return step * -(-groups * size // (step * world))


def batch_of(rounds: Sequence[Sequence[bool]], needed: int) -> list[Place]:
    """The batch's groups: those that were kept, in the order of their sampling, then others where those are too few.

    Args:
        rounds: of each, which of its groups are kept; at least `needed` groups in all.
    """
    places = [Place(r, g, kept) for r, groups in enumerate(rounds) for g, kept in enumerate(groups)]
    return sorted(places, key=lambda place: not place.kept)[:needed]
