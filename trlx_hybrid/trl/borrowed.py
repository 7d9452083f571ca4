"""TRL's classes and functions that this package uses, by name: with trainer.py and attach.py, the files that import
trl."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import trl
import trl.rewards
import trl.trainer.utils
from trl.chat_template_utils import add_response_schema, parse_response
from trl.models.utils import disable_gradient_checkpointing

from .state import Borrowed

GENERATING = (trl.GRPOTrainer, trl.RLOOTrainer, trl.DistillationTrainer)
SCORED_BESIDE = ("ref_model", "teacher_model")
"""Attributes of TRL's trainers that hold other models that score the same rows as the policy."""

OWN_ENGINE = {"SDPOTrainer", "SDFTTrainer", "GOLDTrainer", "IWOPDTrainer"}
"""Experimental trainers of TRL that build a VLLMGeneration of their own, which this package cannot replace."""
SCRIPT_ARGUMENTS, MODEL_CONFIG = trl.ScriptArguments, trl.ModelConfig
REWARDS: dict[str, Callable[..., Any]] = {
    "accuracy_reward": trl.rewards.accuracy_reward,
    "reasoning_accuracy_reward": trl.rewards.reasoning_accuracy_reward,
    "think_format_reward": trl.rewards.think_format_reward,
    "get_soft_overlong_punishment": trl.rewards.get_soft_overlong_punishment(1280, 256),
}
"""Reward functions by the names that TRL's own command line gives them."""

BORROWED = Borrowed(
    parse_response=parse_response,
    without_checkpointing=lambda trainer: disable_gradient_checkpointing(
        trainer.model, trainer.args.gradient_checkpointing_kwargs
    ),
    head=trl.trainer.utils,
)


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


def assistant_message(tokenizer: Any, token_ids: list[int], prefix: list[int], tools: Sequence[Any]) -> dict[str, Any]:
    """Parse the ids that a model generated into an assistant message as TRL does, with its tool calls.

    Args:
        token_ids: the generated ids.
        prefix: all ids before them.
        tools: the functions that the model may call.
    """
    if getattr(tokenizer, "response_template", None) is None:
        add_response_schema(tokenizer)
    return parse_response(tokenizer, token_ids, prefix=prefix, tools=list(tools))  # type: ignore[no-any-return]
