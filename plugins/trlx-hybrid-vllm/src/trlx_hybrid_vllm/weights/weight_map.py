"""A map from each parameter of the policy to its place in vLLM's memory, for weight syncs that share that memory or
write into it.

vLLM fuses, pads and slices what it loads. `loader.py` records every copy that vLLM's own loader makes: from which slice
of a checkpoint tensor, to where. Here each copy is read as a box, one index range per dimension, of a parameter of the
policy, together with the strided memory that holds it. Adjacent boxes are joined: a loader that goes expert by expert
makes hundreds of copies. No table of model names is involved.

Where the policy keeps other tensors in memory than in its checkpoint, as with fused experts, the conversion by which
transformers saves the model is run over a tensor of indices: the result tells which elements vLLM's loader was given.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from trlx_hybrid.contract.protocols import Region, Regions
from trlx_hybrid.errors import EngineError, listed
from trlx_hybrid.policy.policy import Policy

from ..private.models import pads_rows
from .loader import Route, Slice, WeightLoader, differ, flagged

Box = tuple[tuple[int, int], ...]
"""Half-open index ranges, one per dimension."""


@dataclass(frozen=True, slots=True)
class PlacedBox:
    """A box (one index range per dimension) of a parameter of the policy, and the engine's memory that holds it.

    Attributes:
        box: half-open index ranges in the policy's parameter, one per dimension.
        parameter: name of the engine's parameter.
        memory: the region of the engine's parameter, shaped like the box.
    """

    box: Box
    parameter: str
    memory: Slice


class WeightMap:
    """The places in vLLM's memory of all boxes (one index range per dimension) of all parameters of a policy.

    Attributes:
        pieces: the boxes of each parameter of the policy, by the parameter's name, with their places; none for a
            parameter that vLLM's loader did not read.
        buffers: the copies that vLLM's loader makes of the policy's persistent buffers.
        irregular: parameters of which vLLM's loader copied something that is not a box, with a description of the copy.
        computed: parameters that vLLM's loader computed something from, rather than copy them.
        unknown: checkpoint tensors that the loader copied from, and that come from no parameter or buffer of the
            policy.
    """

    def __init__(self, policy: Policy, loader: WeightLoader) -> None:
        self.loader = loader
        self.pieces: dict[str, list[PlacedBox]] = {}
        self.irregular: dict[str, str] = {}
        self.computed: set[str] = set()
        buffers = policy.buffers().keys() & loader.routes.keys()
        self.buffers = [route for name in buffers for route in loader.routes[name]]
        self.unknown = loader.routes.keys() - buffers
        device = next((p.device for p in loader.parameters.values()), torch.device("cpu"))
        for name, p in policy.base_parameters().items():
            shape = tuple(p.shape)
            parts = _parts(policy, name, shape, device)
            self.unknown -= parts.keys()
            if loader.computed_from & parts.keys():
                self.computed.add(name)
            found = []
            for part, route, source in _sources(parts, loader.routes):
                piece = None if source is None else piece_of(replace(route, source=source), shape)
                if piece is None:
                    self.irregular[name] = f"copies {part} into {route.parameter} in a way that is no slice of it"
                else:
                    found.append(piece)
            if name not in self.irregular:
                self.pieces[name] = joined(found)

    def memory_of(self, piece: PlacedBox) -> Tensor:
        """Return the engine's memory that holds `piece`, a part of a parameter with one index range per dimension, as a
        view in the part's shape."""
        return piece.memory.of(self.loader.tensors[piece.parameter].data)


# --- routes as boxes --------------------------------------------------------------------------------------------------


