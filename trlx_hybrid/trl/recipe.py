"""TRL's classes and functions that a recipe (a YAML file that describes a run) names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import trl
import trl.rewards

from .trainer import GRPOTrainer, RLOOTrainer

SCRIPT_ARGUMENTS, MODEL_CONFIG = trl.ScriptArguments, trl.ModelConfig
REWARDS: dict[str, Callable[..., Any]] = {
    "accuracy_reward": trl.rewards.accuracy_reward,
    "reasoning_accuracy_reward": trl.rewards.reasoning_accuracy_reward,
    "think_format_reward": trl.rewards.think_format_reward,
    "get_soft_overlong_punishment": trl.rewards.get_soft_overlong_punishment(1280, 256),
}
"""Reward functions by the names that TRL's own command line gives them."""


class Trained(NamedTuple):
    """The classes that a recipe's setting `trainer` selects: this package's trainer, TRL's trainer below it, and TRL's
    config."""

    trainer: type[Any]
    base: type[Any]
    config: type[Any]


TRAINED_BY = {
    "grpo": Trained(GRPOTrainer, trl.GRPOTrainer, trl.GRPOConfig),
    "rloo": Trained(RLOOTrainer, trl.RLOOTrainer, trl.RLOOConfig),
}


def model_arguments(model: Any, args: Any) -> dict[str, Any]:
    """Return the trainer arguments `peft_config` and `quantization_config` that TRL's `ModelConfig` specifies, and put
    its settings for loading the model into `args.model_init_kwargs`.

    Args:
        model: a `trl.ModelConfig`.
        args: the run's `GRPOConfig` or `RLOOConfig`.
    """
    said = {
        "revision": model.model_revision,
        "trust_remote_code": args.trust_remote_code,
        "attn_implementation": model.attn_implementation,
        "dtype": model.dtype,
    }
    args.model_init_kwargs = said | (args.model_init_kwargs or {})
    return {
        "peft_config": trl.get_peft_config(model),
        "quantization_config": trl.get_quantization_config(model),
    }
