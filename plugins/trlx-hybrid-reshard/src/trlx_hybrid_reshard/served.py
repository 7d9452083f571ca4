"""The rollout layout as it is: read from the boxes of each weight that the live engines hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np
from trlx_hybrid.errors import ConfigError

from .intervals import Ints, whole
from .live import LiveLayout
from .parameter import Parameter
from .sharding import Sharding

Boxes: TypeAlias = Sequence[tuple[tuple[int, int], ...]]
"""Of one tensor on one rank; no layers' dimension."""

_Ranges: TypeAlias = tuple[tuple[int, int], ...]


def read_boxes(parameters: Sequence[Parameter], held: Sequence[Mapping[str, Boxes]]) -> LiveLayout:
    """The layout of live engines.

    Args:
        parameters: of one layer each.
        held: for each rank, the boxes of each parameter by name.

    Raises:
        ConfigError: the boxes of a rank are no product of ranges.
    """
    return LiveLayout(len(held), {p.name: from_boxes(p, [boxes.get(p.name, ()) for boxes in held]) for p in parameters})


def from_boxes(parameter: Parameter, held: Sequence[Boxes]) -> Sharding:
    """Where a parameter lies, by the boxes of each rank.

    Raises:
        ConfigError: the boxes of a rank are no product of ranges.
    """
    dims = len(parameter.shape)
    some = np.array([bool(boxes) for boxes in held])
    known: list[dict[_Ranges, int]] = [{} for _ in range(dims)]
    which = np.zeros((dims, len(held)), dtype=np.int64)
    for rank, boxes in enumerate(held):
        if not boxes:
            continue
        ranges = [tuple(sorted({box[d] for box in boxes})) for d in range(dims)]
        if np.prod([len(r) for r in ranges]) != len(set(boxes)):
            raise ConfigError(
                f"What rank {rank}'s engine holds of {parameter.name} is no product of ranges per dimension: "
                f"{sorted(set(boxes))}."
            )
        for d, own in enumerate(ranges):
            which[d, rank] = known[d].setdefault(own, len(known[d]))
    parts, coordinates = [whole(1)], list[Ints | None]([None])
    for d, distinct in enumerate(known):
        parts.append(_part(list(distinct)) if distinct else whole(parameter.shape[d]))
        coordinates.append(which[d] if len(distinct) > 1 else None)
    return Sharding(len(held), tuple(parts), tuple(coordinates), None if some.all() else some)


def _part(distinct: Sequence[_Ranges]) -> Ints:
    most = max(len(ranges) for ranges in distinct)
    filled = [[*ranges, *[(ranges[-1][1], ranges[-1][1])] * (most - len(ranges))] for ranges in distinct]
    return np.array(filled, dtype=np.int64)
