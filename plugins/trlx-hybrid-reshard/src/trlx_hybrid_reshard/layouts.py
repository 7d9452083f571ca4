"""Layouts, which say in a few numbers which slice of which parameter each rank holds. They cut as FSDP and vLLM 0.31
do.

A parameter class is one parameter of the model in all its layers, such as the q_proj.weight of every layer. Layouts and
plans are made of classes, so their cost does not depend on the number of layers.
"""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray
from trlx_hybrid.contract import types
from trlx_hybrid.errors import ConfigError

from .sharding import Ints, Sharding, rechunked, segmented, uncut


class Stage(enum.Enum):
    """The pipeline stages that hold a parameter: all stages, each with its own layers (`LAYERS`); the first (an
    embedding); the last (the final norm, an output head); or both ends."""

    LAYERS = "layers"
    FIRST = "first"
    LAST = "last"
    ENDS = "first and last"
    """The first and the last stage, as for a tied output head: it is also the embedding, which both ends use."""


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
        unit: the name of these units, for error messages.
        replicable: whether several TP ranks hold the same unit if there are more ranks than units, as with key-value
            heads.
        segments: the number of fused blocks of equal size along `tp_dim`, each sliced by itself: 2 for gate and up.
        vocabulary: whether the engine pads `tp_dim` with zero rows, see `MeshLayout.vocab_multiple`.
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
        "row" (it slices another). The kind decides how much of the parameter can stay where it is."""
        if self.expert_dim is not None:
            return "expert"
        if self.vocabulary:
            return "vocab"
        if self.tp_dim is None:
            return "replicated"
        return "column" if self.tp_dim == 0 else "row"

    @property
    def extent(self) -> tuple[int, ...]:
        """The shape of all layers together, (layers, *shape), to which the index ranges of plans refer."""
        return (len(self.layers), *self.shape)

    @property
    def cut(self) -> tuple[Hashable, ...]:
        """A key that is equal for parameters that every layout cuts alike, such as k_proj and v_proj, or gate_proj and
        up_proj. They are then planned once."""
        how = (self.stage, self.tp_dim, self.tp_units, self.replicable, self.segments, self.vocabulary)
        return (self.shape, tuple(self.layers) if self.depth else len(self.layers), self.depth, self.expert_dim, *how)

    @property
    def elements(self) -> int:
        """The number of elements in all layers together, without padding."""
        return math.prod(self.extent)


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model as a plan needs it: the names and shapes of its parameters, without weights.

    Attributes:
        name: the model's name, for output.
        parameters: the parameter classes, in the order of a forward pass.
        itemsize: bytes per element on the wire: 2 for bf16 and fp16.
    """

    name: str
    parameters: tuple[Parameter, ...]
    itemsize: int = 2

    @property
    def bytes(self) -> int:
        """The bytes of all parameters, in the wire's dtype."""
        return self.itemsize * sum(p.elements for p in self.parameters)


VLLM_VOCAB_MULTIPLE = 64
"""The multiple to which vLLM pads a vocabulary: `DEFAULT_VOCAB_PADDING_SIZE` of vLLM 0.31."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshLayout(types.Layout):
    """A layout of `dp * pp * fsdp * tp` ranks: a product of parallelisms, and how each of them cuts a parameter.

    It extends the user's `trlx_hybrid.Layout`. `MeshLayout(tp=4, pp=2)` is one engine and `MeshLayout(dp=2, tp=4)` is
    two engines. Ranks are numbered with tp fastest, then fsdp, pp, dp, which is the order of accelerate's meshes and of
    vLLM's. `fsdp` cuts a rank's `tp` slice, along dimension 0 unless `shard_dims` says otherwise, in `torch.chunk`'s
    sizes. `pp` and `tp` cut as vLLM does.

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
        """Return a key that is equal for parameters that this layout shards alike."""
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
    since every parameter class asks for them."""
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

    Source: vLLM `distributed/utils.py::get_pp_indices`: the remaining layers go to the last stages except the very
    last.

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
    half-open index ranges. There are `ways` slices, or fewer if several ranks share a key-value head.

    The slices of a vocabulary include the padding beyond its size.

    Source: vLLM `layers/linear.py::QKVParallelLinear`, `layers/vocab_parallel_embedding.py::pad_vocab_size`.

    Args:
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
    """Return the error message for a tensor-parallel size that does not divide a parameter's units, with sizes that
    do."""
    fitting = [str(d) for d in range(1, min(units, 64) + 1) if units % d == 0]
    return (
        f"tp={ways} {relation} the {units} {parameter.unit} of {parameter.name}. Choose a tp that fits: "
        f"{', '.join(fitting)}."
    )
