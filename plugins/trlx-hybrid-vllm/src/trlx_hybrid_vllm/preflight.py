"""What would make vLLM fail minutes later, found from the model's config before anything is built."""

from __future__ import annotations

from typing import Any

import torch
from trlx_hybrid.errors import did_you_mean
from trlx_hybrid.weights.policy import Policy

from .options import VLLMOptions

CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""vllm 0.31, `vllm/v1/attention/backends/cpu_attn.py`."""


def refuses(policy: Policy, world: int, options: VLLMOptions) -> str | None:
    """Why vLLM cannot serve this model with these options, and what to change; None where nothing speaks against it."""
    model = policy.base
    config = model.config.get_text_config()
    size = options.tensor_parallel_size
    heads = getattr(config, "num_attention_heads", None)
    if world % size:
        return f"tensor_parallel_size={size} does not divide the {world} processes. Choose one that does."
    if heads is not None and heads % size:
        return f"tensor_parallel_size={size} does not divide the model's {heads} attention heads. Choose one that does."
    return (
        policy.refuses_gather()
        or _architecture(policy.architecture, options)
        or _cpu(policy, heads)
        or _unknown_arguments(options)
    )


def _architecture(name: str, options: VLLMOptions) -> str | None:
    from vllm import ModelRegistry

    if options.model_impl != "vllm" or name in ModelRegistry.get_supported_archs():
        return None
    return f"vLLM has no model for {name}. Set vllm_model_impl='transformers', or engine='transformers'."


def _cpu(policy: Policy, heads: int | None) -> str | None:
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return None
    config = policy.base.config.get_text_config()
    head_size = getattr(config, "head_dim", None) or (config.hidden_size // heads if heads else None)
    if head_size is not None and head_size not in CPU_HEAD_SIZES:
        return f"vLLM's CPU attention has no kernel for head size {head_size}; it has {CPU_HEAD_SIZES}."
    if policy.has_experts:
        return (
            "on a CPU, vLLM repacks expert weights at an unchanged shape, so synced weights would be misread. "
            "Train mixture-of-experts models on a GPU, or with engine='transformers'."
        )
    return None


def _unknown_arguments(options: VLLMOptions) -> str | None:
    import dataclasses

    from vllm import EngineArgs

    known = {f.name for f in dataclasses.fields(EngineArgs)}
    for name in options.engine_args:
        if name not in known:
            return f"engine_args has {name!r}, which vllm.EngineArgs does not know.{did_you_mean(name, known)}"
    return None


def engine_dtype(options: VLLMOptions, policy: Policy, args: Any) -> torch.dtype:
    """What the engine computes in, see `VLLMOptions.dtype`."""
    if options.dtype != "auto":
        return getattr(torch, options.dtype)  # type: ignore[no-any-return]
    if policy.dtype is torch.float32:
        return torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else torch.float32
    return policy.dtype
