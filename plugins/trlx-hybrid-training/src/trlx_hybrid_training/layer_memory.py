"""The plan of what a policy's layers keep for the backward pass, and where. It moves nothing itself.

A layer that is recomputed keeps its input alone: `tokens × hidden size` numbers. For one row of 128k tokens of an 8B
model that is 1 GiB a layer, 36 GiB in all; and one layer, while it is recomputed, takes some 30 GiB. So layers of long
rows compute norms and MLP in tiles (`tiles`), and inputs that do not fit wait in host memory (`host_inputs`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from torch import nn

SHARE = 0.9
"""The share of the device's free memory that activations may be planned to take, since the allocator's blocks do not
fit exactly; and the share of the host's free memory that inputs may."""

WORKSPACE = 1 << 30
"""Bytes of the device that no layer's activations may take: they are kept free for what is not counted separately,
above all chunks of float32 logits."""

IN_BACKWARD = 3
"""The peak memory of one layer's backward pass, in multiples of the bytes that a layer keeps for it.

It counts the layer's own activations, recomputed, and their gradients, beside what other layers keep.
"""

WORTH = 1 << 29
"""Bytes of all layers' inputs below which none is kept in host memory: the copies would cost more than they save."""

UNDER_WAY = 3
"""The number of inputs in host memory that also take device memory at one time: one in use, and those that are being
copied."""

MARGIN = 1.25
"""The factor by which an estimate of a whole layer is raised, where the layer was counted in tiles only."""

