"""An endpoint with the APIs of OpenAI and Anthropic to the engine in the trainer: agents are trained as they are."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..rollout_func import episode_reward
    from .agent_rollout import agents
    from .boxes import sandbox
    from .program import command

__all__ = ["agents", "command", "episode_reward", "sandbox"]
HOMES = {
    "agents": ".agent_rollout",
    "command": ".program",
    "episode_reward": "..rollout_func",
    "sandbox": ".boxes",
}
"""The module that each name comes from."""


def __getattr__(name: str) -> Any:  # lazy: processes in which agents run need neither torch nor transformers
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(HOMES[name], __name__), name)
    except ModuleNotFoundError as missing:
        if missing.name not in ("starlette", "uvicorn"):
            raise
        raise ModuleNotFoundError(
            f"The endpoint for agents needs {missing.name}: pip install 'trlx-hybrid-multiturn[gateway]'."
        ) from missing


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
