"""Positions that engine and trainer would scale differently, for rows that are longer than the model was made for."""

from __future__ import annotations

import os
from typing import Any

from trlx_hybrid.policy.positions import YARN, beyond_positions


def refuses_positions(config: Any, longest: int | None) -> str | None:
    """Return why the engine's positions would not be the trainer's, and what to change; None where they are.

    vLLM scales some kinds of rotary positions by the longest sequence that it may have, and transformers by the length
    of a batch. Those of rope_type "yarn", "linear" and "llama3" depend on neither.

    Args:
        config: the config of a language model.
        longest: the longest prompt plus completion, in tokens; None for what the model supports.
    """
    rotary = getattr(config, "rope_parameters", None) or {}
    of_layers = [*rotary.values()]  # where kinds of layers have positions of their own
    scales = [of for of in (rotary, *of_layers) if isinstance(of, dict) and "rope_type" in of]
    kinds, native = {of["rope_type"] for of in scales}, getattr(config, "max_position_embeddings", None)
    if "dynamic" in kinds:
        return (
            "its positions are dynamic: transformers scales them by the length of a batch, and vLLM by the longest row "
            f"that it may get. Give the model's config {YARN}, or take engine='transformers'."
        )
    if longest is None or native is None or os.environ.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "0") not in ("", "0"):
        return None
    short = min((of.get("original_max_position_embeddings") or native for of in scales), default=native)
    if "longrope" in kinds and longest > short:
        return (
            f"vllm_max_model_length={longest} is more than {short}, beyond which its longrope positions have other "
            f"factors: vLLM would use them for all rows, and transformers for long batches. Lower it to {short}."
        )
    return beyond_positions(config, longest, "vllm_max_model_length")
