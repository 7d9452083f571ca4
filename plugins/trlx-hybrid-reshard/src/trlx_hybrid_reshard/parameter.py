"""A parameter class: the same tensor in many layers, and how an inference engine slices it."""

from __future__ import annotations

import enum
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field


class Stage(enum.Enum):
    """Which pipeline stages hold a parameter."""

    LAYERS = "layers"
    FIRST = "first"
    LAST = "last"
    ENDS = "first and last"
    """A tied output head: the embedding is used on both ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One parameter of the model in memory, as transformers names it, in all layers that have it.

    Index ranges are those of the whole tensor, (layer, *shape), whatever rank holds them.

    Attributes:
        name: with `{}` for the number of the layer.
        shape: of one layer's tensor. Experts are fused in transformers 5: gate and up (E, 2I, H), down (E, H, I).
        layers: numbers of the layers that have it, ascending; `range(1)` for those outside the layers.
        depth: hidden layers of the model, which pipeline stages divide; 0 when every layer has this parameter.
        stage: the pipeline stages that hold it.
        tp_dim: dimension that tensor parallelism slices; None is replicated on every TP rank.
        tp_units: indivisible units along `tp_dim`, e.g. heads; None takes single rows.
        unit: what these units are called, for messages.
        replicable: with more TP ranks than units, several ranks hold the same unit, as KV heads are held.
        segments: fused blocks of equal size along `tp_dim`, each sliced by itself: 2 for gate and up.
        vocabulary: the engine pads `tp_dim` with zero rows, see `Layout.vocab_multiple`.
        expert_dim: dimension that expert parallelism slices in place of `tp_dim`; None for what is no expert.
        fused: the engine's parameter that holds this one below others, in the order they are listed; None if alone.
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
    fused: str | None = None

    @property
    def kind(self) -> str:
        """expert, vocab, replicated, column or row: what decides how much of it can stay where it is."""
        if self.expert_dim is not None:
            return "expert"
        if self.vocabulary:
            return "vocab"
        if self.tp_dim is None:
            return "replicated"
        return "column" if self.tp_dim == 0 else "row"

    @property
    def extent(self) -> tuple[int, ...]:
        """(layers, *shape): the index space that plans speak of."""
        return (len(self.layers), *self.shape)

    @property
    def cut(self) -> tuple[Hashable, ...]:
        """Equal for parameters that any layout cuts alike: k and v, gate and up."""
        how = (self.stage, self.tp_dim, self.tp_units, self.replicable, self.segments, self.vocabulary)
        return (self.shape, tuple(self.layers) if self.depth else len(self.layers), self.depth, self.expert_dim, *how)

    @property
    def elements(self) -> int:
        """In all layers together, padding left out."""
        return math.prod(self.extent)


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """What a plan knows of a model: its parameter classes, with no weights.

    Attributes:
        name: for people.
        parameters: in the order a forward pass meets them.
        itemsize: bytes per element on the wire: 2 for bf16 and fp16.
        checkpoint_tensors: how many tensors a checkpoint of it has, where experts lie apart.
    """

    name: str
    parameters: tuple[Parameter, ...]
    itemsize: int = 2
    checkpoint_tensors: int = 0

    @property
    def bytes(self) -> int:
        """Of all parameters, in the wire's dtype."""
        return self.itemsize * sum(p.elements for p in self.parameters)
