"""TRL's classes and functions that the other modules of this folder use without importing TRL themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import trl
import trl.trainer.utils
from trl.chat_template_utils import add_response_schema, parse_response
from trl.models.utils import disable_gradient_checkpointing

from .state import Borrowed

GENERATING = (trl.GRPOTrainer, trl.RLOOTrainer, trl.DistillationTrainer)
"""The trainers of TRL that sample completions, which `hybrid` extends."""

SCORED_BESIDE = ("ref_model", "teacher_model")
"""Attributes of TRL's trainers that hold other models that score the same rows as the policy."""

OWN_ENGINE = {"SDPOTrainer", "SDFTTrainer", "GOLDTrainer", "IWOPDTrainer"}
"""Experimental trainers of TRL that build a VLLMGeneration of their own, which this package cannot replace."""

BORROWED = Borrowed(
    parse_response=parse_response,
    without_checkpointing=lambda trainer: disable_gradient_checkpointing(
        trainer.model, trainer.args.gradient_checkpointing_kwargs
    ),
    head=trl.trainer.utils,
)


def assistant_message(tokenizer: Any, token_ids: list[int], prefix: list[int], tools: Sequence[Any]) -> dict[str, Any]:
    """Parse the ids that a model generated into an assistant message as TRL does, with its tool calls.

    Args:
        token_ids: the generated ids.
        prefix: all ids before them.
        tools: the functions that the model may call.
    """
    if getattr(tokenizer, "response_template", None) is None:
        add_response_schema(tokenizer)
    message: dict[str, Any] = parse_response(tokenizer, token_ids, prefix=prefix, tools=list(tools))
    return message
