"""The dtype to which autocast casts matrix products, also on the meta device, which torch's autocast does not know."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

META = "meta"

CAST = {torch.nn.functional.linear, torch.matmul, torch.bmm, torch._grouped_mm, torch.nn.functional.grouped_mm}
"""The products that autocast casts, and layers of transformers compute."""

_on_meta: ContextVar[torch.dtype | None] = ContextVar("autocast_on_meta", default=None)


def autocast_now(device: str) -> tuple[bool, torch.dtype]:
    """Return whether autocast is on for a type of device, and the dtype to which it casts."""
    if device == META:
        dtype = _on_meta.get()
        return dtype is not None, dtype or torch.float32
    return torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)


@contextmanager
def autocast_on_meta(dtype: torch.dtype | None) -> Iterator[None]:
    """Return a context in which matrix products compute in `dtype` on the meta device, as under autocast; None leaves
    them as they are."""
    token = _on_meta.set(dtype)
    try:
        if dtype is None:
            yield
        else:
            with _Casting(dtype):
                yield
    finally:
        _on_meta.reset(token)


class _Casting(TorchFunctionMode):
    """A mode in which matrix products cast their arguments.

    Args:
        dtype: the dtype to which it casts.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in CAST:
            args = [arg.to(self._dtype) if _is_number(arg) else arg for arg in args]
        return func(*args, **(kwargs or {}))


def _is_number(given: Any) -> bool:
    return isinstance(given, Tensor) and given.is_floating_point()
