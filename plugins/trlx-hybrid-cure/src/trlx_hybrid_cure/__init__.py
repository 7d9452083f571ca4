"""CURE for trlx_hybrid: one model learns to write programs and the unit tests that judge them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .cure import CureReward, two_speakers
    from .sandbox import Sandbox

__all__ = ["CureReward", "Sandbox", "two_speakers"]


def __getattr__(name: str) -> Any:  # lazy: every process loads every plugin
    from importlib import import_module

    if name in __all__:
        return getattr(import_module(".sandbox" if name == "Sandbox" else ".cure", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
