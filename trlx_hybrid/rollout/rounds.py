"""The choice of the groups (the completions of one prompt) that form a batch which was sampled in several rounds; it is
the same on every rank.

TRL needs exactly as many rows on each rank as its data loader returned, with the completions of a prompt next to each
other in the order of the ranks. So each round has equally many rows on every rank, and the rows of all ranks together
are whole groups.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Place:
    """The place of one group (the completions of one prompt) of a batch.

    Attributes:
        round, group: the number of the round of sampling that it is from (a batch may take several), and its index
            among the groups of that round.
        kept: whether the group is trained on; if not, it only gives the batch its size, and does not count in the loss.
    """

    round: int
    group: int
    kept: bool


def rows_per_rank(groups: int, size: int, world: int) -> int:
    """Return how many rows each rank must sample, so that all ranks together have at least `groups` whole groups, and
    no partial one."""
    step = size // math.gcd(size, world)
    return step * -(-groups * size // (step * world))


def batch_of(rounds: Sequence[Sequence[bool]], needed: int) -> list[Place]:
    """Choose `needed` groups for a batch: first the groups that may be trained on, in the order in which they were
    sampled; then, if these are too few, other groups.

    Args:
        rounds: for each round, whether each of its groups may be trained on; all rounds together have at least `needed`
            groups.

    Returns:
        For each chosen group, its round, its index among the groups of that round, and whether it is trained on; in the
        order in which the groups were chosen.
    """
    places = [Place(r, g, kept) for r, groups in enumerate(rounds) for g, kept in enumerate(groups)]
    return sorted(places, key=lambda place: not place.kept)[:needed]
