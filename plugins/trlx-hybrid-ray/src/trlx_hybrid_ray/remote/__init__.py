"""Reward functions and environments for a TRL trainer that run in Ray actors."""

from ..errors import EnvironmentLostError
from .environment import RemoteEnvironments, remote_environment
from .reward import RemoteReward, remote_reward

__all__ = ["EnvironmentLostError", "RemoteEnvironments", "RemoteReward", "remote_environment", "remote_reward"]
