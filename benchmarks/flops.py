"""The arithmetic that training on some rows needs, and what a device can do of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

PEAK = {"nvidia-h100-80gb-hbm3": 989e12, "nvidia-h200": 989e12}
"""Dense bf16 FLOP/s by device name (NVIDIA's data sheets), of one GPU."""


def training_flops(config: Mapping[str, Any], prompt: int, lengths: Iterable[int], *, adapters: bool) -> float:
    """FLOPs of one forward and one backward pass over the real tokens: nothing padded, recomputed or done twice.

    The head counts where log-probs are wanted, attention by its causal half. With adapters the gradients of the weights
    are not needed, and the adapters' own products (1% at rank 16) are left out.

    Args:
        config: of a Qwen2 model, as transformers names its fields.
        prompt: tokens of each row's prompt.
        lengths: tokens of each row's completion.
    """
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    kv = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    linear = layers * (2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * config["intermediate_size"])
    passes = 2 if adapters else 3  # of the products by weights: forward, gradient of the input, gradient of the weight
    total = 0.0
    for completion in lengths:
        tokens = prompt + completion
        weights = 2 * linear * tokens + 2 * hidden * config["vocab_size"] * completion
        total += passes * weights + 3 * 2 * layers * hidden * tokens**2
    return total
