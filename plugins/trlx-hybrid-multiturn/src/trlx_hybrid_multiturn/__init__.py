"""Asynchronous multi-turn rollouts for trlx_hybrid: trajectories advance independently, in the trainer's process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .environment import Environment, Step
    from .rollout_func import episode_reward, episodes

__all__ = ["Environment", "Step", "episode_reward", "episodes"]


def __getattr__(name: str) -> Any:  # lazy: every process loads every plugin
    from importlib import import_module

    if name in ("Environment", "Step"):
        return getattr(import_module(".environment", __name__), name)
    if name in __all__:
        return getattr(import_module(".rollout_func", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
