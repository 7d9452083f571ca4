"""Model shapes by a short name, as the fields of their config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def _shape(
    kind: str, hidden: int, inner: int, layers: int, heads: int, kv: int, vocab: int, **more: Any
) -> dict[str, Any]:
    return {
        "model_type": kind,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "vocab_size": vocab,
    } | more


SHAPES: Mapping[str, Mapping[str, Any]] = {
    "0.5b": _shape("qwen2", 896, 4864, 24, 14, 2, 151936, tie_word_embeddings=True),
    "0.6b": _shape("qwen3", 1024, 3072, 28, 16, 8, 151936, head_dim=128, tie_word_embeddings=True),
    "1.5b": _shape("qwen2", 1536, 8960, 28, 12, 2, 151936, tie_word_embeddings=True),
    "7b": _shape("qwen2", 3584, 18944, 28, 28, 4, 152064),
    "8b": _shape("llama", 4096, 14336, 32, 32, 8, 128256),
    "30b-a3b": _shape(
        "qwen3_moe", 2048, 6144, 48, 32, 4, 151936, head_dim=128, num_experts=128, moe_intermediate_size=768
    ),
    "70b": _shape("llama", 8192, 28672, 80, 64, 8, 128256),
    "1t-moe": _shape(
        "qwen3_moe", 7168, 18432, 61, 64, 8, 163840, head_dim=128, num_experts=384, moe_intermediate_size=2048
    ),
}
"""Qwen2.5 0.5B, 1.5B and 7B; Qwen3 0.6B and 30B-A3B; Llama 8B and 70B; Qwen3-MoE of a trillion parameters, in Kimi K2's
sizes."""
