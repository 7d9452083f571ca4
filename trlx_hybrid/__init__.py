"""Reinforcement-learning post-training on TRL and Accelerate, extended by pip-installable plugins.

Importing this package imports neither torch nor trl: trainers and engine are loaded on first use, and only the
trainers bring trl.
"""

from __future__ import annotations

import gc
import importlib
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from . import _moved
from .config import HybridConfig
from .contract.types import Layout
from .memory.heap import freeze_imports
from .notices import named_when_long
from .plugins.hookspecs import hookimpl

if TYPE_CHECKING:
    from .own_loop.hybrid_engine import HybridEngine
    from .trl.trainer import DistillationTrainer, GRPOTrainer, RLOOTrainer, TrlParser, hybrid

__all__ = [
    "DistillationTrainer",
    "GRPOTrainer",
    "HybridConfig",
    "HybridEngine",
    "Layout",
    "RLOOTrainer",
    "TrlParser",
    "hookimpl",
    "hybrid",
]


_moved.install()


def _worth_telling(record: logging.LogRecord) -> bool:
    """Return False for vLLM's warning about Triton where torch was built for CPUs: Triton has no use there."""
    import torch

    accelerated = torch.version.cuda or torch.version.hip or torch.version.xpu
    return bool(accelerated) or not record.getMessage().startswith("Triton is installed, but")


# Here, since TRL imports vLLM, which warns then, before any plugin is loaded.
logging.getLogger("vllm.triton_utils.importing").addFilter(_worth_telling)


@contextmanager
def _importing(what: str) -> Iterator[None]:
    """A context for an import of the training stack: a line says so where it takes long, and garbage is not collected
    meanwhile. That would make the import a sixth slower, and free little, since almost all that imports create
    stays."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        with named_when_long(f"importing {what}"):
            yield
    finally:
        if was_on:
            gc.enable()
    freeze_imports()


def __getattr__(name: str) -> Any:
    if name in __all__:
        own_loop = name == "HybridEngine"
        module = f"{__name__}.own_loop.hybrid_engine" if own_loop else f"{__name__}.trl.trainer"
        what = "transformers" if own_loop else "TRL, transformers and vLLM"
        with nullcontext() if module in sys.modules else _importing(what):
            return getattr(importlib.import_module(module), name)  # waits where another thread imports it
    if f"{__name__}.{name}" in _moved.MOVED:  # without an import of its own: another module had imported it
        return globals().setdefault(name, _moved.module(f"{__name__}.{name}"))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
