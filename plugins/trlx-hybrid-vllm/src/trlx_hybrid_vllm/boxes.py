"""Boxes of a tensor, each with the strided memory that holds it, joined where several are one.

A loader that goes expert by expert copies hundreds of small boxes. Whoever moves weights plans and launches per box, so
those that lie beside each other, in the tensor and in memory at one stride, become one.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from .loading import Slice

Box = tuple[tuple[int, int], ...]
"""Half-open index ranges, one per dimension."""


@dataclass(frozen=True, slots=True)
class Placed:
    """A box, and where an engine parameter holds it.

    Attributes:
        parameter: of the engine.
        memory: shaped like the box.
    """

    box: Box
    parameter: str
    memory: Slice


def placed(box: Box, parameter: str, memory: Slice) -> Placed | None:
    """A box in memory that may lack its dimensions of size 1, as one expert's matrix does; None where sizes differ."""
    sizes = tuple(stop - start for start, stop in box)
    if [n for n in sizes if n > 1] != [n for n in memory.shape if n > 1]:
        return None
    known = iter([s for n, s in zip(memory.shape, memory.stride, strict=True) if n > 1])
    strides = tuple(next(known) if n > 1 else 1 for n in sizes)
    return Placed(box, parameter, Slice(sizes, strides, memory.offset))


def joined(pieces: Iterable[Placed]) -> list[Placed]:
    """The same memory in as few boxes as one pass over each dimension finds. A pure function."""
    found = list(pieces)
    for d in range(len(found[0].box) if found else 0):
        alike: defaultdict[object, list[Placed]] = defaultdict(list)
        for piece in found:
            alike[piece.parameter, _without(piece.box, d), _strides(piece.memory, d)].append(piece)
        found = [run for pieces in alike.values() for run in _runs(pieces, d)]
    return sorted(found, key=lambda piece: (piece.parameter, piece.memory.offset))


def _runs(pieces: Sequence[Placed], d: int) -> list[Placed]:
    """Pieces that differ along one dimension only, those that continue each other made one."""
    runs: list[Placed] = []
    for piece in sorted(pieces, key=lambda p: (p.box[d], p.memory.offset)):
        longer = _continued(runs[-1], piece, d) if runs else None
        if longer is None:
            runs.append(piece)
        else:
            runs[-1] = longer
    return runs


def _continued(run: Placed, piece: Placed, d: int) -> Placed | None:
    """Both as one, or None where the second does not go on where the first ends."""
    (start, end), (after, stop) = run.box[d], piece.box[d]
    stride, rest = divmod(piece.memory.offset - run.memory.offset, end - start)
    known = [p.memory.stride[d] for p in (run, piece) if p.memory.shape[d] > 1]
    if end != after or rest or stride <= 0 or any(other != stride for other in known):
        return None
    memory = replace(
        run.memory, shape=_with(run.memory.shape, d, stop - start), stride=_with(run.memory.stride, d, stride)
    )
    return Placed((*run.box[:d], (start, stop), *run.box[d + 1 :]), run.parameter, memory)


def elements(box: Box) -> int:
    """How many a box has."""
    return math.prod(stop - start for start, stop in box)


def _without(box: Box, d: int) -> Box:
    return (*box[:d], *box[d + 1 :])


def _strides(memory: Slice, d: int) -> tuple[int, ...]:
    """Of the other dimensions; one of a single index has none."""
    return tuple(s for i, (n, s) in enumerate(zip(memory.shape, memory.stride, strict=True)) if i != d and n > 1)


def _with(values: tuple[int, ...], d: int, value: int) -> tuple[int, ...]:
    return (*values[:d], value, *values[d + 1 :])
