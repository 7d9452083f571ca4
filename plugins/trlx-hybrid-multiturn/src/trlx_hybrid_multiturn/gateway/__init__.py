"""An endpoint with the APIs of OpenAI and Anthropic to the engine in the trainer: agents are trained as they are."""

from ..rollout_func import episode_reward

try:
    from .agents import agents
    from .command import command
except ModuleNotFoundError as missing:
    if missing.name not in ("starlette", "uvicorn"):
        raise
    raise ModuleNotFoundError(
        f"The endpoint for agents needs {missing.name}: pip install 'trlx-hybrid-multiturn[gateway]'."
    ) from missing

__all__ = ["agents", "command", "episode_reward"]
