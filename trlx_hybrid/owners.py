"""Whose tensors are whose, down to the storages that hold the bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def plain_tensors(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """The strided tensors that hold the bytes: of a DTensor its local one, of a quantised one all its parts."""
    for tensor in tensors:
        if is_traceable_wrapper_subclass(tensor):
            parts = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
            yield from plain_tensors(part for part in parts if isinstance(part, Tensor))
        elif tensor.layout == torch.strided:
            yield tensor


def storages(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    """Their distinct storages, in order."""
    found = (tensor.untyped_storage() for tensor in plain_tensors(tensors))
    return list({storage._cdata: storage for storage in found}.values())


def policy_tensors(module: nn.Module) -> Iterator[Tensor]:
    """Parameters and buffers."""
    yield from module.parameters()
    yield from module.buffers()


def gradient_tensors(module: nn.Module) -> Iterator[Tensor]:
    """The gradients that exist."""
    return (p.grad for p in module.parameters() if p.grad is not None)


def optimizer_tensors(optimizer: Any) -> Iterator[Tensor]:
    """All tensors in the state of an optimizer, which accelerate may have wrapped."""
    return _nested(list(unwrapped(optimizer).state.values()))


def unwrapped(optimizer: Any) -> Any:
    """The torch optimizer inside accelerate's."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def _nested(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _nested(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _nested(item)
