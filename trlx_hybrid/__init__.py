"""Reinforcement-learning post-training on TRL and Accelerate, extended by pip-installable plugins.

Importing this package imports neither torch nor trl: the trainers are loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .config import HybridConfig
from .hookspecs import hookimpl

if TYPE_CHECKING:
    from .trainer import DistillationTrainer, GRPOTrainer, RLOOTrainer, hybrid

__all__ = ["DistillationTrainer", "GRPOTrainer", "HybridConfig", "RLOOTrainer", "hookimpl", "hybrid"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from . import trainer

        return getattr(trainer, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
