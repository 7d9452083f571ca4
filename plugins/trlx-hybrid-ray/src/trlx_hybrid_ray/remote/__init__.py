"""Reward functions and environments of a TRL trainer, somewhere else: in Ray actors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .environment import EnvironmentLostError, RemoteEnvironments, remote_environment
    from .reward import RemoteReward, remote_reward

__all__ = ["EnvironmentLostError", "RemoteEnvironments", "RemoteReward", "remote_environment", "remote_reward"]


def __getattr__(name: str) -> Any:  # lazy: a script may import this before it knows whether it wants Ray
    from importlib import import_module

    if name in __all__:
        return getattr(import_module(".environment" if "nvironment" in name else ".reward", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
