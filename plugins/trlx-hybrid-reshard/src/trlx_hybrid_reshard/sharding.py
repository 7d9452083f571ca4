"""Which piece of one parameter each rank holds."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from .intervals import Ints, length

Box: TypeAlias = tuple[tuple[int, int], ...]
"""Half-open index ranges, one per dimension, the layers' first."""


@dataclass(frozen=True, slots=True, eq=False)
class Sharding:
    """A parameter cut into pieces. Pieces are disjoint and cover it; several ranks may hold the same one, or none.

    Attributes:
        world: number of ranks.
        parts: for each dimension, the layers' first, its parts: see `intervals`.
        coordinates: for each dimension the part that each rank holds, (world,); None where there is one part.
        held: (world,), which ranks hold a piece at all; None when all do.
    """

    world: int
    parts: tuple[Ints, ...]
    coordinates: tuple[Ints | None, ...]
    held: NDArray[np.bool_] | None = None

    def holds(self, rank: int) -> bool:
        """Whether the rank has a piece, be it an empty one."""
        return self.held is None or bool(self.held[rank])

    def piece(self, rank: int) -> tuple[Ints, ...]:
        """The rank's ranges (intervals, 2) of each dimension; `holds` must be true."""
        return tuple(p[0 if c is None else c[rank]] for p, c in zip(self.parts, self.coordinates, strict=True))

    def pieces_of(self, ranks: Ints) -> tuple[Ints, ...]:
        """The ranges (ranks, intervals, 2) of each dimension, of several ranks; all must hold something."""
        which = [np.zeros(len(ranks), dtype=np.int64) if c is None else c[ranks] for c in self.coordinates]
        return tuple(p[at] for p, at in zip(self.parts, which, strict=True))

    def boxes(self, rank: int) -> list[Box]:
        """The rank's piece as boxes: none if it holds nothing, several where fused blocks are sliced apart."""
        if not self.holds(rank):
            return []
        ranges = [[(int(a), int(b)) for a, b in part if b > a] for part in self.piece(rank)]
        return list(itertools.product(*ranges))

    def within(self, extent: tuple[int, ...]) -> Sharding:
        """This without the padding: ranges end where the parameter does."""
        parts = tuple(np.minimum(part, size) for part, size in zip(self.parts, extent, strict=True))
        return Sharding(self.world, parts, self.coordinates, self.held)

    def elements(self, rank: int) -> int:
        """Of the rank's piece."""
        return math.prod(int(length(part)) for part in self.piece(rank)) if self.holds(rank) else 0

    @property
    def replicated(self) -> bool:
        """Whether some piece has more than one holder."""
        holders = self.world if self.held is None else int(self.held.sum())
        return holders != math.prod(len(p) for p in self.parts)

    def pieces(self) -> Ints:
        """(world,): the number of the piece each rank holds, -1 for none."""
        number = np.zeros(self.world, dtype=np.int64)
        for parts, coordinates in zip(self.parts, self.coordinates, strict=True):
            if coordinates is not None:
                number = number * len(parts) + coordinates
        return number if self.held is None else np.where(self.held, number, -1)

    def per_rank(self, values: tuple[Ints, ...]) -> Ints:
        """(world,): the product of `values[d]`, one value per part of dimension d, over the parts each rank holds."""
        scale = math.prod(int(v[0]) for v, c in zip(values, self.coordinates, strict=True) if c is None)
        product = np.full(self.world, scale, dtype=np.int64)
        for value, coordinates in zip(values, self.coordinates, strict=True):
            if coordinates is not None:
                product *= value[coordinates]
        if self.held is not None:
            product *= self.held
        return product
