"""The FLOPs that training on some tokens needs, and the FLOP/s that a device can reach, from which MFU is computed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...policy.policy import layer_kinds
from ...policy.precision import autocast_dtype

if TYPE_CHECKING:
    from ...policy.policy import Policy

HOPPER, AMPERE = (989e12, 494e12, 67e12), (312e12, 156e12, 19.5e12)
PEAK = {
    "NVIDIA B200": (2250e12, 1125e12, 75e12),
    "NVIDIA H200": HOPPER,
    "NVIDIA H100 80GB HBM3": HOPPER,
    "NVIDIA H100 PCIe": (756e12, 378e12, 51e12),
    "NVIDIA A100-SXM4-80GB": AMPERE,
    "NVIDIA A100-SXM4-40GB": AMPERE,
    "NVIDIA A100 80GB PCIe": AMPERE,
    "NVIDIA A100-PCIE-40GB": AMPERE,
    "NVIDIA L40S": (362e12, 183e12, 91.6e12),
    "NVIDIA GeForce RTX 4090": (165e12, 82.6e12, 82.6e12),
    "AMD Instinct MI300X": (1307e12, 653e12, 163e12),
}
"""Dense FLOP/s of matrix products in 16 bits (summed in float32), TF32 and float32, by the device name that the driver
reports. The driver reports another name for a part of a device (MIG). Data sheets state twice these numbers "with
sparsity".

Sources: NVIDIA's data sheets of HGX B200, H200, H100, A100 and L40S, and its whitepaper on the Ada architecture for the
RTX 4090; AMD's data sheet of the MI300X.
"""


@dataclass(frozen=True, slots=True)
class ModelFlops:
    """FLOPs of one forward and one backward pass over real tokens, without padding, recomputation or repeated passes.

    The count is 6·N per token, plus attention, as in PaLM (Chowdhery et al. 2022, appendix B), with these refinements:

    - N counts the weights that every token is multiplied with: no embeddings, norms or biases, and only as many
      experts as a token is routed to. A frozen weight, as in the base model under LoRA, counts 4 instead of 6: the
      forward pass and the gradient of its input.
    - The head counts only for the tokens that are scored, which are the tokens of completions.
    - Attention counts its causal half, where PaLM counts all of 12·L·H·Q·T: 12·L·H·Q for each pair of a token and a
      token that it attends to, itself included.

    Attributes:
        token: FLOPs of a token.
        scored: FLOPs of a completion token in the head.
        pair: FLOPs of a pair of a token and a token that it attends to, in all layers.
    """

    token: float
    scored: float
    pair: float

    def of(self, tokens: int, scored: int, pairs: int) -> float:
        """Return the FLOPs of training on a batch, forward and backward.

        Args:
            tokens: number of tokens.
            scored: number of completion tokens.
            pairs: number of pairs of a token and a token that it attends to. All three as `counted` returns them.
        """
        return self.token * tokens + self.scored * scored + self.pair * pairs


def counted(prompt_mask: Tensor, completion_mask: Tensor) -> Tensor:
    """Count the tokens of a micro-batch, without waiting for the device.

    Args:
        prompt_mask, completion_mask: (B, P) and (B, C), 1 where a token is real.

    Returns:
        (3,) int64: all tokens, completion tokens, and pairs of a token and a token that it attends to.
    """
    scored = completion_mask.sum(1)
    tokens = prompt_mask.sum(1) + scored
    return torch.stack([tokens.sum(), scored.sum(), (tokens * (tokens + 1)).sum() // 2])


def model_flops(policy: Policy) -> ModelFlops | None:
    """Return the FLOPs that training the policy needs per token, or None where the shapes of its weights do not
    determine them.

    The shapes do not determine them for images, layers that do not attend to all earlier tokens, latent attention,
    quantised weights, FSDP1, experts that are not stacked, and adapters other than LoRA of plain layers. Nor do they
    for a partly frozen base, because the FLOPs depend on the part that is frozen.
    """
    base, config = policy.base, policy.base.config
    heads, layers = getattr(config, "num_attention_heads", None), getattr(config, "num_hidden_layers", None)
    head: Any = base.get_output_embeddings()
    if not (isinstance(heads, int) and layers and head is not None and policy.fsdp_version != 1 and _is_plain(base)):
        return None
    weights = policy.base_parameters()
    apart = {id(head.weight)} | {id(m.weight) for m in base.modules() if isinstance(m, nn.Embedding)}
    linear = [p for name, p in weights.items() if id(p) not in apart and not name.endswith("bias")]
    linear = [p for p in linear if len(_shape(p)) > 1]
    if not policy.adapters and not all(p.requires_grad for p in linear):
        return None
    if policy.has_experts != any(len(_shape(p)) == 3 for p in linear):
        return None
    known = {id(p) for p in weights.values()}
    own = {name: p for name, p in policy.module.named_parameters() if p.requires_grad and id(p) not in known}
    if any("lora_" not in name or "lora_embedding" in name or ".experts." in name for name in own):
        return None
    routed = getattr(config, "num_experts_per_tok", None) if policy.has_experts else 1
    if not isinstance(routed, int):
        return None
    token = sum(_flops(p) * (routed / _shape(p)[0] if len(_shape(p)) == 3 else 1.0) for p in linear)
    token += sum(_flops(p) for p in own.values() if len(_shape(p)) > 1)
    width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    return ModelFlops(token, _flops(head.weight), 12.0 * layers * width)


def _is_plain(base: Any) -> bool:
    """Return whether a model takes text only, uses its weights unquantised, and attends to all earlier tokens."""
    config = base.config
    special = getattr(base, "_is_stateful", False) or getattr(config, "kv_lora_rank", None)
    quantised = getattr(config, "quantization_config", None) is not None
    return (
        config.get_text_config() is config
        and layer_kinds(config) == {"full_attention"}
        and not special
        and not quantised
    )


def _shape(p: Tensor) -> tuple[int, ...]:
    """Return a parameter's full shape, also where this rank holds a part of it (FSDP2, ZeRO-3)."""
    return tuple(getattr(p, "ds_shape", p.shape))


def _flops(p: Tensor) -> float:
    """Return the FLOPs of one token's product with a weight: forward, gradient of the input, and gradient of the weight
    where it is trained."""
    return 2.0 * (3 if p.requires_grad else 2) * math.prod(_shape(p))


def peak(policy: Policy, args: Any) -> float | None:
    """Return the maximum FLOP/s of the policy's device in the trainer's compute dtype; None where it is not known.

    Args:
        args: `transformers.TrainingArguments`.
    """
    device = policy.device
    found = PEAK.get(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    if found is None:
        return None
    half, tf32, full = found
    if min(policy.dtype.itemsize, autocast_dtype(args).itemsize) == 2:
        return half
    return tf32 if torch.backends.cuda.matmul.fp32_precision == "tf32" else full
