"""Layouts, which say which slice of which parameter each rank holds. A layout is either given by a few sizes, from
which the slices follow as FSDP and vLLM 0.31 cut them, or read from running objects: a trainer's DTensors, or the index
ranges that engines report.

A parameter class is one parameter of the model in all its layers, such as the q_proj.weight of every layer. Layouts,
and the transfers planned from them, are made of classes, so their cost does not depend on the number of layers.
"""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray
from trlx_hybrid.contract import types
from trlx_hybrid.errors import ConfigError

from .sharding import Ints, Sharding, rechunked, segmented, uncut

if TYPE_CHECKING:
    from torch import Tensor

Boxes: TypeAlias = Sequence[tuple[tuple[int, int], ...]]
"""The boxes of one tensor that one rank holds: each has one half-open index range (start, stop) per dimension. The
layers' dimension is left out."""

_Ranges: TypeAlias = tuple[tuple[int, int], ...]


class Stage(enum.Enum):
    """The pipeline stages that hold a parameter.

    `LAYERS`: every stage holds the parameter of its own layers. `FIRST`: the first stage, for an embedding. `LAST`: the
    last stage, for the final norm and an output head. `ENDS`: the first and the last stage."""

    LAYERS = "layers"
    FIRST = "first"
    LAST = "last"
    ENDS = "first and last"
    """The first and the last stage, for an output head that is tied to the embedding: both stages use it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A parameter class: one parameter of the model as it lies in memory and as transformers names it, in all layers
    that have it.

    Index ranges of a parameter class refer to the whole tensor, (layer, *shape), whichever rank holds them.

    Attributes:
        name: the parameter's name, with `{}` for the number of the layer.
        shape: the shape of one layer's tensor. Experts are fused in transformers 5: gate and up (E, 2I, H), down (E, H,
            I).
        layers: numbers of the layers that have the parameter, ascending; `range(1)` for a parameter outside the layers.
        depth: the number of the model's hidden layers, which pipeline stages divide; 0 if every layer has this
            parameter.
        stage: the pipeline stages that hold the parameter.
        tp_dim: the dimension that tensor parallelism slices; None for a parameter that is replicated on every TP rank.
        tp_units: the number of indivisible units along `tp_dim`, e.g. attention heads; None if single rows can be cut.
        unit: the name of what `tp_units` counts, for error messages.
        replicable: whether several TP ranks hold the same unit if there are more ranks than units, as with key-value
            heads.
        segments: the number of fused blocks of equal size along `tp_dim`, each sliced by itself: 2 for gate and up.
        vocabulary: whether `tp_dim` counts the vocabulary, which the engine pads with zero rows to a multiple of
            `MeshLayout.vocab_multiple`.
        expert_dim: the dimension that expert parallelism slices in place of `tp_dim`; None for a parameter that belongs
            to no expert.
    """

    name: str
    shape: tuple[int, ...]
    layers: Sequence[int] = field(default=range(1))
    depth: int = 0
    stage: Stage = Stage.LAYERS
    tp_dim: int | None = None
    tp_units: int | None = None
    unit: str = "rows"
    replicable: bool = False
    segments: int = 1
    vocabulary: bool = False
    expert_dim: int | None = None

    @property
    def kind(self) -> str:
        """The parameter's kind: "expert", "vocab", "replicated", "column" (tensor parallelism slices dimension 0) or
        "row" (it slices another dimension). The kind decides how much of the parameter need not be sent in a weight
        sync."""
        if self.expert_dim is not None:
            return "expert"
        if self.vocabulary:
            return "vocab"
        if self.tp_dim is None:
            return "replicated"
        return "column" if self.tp_dim == 0 else "row"

    @property
    def extent(self) -> tuple[int, ...]:
        """The shape of this parameter stacked over all layers that have it, (layers, *shape). The index ranges in the
        plans of a weight sync refer to this shape."""
        return (len(self.layers), *self.shape)

    @property
    def cut(self) -> tuple[Hashable, ...]:
        """A key that is equal for parameters that every layout cuts alike, such as k_proj and v_proj, or gate_proj and
        up_proj. The transfers of such parameters are then planned once."""
        how = (self.stage, self.tp_dim, self.tp_units, self.replicable, self.segments, self.vocabulary)
        return (self.shape, tuple(self.layers) if self.depth else len(self.layers), self.depth, self.expert_dim, *how)

    @property
    def elements(self) -> int:
        """The number of elements in all layers together, without padding."""
        return math.prod(self.extent)


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The names and shapes of a model's parameters, without weights, from which the transfers between two layouts are
    planned.

    Attributes:
        name: the model's name, for output.
        parameters: the parameter classes, in the order of a forward pass.
        itemsize: bytes per element as it is sent: 2 for bf16 and fp16.
    """

    name: str
    parameters: tuple[Parameter, ...]
    itemsize: int = 2

    @property
    def bytes(self) -> int:
        """The bytes of all parameters, at `itemsize` bytes per element."""
        return self.itemsize * sum(p.elements for p in self.parameters)


VLLM_VOCAB_MULTIPLE = 64
"""The multiple to which vLLM pads a vocabulary: `DEFAULT_VOCAB_PADDING_SIZE` of vLLM 0.31."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshLayout(types.Layout):
    """A layout of `dp * pp * fsdp * tp` ranks: a product of parallelisms, and how each of them cuts a parameter.

    It extends the user's `trlx_hybrid.Layout`, which has the four sizes: replicas (`dp`), pipeline stages (`pp`), ranks
    that a replica's parameters are sharded over (`fsdp`) and tensor-parallel ranks (`tp`). `MeshLayout(tp=4, pp=2)` is
    one engine and `MeshLayout(dp=2, tp=4)` is two engines. Ranks are numbered with tp fastest, then fsdp, pp, dp, which
    is the order of accelerate's meshes and of vLLM's. `fsdp` cuts a rank's `tp` slice, along dimension 0 unless
    `shard_dims` says otherwise, in `torch.chunk`'s sizes. `pp` and `tp` cut as vLLM does.

    Attributes:
        ep: the number of ranks over which whole experts are distributed (expert parallelism): `tp` or, across replicas,
            a multiple of it. 1 slices experts by `tp` like all other parameters.
        vocab_multiple: the vocabulary is padded to a multiple of this; 1 pads nothing.
        shard_dims: pairs of a parameter class's name and the dimension along which FSDP shards it, as chosen by a
            `shard_placement_fn` of `fully_shard`. Parameters without an entry are sharded along dimension 0.
    """

    ep: int = 1
    vocab_multiple: int = 1
    shard_dims: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        types.Layout.__post_init__(self)
        for name in ("ep", "vocab_multiple"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} in a layout: it must be 1 or more.")
        if self.ep > 1 and self.fsdp > 1:
            raise ConfigError(
                f"ep={self.ep} with fsdp={self.fsdp}: experts are dealt out over tp ranks. Leave fsdp out."
            )
        if self.ep > 1 and (self.ep % self.tp or (self.dp * self.tp) % self.ep):
            raise ConfigError(
                f"ep={self.ep} with tp={self.tp}, dp={self.dp}: ep must be tp, or tp times a divisor of dp."
            )

    def over(self, world: int) -> MeshLayout:
        """Return this layout with as many data-parallel replicas as fit into `world` ranks.

        Raises:
            ConfigError: the ranks of one replica do not divide `world`.
        """
        if world % self.world:
            raise ConfigError(
                f"{self} uses {self.world} ranks per replica, which does not divide the {world} ranks of training. "
                "Choose tp × pp that does."
            )
        return replace(self, dp=self.dp * (world // self.world))

    def served(self) -> MeshLayout:
        """Return this layout with the vocabulary padded as vLLM pads it: the layout of an engine."""
        return replace(self, vocab_multiple=VLLM_VOCAB_MULTIPLE)

    def sharding(self, parameter: Parameter) -> Sharding:
        """Return the sharding of a parameter: which rank holds which part of it.

        Raises:
            ConfigError: a size does not divide the parameter; names the parameter and sizes that do.
        """
        dp, pp, fsdp, tp = mesh_coordinates(self)
        parts = [uncut(size) for size in parameter.extent]
        coordinates: list[Ints] = [np.zeros_like(pp)] * len(parts)
        held = _ends(parameter.stage, pp, self.pp)
        if self.pp > 1 and parameter.stage is Stage.LAYERS:
            parts[0], coordinates[0] = stage_layers(parameter, self.pp), pp
        if self.ep > 1 and parameter.expert_dim is not None:
            d = parameter.expert_dim + 1
            parts[d], coordinates[d] = expert_shares(parameter, self.ep), (dp * self.tp + tp) % self.ep
        elif parameter.tp_dim is not None:
            d = parameter.tp_dim + 1
            parts[d] = tensor_slices(parameter, self.tp, self.vocab_multiple)
            coordinates[d] = tp * len(parts[d]) // self.tp
        if self.fsdp > 1:
            d = self._shard_dim(parameter) + 1
            parts[d], coordinates[d] = rechunked(parts[d], self.fsdp), coordinates[d] * self.fsdp + fsdp
        return Sharding(self.world, tuple(parts), tuple(coordinates), held)

    def alike(self, parameter: Parameter) -> Hashable:
        """Return a key that is equal for parameters that this layout shards alike, which are then planned once."""
        return parameter.cut, dict(self.shard_dims).get(parameter.name, 0) if self.shard_dims else 0

    def _shard_dim(self, parameter: Parameter) -> int:
        """Return the dimension along which FSDP shards a parameter.

        Raises:
            ConfigError: there is no such dimension, or FSDP2 cannot shard it because `fsdp` does not divide it.
        """
        dim = next((dim for name, dim in self.shard_dims if name == parameter.name), 0)
        if dim >= len(parameter.shape):
            raise ConfigError(f"{parameter.name} of shape {parameter.shape} has no dimension {dim} to shard along.")
        if dim and parameter.shape[dim] % self.fsdp:
            raise ConfigError(
                f"FSDP2 shards dimension {dim} of {parameter.name} only evenly, and fsdp={self.fsdp} does not divide "
                f"{parameter.shape[dim]}. Leave it on dimension 0."
            )
        return dim

    def __str__(self) -> str:
        sizes = [f"{k}={getattr(self, k)}" for k in ("dp", "pp", "fsdp", "tp", "ep") if getattr(self, k) > 1]
        return ",".join(sizes or ["dp=1"]) + " (chosen shard dimensions)" * bool(self.shard_dims)


@functools.lru_cache(maxsize=16)
def mesh_coordinates(layout: MeshLayout) -> tuple[Ints, ...]:
    """Return the coordinates of every rank in a layout: dp, pp, fsdp and tp, each int64 of shape (ranks,). Cached,
    since they are needed for each parameter class (one parameter in all its layers)."""
    return np.unravel_index(np.arange(layout.world), (layout.dp, layout.pp, layout.fsdp, layout.tp))


def _ends(stage: Stage, pp: Ints, stages: int) -> NDArray[np.bool_]:
    """Return which ranks hold a parameter, bool of shape (ranks,), from the pipeline stages that have it.

    Args:
        stage: the stages that hold the parameter.
        pp: the pipeline stage of each rank, (ranks,).
        stages: the number of pipeline stages.
    """
    if stages == 1 or stage is Stage.LAYERS:
        return np.ones(len(pp), dtype=np.bool_)
    first, last = stage in (Stage.FIRST, Stage.ENDS), stage in (Stage.LAST, Stage.ENDS)
    held: NDArray[np.bool_] = (first & (pp == 0)) | (last & (pp == stages - 1))
    return held


def stage_layers(parameter: Parameter, stages: int) -> Ints:
    """Return which of a parameter's layers each pipeline stage holds: int64 of shape (stages, 1, 2), half-open ranges
    of positions in `parameter.layers`.

    If the layers cannot be divided evenly, some stages hold one layer more than the others: the stage before the last,
    and as many stages before it as there are further layers left over.

    Source: vLLM `distributed/utils.py::get_pp_indices`.

    Args:
        stages: the number of pipeline stages.

    Raises:
        ConfigError: there are more stages than layers.
    """
    depth = parameter.depth or len(parameter.layers)
    if stages > depth:
        raise ConfigError(f"pp={stages} is more than the {depth} layers of the model. Choose pp of at most {depth}.")
    sizes = [depth // stages] * stages
    for i in range(2, depth % stages + 2):
        sizes[-i] += 1
    numbers = np.concatenate([[0], np.cumsum(sizes)])
    edges = np.searchsorted(np.asarray(parameter.layers), numbers)
    return np.stack([edges[:-1], edges[1:]], axis=-1)[:, None]


def expert_shares(parameter: Parameter, ranks: int) -> Ints:
    """Return which whole experts each rank holds: int64 of shape (ranks, 1, 2), half-open ranges of expert numbers. If
    `ranks` does not divide the experts, the first ranks have one more.

    Source: vLLM `layers/fused_moe/expert_map_manager.py::determine_expert_map`, strategy "linear".
    """
    assert parameter.expert_dim is not None
    experts = parameter.shape[parameter.expert_dim]
    rank = np.arange(ranks + 1, dtype=np.int64)
    edges = rank * (experts // ranks) + np.minimum(rank, experts % ranks)
    return np.stack([edges[:-1], edges[1:]], axis=-1)[:, None]


def tensor_slices(parameter: Parameter, ways: int, vocab_multiple: int) -> Ints:
    """Return the slices into which tensor parallelism cuts `parameter.tp_dim`: int64 of shape (slices, segments, 2),
    for each slice one half-open index range in each of the parameter's fused blocks. There are `ways` slices, or fewer
    if several ranks share a key-value head.

    The slices of a vocabulary include the padding beyond its size.

    Source: vLLM `layers/linear.py::QKVParallelLinear`, `layers/vocab_parallel_embedding.py::pad_vocab_size`.

    Args:
        parameter: a parameter that has a `tp_dim`.
        ways: the number of tensor-parallel ranks.
        vocab_multiple: the multiple to which a vocabulary is padded.

    Raises:
        ConfigError: `ways` does not divide the parameter's indivisible units, such as heads.
    """
    assert parameter.tp_dim is not None
    size = parameter.shape[parameter.tp_dim]
    if parameter.vocabulary:
        size = -(-size // vocab_multiple) * vocab_multiple
    units = parameter.tp_units or size // parameter.segments
    if parameter.replicable and ways > units:
        if ways % units:
            raise ConfigError(_indivisible(parameter, ways, units, "neither divides nor is a multiple of"))
        ways = units
    if units % ways:
        raise ConfigError(_indivisible(parameter, ways, units, "does not divide"))
    return uncut(size) if ways == 1 else segmented(size, ways, parameter.segments)


def _indivisible(parameter: Parameter, ways: int, units: int, relation: str) -> str:
    """Return the error message for a tensor-parallel size that does not fit a parameter, with the sizes that fit.

    Args:
        parameter: the parameter, which is cut into units that must stay whole, such as heads.
        ways: the tensor-parallel size.
        units: the number of the parameter's units.
        relation: how `ways` relates to `units`, in words of the message: "does not divide".
    """
    fitting = [str(d) for d in range(1, min(units, 64) + 1) if units % d == 0]
    return (
        f"tp={ways} {relation} the {units} {parameter.unit} of {parameter.name}. Choose a tp that fits: "
        f"{', '.join(fitting)}."
    )


# --- read from running objects --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class LiveSharding:
    """The layout of a running model: which rank holds which part of each parameter. Like `MeshLayout`, it has the
    methods that the planner calls (the protocol `plan.ModelSharding`).

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
    """Return which rank holds which part of each parameter of the trainer's model.

    Args:
        tensors: the model's parameters by name: DTensors, or plain tensors, which every rank holds in full (DDP).
        world: the number of ranks.

    Raises:
        ConfigError: a placement is neither a shard nor a replica, or a device mesh lists its ranks out of order.
    """
    return LiveSharding(world, {name: from_dtensor(tensor, world) for name, tensor in tensors.items()})


def from_dtensor(tensor: Tensor, world: int) -> Sharding:
    """Return how a DTensor is sharded, from its mesh and placements. A plain tensor counts as held in full by every
    rank.

    FSDP2 over tensor parallelism appears as the placement `_StridedShard`: its mesh dimension comes first, but it cuts
    the slices that the tensor-parallel dimension has made.

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
    """Return the layout of the running engines: which rank's engine holds which part of each parameter.

    Args:
        parameters: the parameters to look up. Each is one tensor of the model; the tensors of the same name in all
            layers are not merged into one parameter with several layers.
        held: for each rank, the boxes (one index range per dimension) that its engine holds of each parameter, by name.

    Raises:
        ConfigError: the boxes that a rank holds of a parameter are not all combinations of one set of ranges per
            dimension.
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
                f"The parts of {parameter.name} that rank {rank}'s engine holds are not all combinations of one set of "
                f"index ranges per dimension: {sorted(set(boxes))}."
            )
        for d, own in enumerate(ranges):
            which[d, rank] = known[d].setdefault(own, len(known[d]))
    parts = [_part(list(distinct)) if distinct else uncut(size) for distinct, size in zip(known, parameter.shape)]
    return Sharding(len(held), (uncut(1), *parts), (np.zeros_like(which[0]), *which), some)


def _part(distinct: Sequence[_Ranges]) -> Ints:
    """Return as an array the different sets of index ranges that ranks hold along one dimension: int64 of shape (sets,
    intervals, 2). Sets with fewer ranges than others are filled up with empty ranges.

    Args:
        distinct: the sets, each with its ranges (start, stop) in ascending order.
    """
    most = max(len(ranges) for ranges in distinct)
    filled = [[*ranges, *[(ranges[-1][1], ranges[-1][1])] * (most - len(ranges))] for ranges in distinct]
    return np.array(filled, dtype=np.int64)
