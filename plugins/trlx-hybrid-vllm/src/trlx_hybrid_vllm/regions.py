"""The engine's memory as boxes of the checkpoint's tensors, for weight paths that write into it themselves.

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
from trlx_hybrid.errors import EngineError
from trlx_hybrid.protocols import Region, Regions

from .loading import Route, Slice, WeightLoader

KEEPS = {
    "ColumnParallelLinear",
    "MergedColumnParallelLinear",
    "QKVParallelLinear",
    "RowParallelLinear",
    "ReplicatedLinear",
    "VocabParallelEmbedding",
    "ParallelLMHead",
    "RMSNorm",
    "GemmaRMSNorm",
}
"""Layers of vLLM 0.31 that compute with the very tensors their loader filled, when nothing quantises them."""

UNQUANTISED = {"UnquantizedLinearMethod", "UnquantizedEmbeddingMethod"}
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
        if module is not model and hasattr(module, "process_weights_after_loading"):
            impl: Any = getattr(module, "impl", None)
            after = getattr(type(impl), "process_weights_after_loading", None)
            if kind != "Attention" or (after is not AttentionImpl.process_weights_after_loading and _has_sinks(impl)):
                return f"{name} is a {kind}, which derives something from its weights after loading them"
    return None


def _has_sinks(impl: Any) -> bool:
    """FlashInfer's attention converts its sinks after loading, and nothing else; other backends are unknown."""
    return type(impl).__name__ != "FlashInferImpl" or getattr(impl, "sinks", None) is not None


def regions(model: torch.nn.Module, loader: WeightLoader, shapes: Mapping[str, tuple[int, ...]]) -> Regions:
    """The boxes that the routes of a load are; nothing of the engine's weights is left out.

    Args:
        shapes: of the checkpoint's tensors, in full.

    Raises:
        EngineError: a weight is copied in a way that is no box, or something in the engine comes from no weight.
    """
    found: dict[str, list[Region]] = {}
    covered: dict[str, list[Slice]] = {name: [] for name in loader.parameters}
    for name, routes in loader.routes.items():
        if name not in shapes:
            raise EngineError(f"the checkpoint's {name} is no parameter of the model in memory")
        found[name] = [_region(name, route, shapes[name], loader.parameters[route.parameter]) for route in routes]
        for route in routes:
            covered[route.parameter].append(route.destination)
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


def _region(name: str, route: Route, shape: tuple[int, ...], parameter: Tensor) -> Region:
    source = route.source
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    box = []
    rest = source.offset
    if len(source.shape) == len(shape):
        for size, length, stride, own in zip(source.shape, shape, strides, source.stride, strict=True):
            start, rest = divmod(rest, stride)
            if start + size <= length and (size == 1 or stride == own):
                box.append((start, start + size))
    if len(box) != len(shape):
        raise EngineError(f"vLLM's loader copies {name} into {route.parameter} in a way that is no slice of it")
    return Region(tuple(box), route.destination.of(parameter.data))


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
