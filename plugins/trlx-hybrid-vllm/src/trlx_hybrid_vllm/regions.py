"""The engine's memory as boxes of the policy's tensors, for weight paths that write into it themselves.

Whoever writes past vLLM's loader must know two things. Where each element lies: the routes that the loader took say so,
under tensor parallelism as well. And that the layers compute with what is written: some repack their weights or derive
others from them, at an unchanged shape. So only layers that are known to keep what was loaded are let through.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from trlx_hybrid.errors import EngineError, listed
from trlx_hybrid.protocols import Region, Regions
from trlx_hybrid.weights.policy import Policy

from .boxes import Box, Placed, elements, joined, placed
from .loading import Route, Slice, WeightLoader

KEEPS = {
    "ColumnParallelLinear",
    "MergedColumnParallelLinear",
    "QKVParallelLinear",
    "RowParallelLinear",
    "ReplicatedLinear",
    "GateLinear",
    "VocabParallelEmbedding",
    "ParallelLMHead",
    "RMSNorm",
    "GemmaRMSNorm",
    "RoutedExperts",
}
"""Layers of vLLM 0.31 that compute with the very tensors their loader filled, when nothing quantises them."""

UNQUANTISED = {"UnquantizedLinearMethod", "UnquantizedEmbeddingMethod", "UnquantizedFusedMoEMethod"}
EXPERTS_KEPT = {"TRITON", "BATCHED_TRITON"}
"""Of `UnquantizedMoeBackend`. The others swap, permute, transpose or repack the experts, most at an unchanged shape."""

PADDED = {"VocabParallelEmbedding", "ParallelLMHead"}


def refuses(model: torch.nn.Module) -> str | None:
    """Why the weights of this vLLM model must not be written past its loader, or None."""
    from vllm.distributed import get_pp_group
    from vllm.v1.attention.backend import AttentionImpl

    if get_pp_group().world_size > 1:
        return "the engine has pipeline stages, each with a part of the layers"
    if hasattr(model, "process_weights_after_loading"):
        return f"{type(model).__name__} derives something from its weights after loading them"
    for name, module in model.named_modules():
        kind, method = type(module).__name__, getattr(module, "quant_method", None)
        weighty = any(p is not None for p in module._parameters.values())
        if weighty and (kind not in KEEPS or not type(module).__module__.startswith("vllm.")):
            return f"{name} is a {kind}, which is not known to keep what was loaded"
        if weighty and method is not None and type(method).__name__ not in UNQUANTISED:
            return f"{name} keeps its weights in the form of {type(method).__name__}"
        if kind == "RoutedExperts" and (reason := _experts(module, method)) is not None:
            return f"{name} {reason}"
        if module is model or kind in UNQUANTISED:  # what such a method does to its layer is judged above
            continue
        if hasattr(module, "process_weights_after_loading"):
            impl: Any = getattr(module, "impl", None)
            after = getattr(type(impl), "process_weights_after_loading", None)
            if kind != "Attention" or (after is not AttentionImpl.process_weights_after_loading and _has_sinks(impl)):
                return f"{name} is a {kind}, which derives something from its weights after loading them"
    return None


def _experts(module: Any, method: Any) -> str | None:
    if module.use_ep:
        return "deals whole experts out to the ranks (expert parallelism), which has not been tried"
    backend = method.unquantized_backend
    if backend.name not in EXPERTS_KEPT:
        return (
            f"computes with the MoE backend {backend.value}, which lays the experts out anew; on a GPU, "
            "engine_args={'moe_backend': 'triton'} in engine_options chooses one that does not"
        )
    return None


def _has_sinks(impl: Any) -> bool:
    """FlashInfer's attention converts its sinks after loading, and nothing else; other backends are unknown."""
    return type(impl).__name__ != "FlashInferImpl" or getattr(impl, "sinks", None) is not None


def regions(model: torch.nn.Module, loader: WeightLoader, policy: Policy) -> Regions:
    """The boxes that the routes of a load are; nothing of the engine's weights is left out.

    Where the policy keeps other tensors in memory than in its checkpoint, as fused experts are, its own conversion is
    run over a tensor of indices: what it makes of them tells which elements vLLM's loader was given.

    Raises:
        EngineError: a weight is copied in a way that is no box, or something in the engine comes from no weight.
    """
    if loader.unexplained:
        raise EngineError(f"vLLM's loader computes what it writes into {listed(sorted(loader.unexplained))}")
    found: dict[str, list[Region]] = {}
    covered: dict[str, list[Slice]] = {name: [] for name in loader.tensors}
    unknown = loader.routes.keys() - policy.buffers().keys()  # those the engine brings itself
    for name, p in policy.base_parameters().items():
        pieces: list[Placed] = []
        for part, index in _parts(policy, name, tuple(p.shape), _device(loader)).items():
            unknown.discard(part)
            pieces += _pieces(part, loader.routes.get(part, ()), index, tuple(p.shape))
        for piece in joined(pieces):
            memory = piece.memory.of(loader.tensors[piece.parameter].data)
            found.setdefault(name, []).append(Region(piece.box, memory))
            covered[piece.parameter].append(piece.memory)
    if unknown:
        raise EngineError(f"the checkpoint's {min(unknown)} comes from no parameter of the model in memory")
    padding: list[Tensor] = []
    for name, parameter in loader.parameters.items():
        kind = type(model.get_submodule(name.rpartition(".")[0])).__name__
        missing = parameter.numel() - sum(math.prod(s.shape) for s in covered[name])
        if missing:
            rows = list(_uncovered_rows(parameter.data, covered[name])) if kind in PADDED and missing > 0 else []
            if sum(view.numel() for view in rows) != missing or any(view.any() for view in rows):
                raise EngineError(f"{abs(missing)} elements of engine parameter {name} come from no weight, or twice")
            padding += rows
    return Regions(found, padding)


