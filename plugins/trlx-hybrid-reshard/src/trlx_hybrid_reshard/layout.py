"""Layouts: which slice of which parameter lies on which rank, as a few numbers."""

from __future__ import annotations

import functools
from collections.abc import Hashable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from trlx_hybrid import types
from trlx_hybrid.errors import ConfigError

from .intervals import Ints, chunks, rechunked, whole
from .parameter import Parameter, Stage
from .sharding import Sharding
from .slicing import dealt_experts, stage_layers, tensor_slices

VLLM_VOCAB_MULTIPLE = 64
"""`DEFAULT_VOCAB_PADDING_SIZE` of vLLM 0.31."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout(types.Layout):
    """A product of parallelisms over `dp * pp * fsdp * tp` ranks, and how exactly each of them cuts.

    `Layout(tp=4, pp=2)` is an engine and `Layout(dp=2, tp=4)` two of them. Ranks are numbered with tp fastest, then
    fsdp, pp, dp, which is the order of accelerate's meshes and of vLLM's. `fsdp` cuts what `tp` leaves on a rank, along
    dimension 0 unless `shard_dims` says otherwise, in `torch.chunk`'s sizes; `pp` and `tp` as vLLM does.

    Attributes:
        ep: ranks that experts are dealt out to, whole; `tp` or, across replicas, a multiple of it. 1 slices experts by
            `tp` like everything else.
        vocab_multiple: the padded vocabulary is a multiple of this; 1 pads nothing.
        mesh: the rank at each position of the mesh, row-major; None is 0, 1, 2 …
        shard_dims: (name of a parameter class, dimension that FSDP shards it along): what a `shard_placement_fn` says.
    """

    ep: int = 1
    vocab_multiple: int = 1
    mesh: tuple[int, ...] | None = None
    shard_dims: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        types.Layout.__post_init__(self)
        for name in ("ep", "vocab_multiple"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} in a layout: it must be 1 or more.")
        if self.ep > 1 and (self.ep % self.tp or (self.dp * self.tp) % self.ep or self.fsdp > 1):
            raise ConfigError(
                f"ep={self.ep} with tp={self.tp}, dp={self.dp}, fsdp={self.fsdp}: experts are dealt out over the tp "
                "ranks of one replica or of several, without fsdp. Set ep to tp, or to tp times a divisor of dp."
            )
        if self.mesh is not None and sorted(self.mesh) != list(range(self.world)):
            raise ConfigError(f"The mesh of a layout must name each of its {self.world} ranks once.")

    def over(self, world: int) -> Layout:
        """As many replicas of this as `world` ranks hold."""
        if world % self.world:
            raise ConfigError(
                f"{self} takes {self.world} ranks, which do not divide {world}. Choose tp and pp whose product does."
            )
        return replace(self, dp=self.dp * (world // self.world))

    def served(self) -> Layout:
        """This layout with the vocabulary padded as vLLM pads it."""
        return replace(self, vocab_multiple=VLLM_VOCAB_MULTIPLE)

    def sharding(self, parameter: Parameter) -> Sharding:
        """Where a parameter lies.

        Raises:
            ConfigError: a size does not divide; names the parameter and the sizes that would.
        """
        at = mesh_coordinates(self)
        parts = [whole(size) for size in parameter.extent]
        coordinates: list[Ints | None] = [None] * len(parts)
        held = None
        if self.pp > 1:
            held = _ends(parameter.stage, at.pp, self.pp)
            if parameter.stage is Stage.LAYERS:
                parts[0], coordinates[0] = stage_layers(parameter, self.pp), at.pp
        if self.ep > 1 and parameter.expert_dim is not None:
            d = parameter.expert_dim + 1
            parts[d], coordinates[d] = dealt_experts(parameter, self.ep), (at.dp * self.tp + at.tp) % self.ep
        elif parameter.tp_dim is not None and (self.tp > 1 or parameter.vocabulary):
            d = parameter.tp_dim + 1
            parts[d] = tensor_slices(parameter, self.tp, self.vocab_multiple)
            if len(parts[d]) > 1:
                coordinates[d] = at.tp * len(parts[d]) // self.tp
        if self.fsdp > 1:
            d = self._shard_dim(parameter) + 1
            inner = coordinates[d]
            parts[d] = chunks(parameter.extent[d], self.fsdp) if inner is None else rechunked(parts[d], self.fsdp)
            coordinates[d] = at.fsdp if inner is None else inner * self.fsdp + at.fsdp
        return Sharding(self.world, tuple(parts), tuple(coordinates), held)

    def alike(self, parameter: Parameter) -> Hashable:
        """Equal for parameters that are sharded alike."""
        return parameter.cut, dict(self.shard_dims).get(parameter.name, 0) if self.shard_dims else 0

    def _shard_dim(self, parameter: Parameter) -> int:
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
        changes = ["permuted mesh"] * (self.mesh is not None) + ["chosen shard dimensions"] * bool(self.shard_dims)
        return ",".join(sizes or ["dp=1"]) + "".join(f" ({c})" for c in changes)


@dataclass(frozen=True, slots=True, eq=False)
class Coordinates:
    """(world,) each: where every rank stands in the mesh."""

    dp: Ints
    pp: Ints
    fsdp: Ints
    tp: Ints


@functools.lru_cache(maxsize=16)
def mesh_coordinates(layout: Layout) -> Coordinates:
    """Remembered, since every parameter class asks."""
    position = np.arange(layout.world, dtype=np.int64)
    if layout.mesh is not None:
        position[np.asarray(layout.mesh)] = np.arange(layout.world)
    rest, tp = np.divmod(position, layout.tp)
    rest, fsdp = np.divmod(rest, layout.fsdp)
    dp, pp = np.divmod(rest, layout.pp)
    return Coordinates(dp, pp, fsdp, tp)


def _ends(stage: Stage, pp: Ints, stages: int) -> NDArray[np.bool_] | None:
    if stage is Stage.LAYERS:
        return None
    ends: NDArray[np.bool_] = np.zeros(len(pp), dtype=np.bool_)
    if stage in (Stage.FIRST, Stage.ENDS):
        ends |= pp == 0
    if stage in (Stage.LAST, Stage.ENDS):
        ends |= pp == stages - 1
    return ends
