"""Layouts read from live objects: the trainer's DTensor placements, and the boxes that engines hold."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from trlx_hybrid.errors import ConfigError

from .layouts import Parameter
from .sharding import Ints, Sharding, rechunked, uncut

if TYPE_CHECKING:
    from torch import Tensor

Boxes: TypeAlias = Sequence[tuple[tuple[int, int], ...]]
"""The boxes of one tensor on one rank, without the layers' dimension."""

_Ranges: TypeAlias = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, eq=False)
class LiveSharding:
    """A `plan.ModelSharding` of shardings that were read from a live model.

    Attributes:
        shardings: the shardings, by the name of the parameter class.
    """

    world: int
    shardings: Mapping[str, Sharding]

    def sharding(self, parameter: Parameter) -> Sharding:
        """Return the sharding of a parameter."""
        return self.shardings[parameter.name]

    def alike(self, parameter: Parameter) -> Hashable:
        """Return the parameter's name: placements may differ from one parameter to the next."""
        return parameter.name


def read_trainer(tensors: Mapping[str, Tensor], world: int) -> LiveSharding:
    """Return the layout of a live model.

    Args:
        tensors: the model's parameters by name: DTensors, or plain tensors, which every rank holds in full (DDP).
        world: the number of ranks.

    Raises:
        ConfigError: see `from_dtensor`.
    """
    return LiveSharding(world, {name: from_dtensor(tensor, world) for name, tensor in tensors.items()})


def from_dtensor(tensor: Tensor, world: int) -> Sharding:
    """Return the sharding of a DTensor. Every rank holds a plain tensor in full.

    FSDP2 over TP appears as `_StridedShard`, whose cut is made inside TP's although its mesh dimension comes first.

    Args:
        world: the number of ranks; ranks outside the tensor's mesh hold nothing.

    Raises:
        ConfigError: a placement is neither a shard nor a replica, or the mesh lists its ranks out of order.
    """
    extent = (1, *tensor.shape)
    parts, coordinates = [uncut(size) for size in extent], [np.zeros(world, dtype=np.int64)] * len(extent)
    mesh, placements = getattr(tensor, "device_mesh", None), getattr(tensor, "placements", ())
    ranks = np.arange(world) if mesh is None else np.asarray(mesh.mesh.tolist(), dtype=np.int64)
    position = np.indices(ranks.shape)
    strided = [hasattr(p, "split_factor") and p.split_factor > 1 for p in placements]
    late = [i for i, it_is in enumerate(strided) if it_is]
    for i in (*(i for i in range(len(strided)) if i not in late), *reversed(late)):
        if placements[i].is_replicate():
            continue
        if not (placements[i].is_shard() or strided[i]):
            raise ConfigError(f"A parameter is placed as {placements[i]}: only shards and replicas can be resharded.")
        d, ways = placements[i].dim + 1, ranks.shape[i]
        if ways > 1 and (np.diff(ranks, axis=i) < 0).any():
            raise ConfigError(
                f"The device mesh lists its ranks as {ranks.tolist()}. torch sorts the ranks of a process group, so "
                "FSDP2 shards in ascending order whatever the mesh says. Make it ascending."
            )
        place = np.zeros(world, dtype=np.int64)
        place[ranks] = position[i]
        parts[d], coordinates[d] = rechunked(parts[d], ways), coordinates[d] * ways + place
    return Sharding(world, tuple(parts), tuple(coordinates), np.isin(np.arange(world), ranks))


def read_engines(parameters: Sequence[Parameter], held: Sequence[Mapping[str, Boxes]]) -> LiveSharding:
    """Return the layout of live engines.

    Args:
        parameters: the parameters, of one layer each.
        held: for each rank, the boxes of each parameter by name.

    Raises:
        ConfigError: the boxes of a rank are no product of ranges.
    """
    return LiveSharding(
        len(held), {p.name: from_boxes(p, [boxes.get(p.name, ()) for boxes in held]) for p in parameters}
    )


def from_boxes(parameter: Parameter, held: Sequence[Boxes]) -> Sharding:
    """Return the sharding of a parameter, from the boxes that each rank holds.

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
    parts = [_part(list(distinct)) if distinct else uncut(size) for distinct, size in zip(known, parameter.shape)]
    return Sharding(len(held), (uncut(1), *parts), (np.zeros_like(which[0]), *which), some)


def _part(distinct: Sequence[_Ranges]) -> Ints:
    most = max(len(ranges) for ranges in distinct)
    filled = [[*ranges, *[(ranges[-1][1], ranges[-1][1])] * (most - len(ranges))] for ranges in distinct]
    return np.array(filled, dtype=np.int64)
