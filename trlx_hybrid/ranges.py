"""Which bytes of a growing row of equal chunks are free. Pure: knows no memory."""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from dataclasses import dataclass

ALIGNMENT = 512  # bytes; where ranges start, so that one odd size does not slow the copies of all that follow


@dataclass(frozen=True, slots=True, order=True)
class Piece:
    """Bytes `start` to `stop` (exclusive) of a chunk."""

    chunk: int
    start: int
    stop: int

    @property
    def bytes(self) -> int:
        """How many."""
        return self.stop - self.start


class FreeRanges:
    """The holes of the chunks.

    Attributes:
        chunks: how many there are; bytes: how many are free.
    """

    def __init__(self, chunk_bytes: int) -> None:
        self.chunk_bytes = chunk_bytes
        self.chunks = self.bytes = 0
        self._holes: list[Piece] = []  # sorted and disjoint, neighbours joined

    def grow(self) -> None:
        """One more chunk, all free."""
        self._holes.append(Piece(self.chunks, 0, self.chunk_bytes))
        self.chunks += 1
        self.bytes += self.chunk_bytes

    def take(self, nbytes: int) -> list[Piece]:
        """Pieces of `nbytes` together: the first hole that holds them all, else as many holes as it takes, in order.

        Raises:
            ValueError: fewer bytes are free.
        """
        need = aligned(nbytes)
        if need > self.bytes:
            raise ValueError(f"{nbytes} bytes asked for, {self.bytes} are free.")
        fitting = next((i for i, hole in enumerate(self._holes) if hole.bytes >= need), None)
        index, taken = fitting or 0, []
        while need:
            hole = self._holes[index]
            size = min(need, hole.bytes)
            taken.append(Piece(hole.chunk, hole.start, hole.start + size))
            rest = Piece(hole.chunk, hole.start + size, hole.stop)
            self._holes[index : index + 1] = [rest] if rest.bytes else []
            self.bytes -= size
            need -= size
        if taken:  # the padding of the last one is taken too, but not shown
            last = taken[-1]
            taken[-1] = Piece(last.chunk, last.start, last.stop - (aligned(nbytes) - nbytes))
        return taken

    def give_back(self, pieces: Iterable[Piece]) -> None:
        """Free what `take` returned.

        Raises:
            ValueError: some of it is free already.
        """
        for piece in pieces:
            start, stop = piece.start, aligned(piece.stop)
            at = bisect.bisect(self._holes, piece)
            before = self._holes[at - 1] if at and self._holes[at - 1].chunk == piece.chunk else None
            after = self._holes[at] if at < len(self._holes) and self._holes[at].chunk == piece.chunk else None
            if (before and before.stop > start) or (after and after.start < stop):
                raise ValueError(f"{piece} is free already.")
            first, last = at, at
            if before and before.stop == start:
                first, start = at - 1, before.start
            if after and after.start == stop:
                last, stop = at + 1, after.stop
            self._holes[first:last] = [Piece(piece.chunk, start, stop)]
            self.bytes += aligned(piece.stop) - piece.start


def aligned(nbytes: int) -> int:
    """`nbytes` rounded up to where the next range may start."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