def _device(loader: WeightLoader) -> torch.device:
    return next((p.device for p in loader.parameters.values()), torch.device("cpu"))


def _parts(policy: Policy, name: str, shape: tuple[int, ...], device: torch.device) -> Mapping[str, Tensor | None]:
    """The checkpoint's tensors that one parameter becomes: flat indices into it, or None for the parameter itself.

    The indices of one fused tensor take as much memory as the tensor in float32, until the next one's are made.
    """
    if not policy.converts:
        return {name: None}
    like = torch.empty(shape, device="meta")
    parts = policy.checkpoint_parts(name, like)
    if all(part is like for part in parts.values()):  # renamed at most
        return dict.fromkeys(parts)
    dtype = torch.int32 if math.prod(shape) < 2**31 else torch.int64
    return policy.checkpoint_parts(name, torch.arange(math.prod(shape), dtype=dtype, device=device).view(shape))


def _pieces(name: str, routes: Sequence[Route], index: Tensor | None, shape: tuple[int, ...]) -> list[Placed]:
    """The routes of one tensor of the checkpoint as boxes of a parameter of that shape."""
    taken = [] if index is None else [route.source.of(index) for route in routes]
    boxes = [_box(route.source, shape) for route in routes] if index is None else _boxes(taken, shape)
    found = []
    for route, box in zip(routes, boxes, strict=True):
        piece = None if box is None else placed(box, route.parameter, route.destination)
        if piece is None:
            raise EngineError(f"vLLM's loader copies {name} into {route.parameter} in a way that is no slice of it")
        found.append(piece)
    return found


def _box(source: Slice, shape: tuple[int, ...]) -> Box | None:
    """The box that a slice of a contiguous tensor is."""
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    box = []
    rest = source.offset
    if len(source.shape) == len(shape):
        for size, length, stride, own in zip(source.shape, shape, strides, source.stride, strict=True):
            start, rest = divmod(rest, stride)
            if start + size <= length and (size == 1 or stride == own):
                box.append((start, start + size))
    return tuple(box) if len(box) == len(shape) else None


def _boxes(taken: Sequence[Tensor], shape: tuple[int, ...]) -> list[Box | None]:
    """The boxes whose elements have these flat indices, in their order; read from the device twice, however many."""
    if not taken:
        return []
    corners = torch.stack([torch.stack([t.reshape(-1)[0], t.reshape(-1)[-1]]) for t in taken]).tolist()
    boxes = [_between(first, last, shape) for first, last in corners]
    fitting = [box is not None and elements(box) == t.numel() for box, t in zip(boxes, taken, strict=True)]
    equal = [
        (_indices(box, shape, t) == t.reshape(-1)).all()
        if fits and box is not None
        else t.new_zeros((), dtype=torch.bool)
        for box, t, fits in zip(boxes, taken, fitting, strict=True)
    ]
    return [box if same else None for box, same in zip(boxes, torch.stack(equal).tolist(), strict=True)]


def _between(first: int, last: int, shape: tuple[int, ...]) -> Box | None:
    """The box that begins and ends with these elements."""
    box = []
    for d in range(len(shape)):
        step = math.prod(shape[d + 1 :])
        (start, first), (end, last) = divmod(first, step), divmod(last, step)
        box.append((start, end + 1))
    return tuple(box) if all(start < stop for start, stop in box) else None


def _indices(box: Box, shape: tuple[int, ...], like: Tensor) -> Tensor:
    """The flat indices of a box's elements, in order."""
    found = torch.zeros((), dtype=like.dtype, device=like.device)
    for d, (start, stop) in enumerate(box):
        step = math.prod(shape[d + 1 :])
        found = found[..., None] + step * torch.arange(start, stop, dtype=like.dtype, device=like.device)
    return found.reshape(-1)


def _uncovered_rows(parameter: Tensor, covered: Sequence[Slice]) -> Iterator[Tensor]:
    """The runs of rows of a matrix that no slice of whole rows has."""
    free = torch.ones(parameter.shape[0], dtype=torch.bool)
    for part in covered:
        if part.shape[1:] == tuple(parameter.shape[1:]):
            start = part.offset // parameter.stride(0)
            free[start : start + part.shape[0]] = False
    edges = torch.diff(free.int(), prepend=torch.zeros(1, dtype=torch.int), append=torch.zeros(1, dtype=torch.int))
    starts, stops = (edges == 1).nonzero()[:, 0].tolist(), (edges == -1).nonzero()[:, 0].tolist()
    for start, stop in zip(starts, stops, strict=True):
        yield parameter[start:stop]