def piece_of(route: Route, shape: Sequence[int]) -> PlacedBox | None:
    """Return the box of a parameter (one index range per dimension) that vLLM's loader copies, and where it is put.

    The copied view may have the parameter's dimensions in another order (transposed), several dimensions in place of
    one (heads), or one in place of several (flat).

    Args:
        route: one copy that vLLM's loader made; its source is a slice of the parameter.
        shape: the parameter's shape; the parameter is contiguous.

    Returns:
        The box and its place; None where the elements that are copied form no box.
    """
    source, memory = route.source, route.destination
    copied = zip(source.stride, source.shape, memory.stride, strict=True)
    rest = sorted((stride, size, own) for stride, size, own in copied if size > 1)  # innermost first
    box: list[tuple[int, int]] = []
    strides: list[int] = []
    unit = 1
    for length in reversed(shape):
        start, size, step = source.offset // unit % length, 1, 1
        while rest and size < length and rest[0][0] == unit * size:
            stride, count, own = rest.pop(0)
            room = length // size
            if count > room:  # goes on in the tensor's next dimension
                if length % size or count % room:
                    return None
                rest.insert(0, (stride * room, count // room, own * room))
                count = room
            if size > 1 and own != step * size:
                return None
            step, size = own if size == 1 else step, size * count
        if start + size > length:
            return None
        box.insert(0, (start, start + size))
        strides.insert(0, step)
        unit *= length
    sizes = tuple(stop - start for start, stop in box)
    return None if rest else PlacedBox(tuple(box), route.parameter, Slice(sizes, tuple(strides), memory.offset))


def _parts(policy: Policy, name: str, shape: tuple[int, ...], device: torch.device) -> Mapping[str, Tensor | None]:
    """Return the checkpoint tensors that one parameter is saved as, by name. The value is a tensor that has, for each
    element of the checkpoint tensor, its index in the flattened parameter.

    None in place of the indices says that the checkpoint tensor is the parameter itself. The indices take as much
    memory as the parameter in float32.

    Args:
        name: the parameter's name in the policy.
        shape: the parameter's shape.
        device: the device on which the indices are made.
    """
    if not policy.converts:
        return {name: None}
    like = torch.empty(shape, device="meta")
    parts = policy.checkpoint_parts(name, like)
    if all(part is like for part in parts.values()):  # renamed at most
        return dict.fromkeys(parts)
    dtype = torch.int32 if math.prod(shape) < 2**31 else torch.int64
    return policy.checkpoint_parts(name, torch.arange(math.prod(shape), dtype=dtype, device=device).view(shape))


def _sources(
    parts: Mapping[str, Tensor | None], routes: Mapping[str, Sequence[Route]]
) -> Iterator[tuple[str, Route, Slice | None]]:
    """Yield each copy that vLLM's loader made out of one parameter of the policy, with the slice of the parameter that
    was copied.

    Args:
        parts: the checkpoint tensors that the parameter is saved as, by name. The value is a tensor that has, for each
            element of the checkpoint tensor, its index in the flattened parameter; or None where the checkpoint tensor
            is the parameter itself.
        routes: all copies of vLLM's loader, by the name of the checkpoint tensor that they read.

    Yields:
        The checkpoint tensor's name, the copy, and the slice of the parameter; the slice is None where the copied
        elements form no strided slice of the parameter.
    """
    converted = []
    for part, index in parts.items():
        for route in routes.get(part, ()):
            if index is None:
                yield part, route, route.source
            else:
                converted.append((part, route, route.source.of(index)))
    for (part, route, _), source in zip(converted, _slices([taken for *_, taken in converted]), strict=True):
        yield part, route, source


def _slices(taken: Sequence[Tensor]) -> list[Slice | None]:
    """Return for each tensor of indices into a flattened parameter the strided slice of the parameter that covers just
    these indices in this order.

    None where the indices form no strided slice. Reads from the device twice, however many tensors there are.
    """
    if not taken:
        return []
    steps = [[tuple(int(d == k) for k in range(t.dim())) for d, n in enumerate(t.shape) if n > 1] for t in taken]
    probes = [t[at] for t, ends in zip(taken, steps, strict=True) for at in ((0,) * t.dim(), *ends)]
    values = iter(torch.stack(probes).tolist())
    found = []
    for t in taken:
        start = next(values)
        found.append(Slice(tuple(t.shape), tuple(next(values) - start if n > 1 else 1 for n in t.shape), start))
    equal = torch.stack([(_indices(part, t) == t).all() for part, t in zip(found, taken, strict=True)]).tolist()
    return [part if same else None for part, same in zip(found, equal, strict=True)]


def _indices(part: Slice, like: Tensor) -> Tensor:
    """Return for each element of a slice its index in the flattened tensor that the slice is taken from. The result has
    the slice's shape, and the dtype and device of `like`."""
    found = torch.full((), part.offset, dtype=like.dtype, device=like.device)
    for size, stride in zip(part.shape, part.stride, strict=True):
        found = found[..., None] + stride * torch.arange(size, dtype=like.dtype, device=like.device)
    return found


def joined(pieces: Iterable[PlacedBox]) -> list[PlacedBox]:
    """Join boxes of one parameter that are adjacent both in the parameter and in the engine's memory.

    A box is an index range per dimension, with its place in the engine.
    """
    found = list(pieces)
    for d in range(len(found[0].box) if found else 0):
        alike: defaultdict[object, list[PlacedBox]] = defaultdict(list)
        for piece in found:
            sizes = enumerate(zip(piece.memory.shape, piece.memory.stride, strict=True))
            strides = tuple(s for i, (n, s) in sizes if i != d and n > 1)  # a single index has none
            alike[piece.parameter, _with(piece.box, d), strides].append(piece)
        found = [run for group in alike.values() for run in _runs(group, d)]
    return sorted(found, key=lambda piece: (piece.parameter, piece.memory.offset))


def _runs(pieces: Sequence[PlacedBox], d: int) -> list[PlacedBox]:
    """Join adjacent boxes of a parameter, all of which have equal index ranges except in dimension `d`."""
    runs: list[PlacedBox] = []
    for piece in sorted(pieces, key=lambda p: (p.box[d], p.memory.offset)):
        longer = _continued(runs[-1], piece, d) if runs else None
        if longer is None:
            runs.append(piece)
        else:
            runs[-1] = longer
    return runs


def _continued(run: PlacedBox, piece: PlacedBox, d: int) -> PlacedBox | None:
    """Return two boxes of a parameter joined into one; None where they are not adjacent.

    Along dimension `d`, the second must begin where the first ends, in the parameter and in the engine's memory.

    Args:
        run: the first box.
        piece: the second box.
        d: the dimension in which they differ.
    """
    (start, end), (after, stop) = run.box[d], piece.box[d]
    stride, rest = divmod(piece.memory.offset - run.memory.offset, end - start)
    known = [p.memory.stride[d] for p in (run, piece) if p.memory.shape[d] > 1]
    if end != after or rest or stride <= 0 or any(other != stride for other in known):
        return None
    shape, strides = _with(run.memory.shape, d, stop - start), _with(run.memory.stride, d, stride)
    return PlacedBox(_with(run.box, d, (start, stop)), run.parameter, Slice(shape, strides, run.memory.offset))


def _with(values: tuple[Any, ...], d: int, *instead: Any) -> tuple[Any, ...]:
    """Return a copy of a tuple in which the values `instead` replace the value at index `d`. If there are none, the
    value is left out."""
    return (*values[:d], *instead, *values[d + 1 :])


# --- one region per parameter -----------------------------------------------------------------------------------------


class Places:
    """The strided regions of engine parameters that each hold the whole of one parameter of the policy.

    Must be made right after a load of the weights: a region counts only if its bits are now the parameter's.

    Attributes:
        found: the regions by the name of the policy's parameter.
        refused: the reasons, by name, for policy parameters that no region holds, and for engine parameters that were
            filled with something computed.
    """

    def __init__(self, policy: Policy, weights: WeightMap) -> None:
        self._map = weights
        self.found: dict[str, PlacedBox] = {}
        self.refused: dict[str, str] = {}
        parameters = policy.base_parameters()
        for name, p in parameters.items():
            pieces = weights.pieces.get(name, [])
            owners = {piece.parameter for piece in pieces}
            if name in weights.computed:
                self.refused[name] = "vLLM's loader computes from it what it keeps"
            elif name in weights.irregular:
                self.refused[name] = f"vLLM's loader {weights.irregular[name]}"
            elif len(owners) > 1:
                self.refused[name] = f"its parts lie in {len(owners)} engine parameters"
            elif [piece.memory.shape for piece in pieces] == [p.shape]:
                self.found[name] = pieces[0]
            elif pieces:
                self.refused[name] = f"it is no strided region of engine parameter {owners.pop()}"
        for name in sorted(weights.loader.unexplained):
            self.refused[f"engine parameter {name}"] = "it holds something that vLLM's loader computed"
        flags = [differ(self.view(name), parameters[name].detach()) for name in self.found]
        for name in flagged(list(self.found), flags):
            self.refused[name] = f"engine parameter {self.found.pop(name).parameter} holds other bits there"

    def view(self, name: str) -> Tensor:
        """Return the engine's memory that holds a parameter of the policy, as a view in the parameter's shape."""
        memory = self._map.memory_of(self.found[name])
        return memory.view(memory.shape) if memory.is_contiguous() else memory


# --- all of the engine's memory ---------------------------------------------------------------------------------------


def regions(model: torch.nn.Module, weights: WeightMap) -> Regions:
    """Return which boxes (one index range per dimension) of each weight this rank's engine memory holds, and where.

    Writing to all of these regions renews all weights of the engine.

    Args:
        model: vLLM's model.
        weights: the places in the model's memory of all boxes of the policy's parameters.

    Raises:
        EngineError: vLLM's loader copies something that is not a box, or the engine holds something that comes from no
            weight.
    """
    loader = weights.loader
    if loader.unexplained:
        raise EngineError(f"vLLM's loader computes what it writes into {listed(sorted(loader.unexplained))}")
    for reason in weights.irregular.values():
        raise EngineError(f"vLLM's loader {reason}")
    if weights.unknown:
        raise EngineError(f"the checkpoint's {min(weights.unknown)} comes from no parameter of the model in memory")
    covered: dict[str, list[Slice]] = {name: [] for name in loader.tensors}
    for piece in (piece for pieces in weights.pieces.values() for piece in pieces):
        covered[piece.parameter].append(piece.memory)
    for route in weights.buffers:  # an expert's bias may be a buffer there and a parameter here
        covered[route.parameter].append(route.destination)
    padding: list[Tensor] = []
    for name, parameter in loader.parameters.items():
        missing = parameter.numel() - sum(math.prod(s.shape) for s in covered[name])
        if missing:
            padded = missing > 0 and pads_rows(model, name)
            rows = list(_uncovered_rows(parameter.data, covered[name])) if padded else []
            if sum(view.numel() for view in rows) != missing or any(view.any() for view in rows):
                raise EngineError(f"{abs(missing)} elements of engine parameter {name} come from no weight, or twice")
            padding += rows
    found = {name: [Region(p.box, weights.memory_of(p)) for p in pieces] for name, pieces in weights.pieces.items()}
    return Regions({name: held for name, held in found.items() if held}, padding)


def _uncovered_rows(parameter: Tensor, covered: Sequence[Slice]) -> Iterator[Tensor]:
    """Yield views of the rows of an engine's matrix that none of the slices covers, one view per run of adjacent rows.

    Args:
        parameter: the engine's matrix.
        covered: slices of it; those that do not have whole rows are ignored.
    """
    starts = ((s.offset // parameter.stride(0), s.shape) for s in covered if s.shape[1:] == tuple(parameter.shape[1:]))
    free = 0
    for start, stop in [*sorted((at, at + shape[0]) for at, shape in starts), (parameter.shape[0],) * 2]:
        if start > free:
            yield parameter[free:start]
        free = max(free, stop)
