"""Layouts of running objects: read from the DTensor placements of the trainer's parameters, and from the regions of the
tensors that engines say they hold."""

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
"""The boxes of one tensor that one rank holds: each has one half-open index range (start, stop) per dimension. The
layers' dimension is left out."""

_Ranges: TypeAlias = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, eq=False)
class LiveSharding:
    """The layout of a running model, which gives the planner the same methods as `MeshLayout` (the protocol
    `plan.ModelSharding`).

    Attributes:
        world: the number of ranks.
        shardings: the sharding of each parameter, by its name.
    """

    world: int
    shardings: Mapping[str, Sharding]

    def sharding(self, parameter: Parameter) -> Sharding:
        """Return the sharding of a parameter: which rank holds which part of it."""
        return self.shardings[parameter.name]

    def alike(self, parameter: Parameter) -> Hashable:
        """Return a key that is equal for parameters with the same sharding. Here it is the parameter's name, because
        placements may differ from one parameter to the next."""
        return parameter.name


def read_trainer(tensors: Mapping[str, Tensor], world: int) -> LiveSharding:
    """Return the layout of the trainer's model.

    Args:
        tensors: the model's parameters by name: DTensors, or plain tensors, which every rank holds in full (DDP).
        world: the number of ranks.

    Raises:
        ConfigError: see `from_dtensor`.
    """
    return LiveSharding(world, {name: from_dtensor(tensor, world) for name, tensor in tensors.items()})


def from_dtensor(tensor: Tensor, world: int) -> Sharding:
    """Return the sharding that a DTensor's mesh and placements describe. A plain tensor counts as held in full by every
    rank.

    FSDP2 over TP appears as `_StridedShard`, whose cut is made inside TP's although its mesh dimension comes first.

    Args:
        tensor: a parameter of the trainer's model.
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
    """Return how the running engines shard the parameters, worked out from what each rank's engine holds.

    Args:
        parameters: the parameters to look up. Each stands for one tensor of one layer, so no two layers are joined
            here.
        held: for each rank, the boxes (one index range per dimension) that its engine holds of each parameter, by name.

    Raises:
        ConfigError: what a rank holds of a parameter cannot be written as one set of ranges per dimension.
    """
    return LiveSharding(
        len(held), {p.name: from_boxes(p, [boxes.get(p.name, ()) for boxes in held]) for p in parameters}
    )


def from_boxes(parameter: Parameter, held: Sequence[Boxes]) -> Sharding:
    """Return the sharding of a parameter, worked out from the boxes that each rank holds.

    Args:
        parameter: the parameter.
        held: for each rank, its boxes: one index range per dimension. No box means that the rank holds nothing.

    Raises:
        ConfigError: a rank's boxes are not all combinations of one set of ranges per dimension.
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
    """Return the different sets of ranges that ranks hold along one dimension, int64 of shape (sets, intervals, 2).
    Shorter sets are filled up with empty ranges."""
    most = max(len(ranges) for ranges in distinct)
    filled = [[*ranges, *[(ranges[-1][1], ranges[-1][1])] * (most - len(ranges))] for ranges in distinct]
    return np.array(filled, dtype=np.int64)
