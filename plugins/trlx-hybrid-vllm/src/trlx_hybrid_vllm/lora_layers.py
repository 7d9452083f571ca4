"""The LoRA layers of a PEFT policy, and what about them vLLM cannot serve."""

from __future__ import annotations

import sys
from typing import Any

import torch
from trlx_hybrid.weights.policy import Policy, unwrapped_name

UNSERVED = {
    "use_dora": "DoRA scales the merged weight, which no LoRA slot holds",
    "modules_to_save": "it trains whole modules beside the LoRA layers",
    "trainable_token_indices": "it trains rows of the embeddings",
    "target_parameters": "it adapts fused expert parameters, not layers",
    "lora_bias": "vLLM's slots have no bias",
    "layer_replication": "it repeats layers that share base weights",
    "alora_invocation_tokens": "an activated LoRA starts in the middle of a sequence",
    "arrow_config": "Arrow routes each token between adapters",
}
"""Fields of LoraConfig that change what an adapter computes; other variants are found on the layers themselves."""


def lora_layers(policy: Policy) -> dict[str, Any]:
    """PEFT's LoRA layers by the in-memory name of the module each adapts, in model order."""
    if "peft" not in sys.modules:  # a PEFT model cannot exist without it, and importing it takes a second
        return {}
    from peft.tuners.lora.layer import LoraLayer

    found = {}
    for name, module in policy.base.named_modules():
        if isinstance(module, LoraLayer):
            found[unwrapped_name(name)] = module
    return found


def active_adapters(layers: dict[str, Any]) -> list[str]:
    """Names of the adapters that are active in some layer that has them, sorted."""
    return sorted({a for layer in layers.values() for a in layer.active_adapters if a in layer.r})


def unserved(policy: Policy, dtype: torch.dtype | None) -> str | None:
    """Why vLLM's LoRA slots cannot hold what this policy trains, or None.

    Args:
        policy: the live policy.
        dtype: what the engine will compute in; None where that is not known yet.
    """
    if not policy.adapters:
        return "the policy is not a PEFT model: there is no adapter to serve"
    return _config(policy) or _layers(policy) or _sharding(policy) or _engine(policy, dtype)


def _config(policy: Policy) -> str | None:
    configs: dict[str, Any] = policy.module.peft_config  # type: ignore[assignment]
    for name, config in configs.items():
        kind = getattr(config.peft_type, "value", config.peft_type)
        if kind != "LORA":
            return f"adapter {name!r} is of type {kind}; vLLM serves LoRA"
    active = active_adapters(lora_layers(policy))
    if len(active) != 1:
        return f"{len(active)} adapters are active ({', '.join(active)}); vLLM applies one. Use `set_adapter`"
    config = configs[active[0]]
    if config.bias != "none":
        return f"adapter {active[0]!r} trains biases of the base (bias={config.bias!r})"
    for field, why in UNSERVED.items():
        if getattr(config, field):
            return f"adapter {active[0]!r} has {field}: {why}"
    return None


def _layers(policy: Policy) -> str | None:
    from peft.tuners.lora.layer import Linear
    from peft.utils.other import AuxiliaryTrainingWrapper

    for name, module in policy.base.named_modules():
        if isinstance(module, AuxiliaryTrainingWrapper):
            return f"{name} is trained as a whole ({type(module).__name__})"
    layers = lora_layers(policy)
    (adapter,) = active_adapters(layers)
    head = policy.base.get_output_embeddings()
    for name, layer in layers.items():
        if type(layer) is not Linear:  # subclasses compute something else: quantised, sharded or adaptive layers
            return f"{name} is adapted by PEFT's {type(layer).__name__} layer; vLLM's slots hold plain linear ones"
        if layer is head:
            return f"{name} is the output head: vLLM would scale a slot with the vocabulary and drop prompt log-probs"
        variant = layer.lora_variant.get(adapter)
        if variant is not None:
            return f"{name} computes a variant of LoRA ({type(variant).__name__})"
        if layer.lora_bias.get(adapter):
            return f"{name} has lora_bias: {UNSERVED['lora_bias']}"
    return None


def _sharding(policy: Policy) -> str | None:
    if policy.fsdp_version == 1:
        return "FSDP1 flattens the adapter's parameters. Set `fsdp_version: 2` in the accelerate config"
    for name, p in policy.module.named_parameters():
        if hasattr(p, "ds_id"):
            return f"{name} is in ZeRO-3's flat buffers: gather merges the adapter instead. Or use FSDP2"
    return None


def _engine(policy: Policy, dtype: torch.dtype | None) -> str | None:
    from vllm.platforms import current_platform

    if dtype is torch.float32 and not current_platform.is_cpu():
        return "vLLM's LoRA kernels compute in 16 bits, and the engine in float32. Set engine_options dtype='bfloat16'"
    layers = lora_layers(policy)
    rank, largest = largest_rank(layers), allowed_ranks()[-1]
    if rank > largest:
        return f"the adapter's rank is {rank}, and vLLM's largest is {largest}"
    return None


def largest_rank(layers: dict[str, Any]) -> int:
    """The largest rank that the active adapters have in any layer: `rank_pattern` may differ from `r`."""
    active = active_adapters(layers)
    return max(int(layer.r[a]) for layer in layers.values() for a in active if a in layer.r)


def allowed_ranks() -> tuple[int, ...]:
    """The sizes vLLM's slots can have, ascending."""
    from typing import get_args

    from vllm.config.lora import MaxLoRARanks

    return tuple(sorted(get_args(MaxLoRARanks)))