BY_COLUMN = 3
"""The most values that a layer was seen to keep for a token, as a multiple of the number of input and output columns of
its linear modules: 2.9 in Gemma 3, which has six norms, in bf16 with adapters in float32. It serves until a layer of
the run has been counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """The memory that a plan has to fit into, in bytes of the device.

    Attributes:
        free: bytes that nobody uses.
        others: how many of these something other than activations will take.
    """

    free: int
    others: int

    @property
    def budget(self) -> int:
        """The bytes that activations may take."""
        return int(self.free * SHARE) - WORKSPACE - self.others


@dataclass(frozen=True, slots=True, kw_only=True)
class Layers:
    """The layers of one forward pass, and the bytes that each keeps for the backward pass.

    Attributes:
        count: how many there are.
        inputs: bytes of a layer's input.
        whole: bytes that a layer keeps if it is not recomputed.
        tiled: bytes that it keeps if its norms and its MLP are computed in tiles; None where they may not be.
        tile: bytes that these modules keep for one tile.
    """

    count: int
    inputs: int
    whole: int
    tiled: int | None = None
    tile: int = 0

    def each(self, in_tiles: bool) -> int:
        """Return the bytes that a layer keeps.

        Args:
            in_tiles: whether it computes in tiles.
        """
        return self.tiled if in_tiles and self.tiled is not None else self.whole

    def peak(self, in_tiles: bool) -> int:
        """Return the bytes that a layer takes during its backward pass.

        Args:
            in_tiles: whether it computes in tiles.
        """
        return IN_BACKWARD * (self.each(in_tiles) + (self.tile if in_tiles else 0))

    def kept_in(self, memory: Memory, in_tiles: bool = False) -> int:
        """Return how many layers' activations fit into memory beside the inputs of all, so that these layers need not
        be recomputed.

        Args:
            in_tiles: whether the layers compute in tiles.
        """
        left = memory.budget - self.count * self.inputs - self.peak(in_tiles)
        return max(0, min(self.count, left // max(self.each(in_tiles), 1)))


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPlan:
    """The tasks of the layers of one forward pass. The first layers are recomputed, and the first of these keep their
    input in host memory, because the activations of the last layers are freed before the backward pass reaches the
    first.

    Attributes:
        kept: how many of the last layers are not recomputed.
        tiled: whether all layers compute norms and MLP in tiles.
        offloaded: how many of the first layers keep their input in host memory.
    """

    kept: int
    tiled: bool = False
    offloaded: int = 0


def plan(memory: Memory, layers: Layers, to_host: bool) -> LayerPlan:
    """Return what the layers of a forward pass are to do. They keep as much as memory holds. Where it does not hold one
    layer beside the inputs of all, they compute in tiles. Where this is not enough, inputs are kept in host memory.

    Args:
        to_host: whether inputs may be kept in host memory.
    """
    left = memory.budget - layers.count * layers.inputs
    for in_tiles in (False, True) if layers.tiled is not None else (False,):
        kept = layers.kept_in(memory, in_tiles)
        if kept or left >= layers.peak(in_tiles):
            return LayerPlan(kept=kept, tiled=in_tiles)
    if not to_host or layers.count * layers.inputs < WORTH:
        return LayerPlan(kept=0, tiled=in_tiles)
    room = (memory.budget - layers.peak(in_tiles)) // max(layers.inputs, 1) - UNDER_WAY
    return LayerPlan(kept=0, tiled=in_tiles, offloaded=layers.count - max(0, min(layers.count, room)))


class LayerBytes:
    """A record of how many bytes a layer kept for its backward pass, by the number of tokens in the forward pass.

    Its truth value (`bool`) is True once it has an entry.

    Attributes:
        seen: the bytes, by the number of tokens.
    """

    def __init__(self) -> None:
        self.seen: dict[int, int] = {}

    def __bool__(self) -> bool:
        return bool(self.seen)

    def add(self, tokens: int, bytes_: int) -> None:
        """Record how many bytes a layer kept in a forward pass. This replaces the records of forward passes with as
        many or slightly fewer tokens.

        Args:
            tokens: the number of tokens in the forward pass.
            bytes_: the bytes that the layer kept for its backward pass.
        """
        size = tokens.bit_length()
        self.seen = {n: b for n, b in self.seen.items() if n.bit_length() != size or n > tokens} | {tokens: bytes_}

    def expected(self, tokens: int) -> int | None:
        """Return how many bytes a layer keeps at most in a forward pass, or None if nothing is recorded yet.

        The bound is the lowest that the records give: what a larger pass kept, or what a smaller one kept in proportion
        to its tokens. It is never too low, because a part of the bytes (weights cast under autocast) does not grow with
        the tokens.

        Args:
            tokens: the number of tokens in the forward pass.
        """
        return min((b if n >= tokens else -(-b * tokens // n) for n, b in self.seen.items()), default=None)


class KnownBytes:
    """The knowledge of how many bytes a model's layers keep for the backward pass: as counted, else as the linear
    modules of one layer tell; 0 where neither is known.

    Attributes:
        whole, tiled: the bytes that a layer was seen to keep, computed whole and in tiles.
    """

    def __init__(self) -> None:
        self.whole, self.tiled = LayerBytes(), LayerBytes()
        self._widths: tuple[int, int] | None = None  # bytes for each token: of a layer, and of what is not tiled

    def read(self, layer: nn.Module, itemsize: int, tileable: Callable[[nn.Module], Sequence[nn.Module]]) -> None:
        """Read what a layer's linear modules tell, the first time that this is called.

        Args:
            layer: a layer of a transformer.
            itemsize: bytes of a value.
            tileable: returns the modules of the layer that may be computed in tiles.
        """
        if self._widths is None:
            every, beside = bytes_by_width(layer, itemsize), bytes_by_width(layer, itemsize, tileable(layer))
            self._widths = every or 0, beside or 0

    def layers(self, count: int, inputs: int, tokens: int, tile: int) -> Layers:
        """Return the bytes that layers keep in a forward pass, after `read`. Linear modules tell too much. Where a
        layer was counted in tiles only, the estimate of a whole layer is lowered by the same factor.

        Args:
            count: the number of layers.
            inputs: bytes of a layer's input.
            tokens: the number of tokens in the forward pass, with a part of those that are only copied.
            tile: the number of tokens in the tiles of all its rows; none is tiled that has as many tokens.
        """
        by_width, beside_tiles = self._widths or (0, 0)
        whole, beside = self.whole.expected(tokens), self.tiled.expected(tokens)
        if whole is None:
            told = 1.0 if beside is None else min(1.0, MARGIN * beside / max(beside_tiles * tokens, 1))
            whole = int(by_width * tokens * told)
        layers = Layers(count=count, inputs=inputs, whole=whole)
        if tokens <= tile or beside_tiles == by_width:  # nothing would be tiled
            return layers
        beside = min(whole, beside_tiles * tokens) if beside is None else beside
        return replace(layers, tiled=beside, tile=(by_width - beside_tiles) * tile)

    def plan(self, memory: Memory, layers: Layers, long: bool, to_host: bool) -> LayerPlan:
        """Return what the layers of a forward pass are to do, as `plan` does. Until a layer was counted, at most one is
        kept, to count it: of short rows in any case, of long ones where its linear modules tell that it fits.

        Args:
            layers: what `layers` returned.
            long: whether the rows are longer than a tile.
            to_host: whether inputs may be kept in host memory.
        """
        found = plan(memory, layers, to_host)
        if self.tiled if found.tiled else self.whole:
            return found
        if not long or not layers.whole:
            return LayerPlan(kept=1)
        return replace(found, kept=min(found.kept, 1))


def bytes_by_width(layer: nn.Module, itemsize: int, without: Iterable[nn.Module] = ()) -> int | None:
    """Return the bytes that a layer keeps for each token, at most, as its linear modules tell; None where they do not,
    because the layer has other matrices, such as experts or quantised weights of another kind.

    Args:
        layer: a layer of a transformer.
        itemsize: bytes of a value.
        without: modules of the layer that keep nothing, nor do modules inside them.
    """
    linear = [m for name, m in layer.named_modules() if isinstance(m, nn.Linear) and ".lora_" not in name]
    known = {id(p) for m in layer.modules() if isinstance(m, nn.Linear) for p in m.parameters(recurse=False)}
    if any(t.dim() > 1 and id(t) not in known for t in [*layer.parameters(), *layer.buffers()]):
        return None
    left_out = {module for given in without for module in given.modules()}
    columns = sum(m.in_features + m.out_features for m in linear if m not in left_out)
    return int(BY_COLUMN * itemsize * columns)
