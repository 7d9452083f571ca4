"""Where each parameter of the policy lives in vLLM's memory.

vLLM fuses, pads and slices what it loads. The routes that its own loader took (`loading`) say where every slice of a
checkpoint tensor went; here they are joined into one strided region per parameter of the policy, so that the parameter
can be a view of the engine's memory, or be copied into it in one launch. No table of model names is involved, and
nothing is believed: a region counts only if the bits in it are the parameter's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from trlx_hybrid.weights.policy import Policy

from .loading import Route, Slice, WeightLoader, differ


@dataclass(frozen=True, slots=True)
class Place:
    """The region of an engine parameter that holds one parameter of the policy, element for element."""

    parameter: str
    region: Slice


@dataclass(frozen=True, slots=True)
class Piece:
    """An affine part of the map: `shape` elements, strided in the flat policy parameter and in the engine's."""

    shape: tuple[int, ...]
    source_offset: int
    source_stride: tuple[int, ...]
    offset: int
    stride: tuple[int, ...]

    def locate(self, flat: int) -> int | None:
        """Where element `flat` of the policy's parameter lies in the engine's, or None if this piece has it not."""
        rest, found = flat - self.source_offset, self.offset
        order = sorted(range(len(self.shape)), key=lambda d: -self.source_stride[d])
        for d in order:
            if self.shape[d] == 1:
                continue
            index = rest // self.source_stride[d] if self.source_stride[d] else 0
            if not 0 <= index < self.shape[d]:
                return None
            rest -= index * self.source_stride[d]
            found += index * self.stride[d]
        return found if rest == 0 else None

    @property
    def last(self) -> int:
        """The flat index of this piece's far corner."""
        return self.source_offset + sum((n - 1) * s for n, s in zip(self.shape, self.source_stride, strict=True))


def joined(shape: Sequence[int], pieces: Sequence[Piece]) -> Slice | None:
    """The one strided region of `shape` that all pieces are part of, or None where there is none.

    A pure function. Each piece is affine in the flat index, so a region that agrees with it at its first element, one
    step along each dimension and at its far corner agrees with it everywhere.
    """
    if sum(math.prod(p.shape) for p in pieces) != math.prod(shape):
        return None
    unit = _contiguous(shape)

    def find(flat: int) -> int | None:
        return next((at for p in pieces if (at := p.locate(flat)) is not None), None)

    offset = find(0)
    steps = [find(unit[d]) if n > 1 else offset for d, n in enumerate(shape)]
    if offset is None or any(step is None for step in steps):
        return None
    stride = tuple(step - offset if n > 1 else u for step, n, u in zip(steps, shape, unit, strict=True))  # type: ignore[operator]
    if any(s <= 0 for s in stride):  # backward or twice the same memory: torch has no such view to write to
        return None
    region = Slice(tuple(shape), stride, offset)

    def expected(flat: int) -> int:
        at = offset
        for n, u, s in zip(shape, unit, stride, strict=True):
            at += flat // u % n * s
        return at

    for p in pieces:
        probes = [p.source_offset, p.last]
        probes += [p.source_offset + s for n, s in zip(p.shape, p.source_stride, strict=True) if n > 1]
        if any(expected(flat) != p.locate(flat) for flat in probes):
            return None
    return region


class Places:
    """The regions of all parameters of a policy.

    Attributes:
        found: by in-memory name of the parameter.
        refused: parameters that no strided region holds, and engine parameters filled with something else, with the
            reason.
        unused: parameters that vLLM's loader did not look into.
    """

    def __init__(self, policy: Policy, loader: WeightLoader) -> None:
        self._engine = loader.tensors
        self.found: dict[str, Place] = {}
        self.refused: dict[str, str] = {}
        self.unused: list[str] = []
        for name, p in policy.base_parameters().items():
            used = list(_pieces(policy, name, p, loader.routes))
            owners = {route.parameter for _, route in used}
            if any(part in loader.computed_from for part in _part_names(policy, name, p)):
                self.refused[name] = "vLLM's loader computes from it what it keeps"
            elif not used:
                self.unused.append(name)
            elif len(owners) > 1:
                self.refused[name] = f"its parts lie in {len(owners)} engine parameters"
            else:
                self._place(name, p, owners.pop(), [piece for piece, _ in used])
        for name in sorted(loader.unexplained):
            self.refused[f"engine parameter {name}"] = "it holds something that vLLM's loader computed"
        self._refuse_other_bits(policy)

    def view(self, name: str) -> Tensor:
        """The engine's memory of a parameter, shaped like it."""
        place = self.found[name]
        return place.region.of(self._engine[place.parameter].data)

    def _place(self, name: str, p: Tensor, owner: str, pieces: Sequence[Piece]) -> None:
        region = joined(tuple(p.shape), pieces)
        if region is None:
            self.refused[name] = f"it is no strided region of engine parameter {owner}"
        else:
            self.found[name] = Place(owner, region)

    def _refuse_other_bits(self, policy: Policy) -> None:
        """Fail closed: a region whose bits differ from the parameter's, right after a load, is none."""
        parameters = policy.base_parameters()
        names = list(self.found)
        flags = [differ(self.view(name), parameters[name].detach()) for name in names]
        for name, differs in zip(names, torch.stack(flags).tolist() if flags else [], strict=True):
            if differs:
                place = self.found.pop(name)
                self.refused[name] = f"engine parameter {place.parameter} holds other bits there"


def _part_names(policy: Policy, name: str, p: Tensor) -> Iterable[str]:
    """The checkpoint tensors that one parameter becomes."""
    if not policy.converts:
        return (name,)
    return policy.checkpoint_parts(name, torch.empty_like(p, device="meta"))


def _pieces(
    policy: Policy, name: str, p: Tensor, routes: Mapping[str, Sequence[Route]]
) -> Iterator[tuple[Piece, Route]]:
    """Each route that starts in a part of this parameter, in terms of the parameter's own flat index."""
    if not policy.converts:
        for route in routes.get(name, ()):
            to, source = route.destination, route.source
            yield Piece(source.shape, source.offset, source.stride, to.offset, to.stride), route
        return
    # The conversion between memory and checkpoint is code: what it does to the indices tells what it does to weights.
    dtype = torch.int32 if p.numel() < 2**31 else torch.int64
    index = torch.arange(p.numel(), dtype=dtype, device=p.device).view(p.shape)
    for part, origin in policy.checkpoint_parts(name, index).items():
        for route in routes.get(part, ()):
            to, part_of = route.destination, route.source.of(origin)
            wide = [d for d, n in enumerate(part_of.shape) if n > 1]
            probes = [(0,) * part_of.dim(), *(tuple(int(d == k) for k in range(part_of.dim())) for d in wide)]
            start, *ends = torch.stack([part_of[probe] for probe in probes]).tolist()
            steps = dict(zip(wide, (end - start for end in ends), strict=True))
            stride = tuple(steps.get(d, 0) for d in range(part_of.dim()))
            yield Piece(tuple(part_of.shape), start, stride, to.offset, to.stride), route


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return tuple(reversed(strides))
