"""Whose error it was: what code of a plugin's component raises says so, and what to do about it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ..errors import ComponentError, HybridError

if TYPE_CHECKING:
    from .registry import Component


@contextmanager
def blaming(component: Component, method: str) -> Iterator[None]:
    """Inside, the method of a component that somebody else than this package offers is called.

    Raises:
        ComponentError: it raised; names the component, its plugin, the method and the way out.
    """
    try:
        yield
    except (HybridError, MemoryError):  # which say themselves what to do
        raise
    except Exception as error:
        if _out_of_memory(error):  # told by whoever counts memory
            raise
        told = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ComponentError(f"The {component} failed in `{method}`: {told}. {component.way_out}") from error


def _out_of_memory(error: Exception) -> bool:
    torch = sys.modules.get("torch")  # every process loads this module, and not all need torch
    return torch is not None and isinstance(error, torch.OutOfMemoryError)
