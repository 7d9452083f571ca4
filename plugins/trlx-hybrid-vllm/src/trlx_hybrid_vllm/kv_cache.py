"""How large a KV cache has to be, from the model's config: before there is an engine that could say it."""

from __future__ import annotations

from typing import Any

from .internals import attention_of

BLOCK = 32  # tokens per KV block on a CPU; vLLM's attention there wants a multiple of 32
SPARE = 8  # blocks
STATES = ("linear_attention", "conv", "moe", "mlp")
"""Kinds of layers without keys and values: they keep a state per sequence, whatever its length, or nothing."""


def kv_cache_bytes(
    config: Any,
    *,
    sequences: int,
    length: int,
    in_flight: int,
    ranks: int,
    itemsize: int,
    hybrid: bool = True,
    least: bool = False,
) -> int:
    """What sequences of full length fill on one rank, summed over the layers.

    Args:
        config: of the model, as transformers has it.
        length: tokens of each sequence.
        in_flight: tokens that vLLM may have scheduled at once; a sliding window keeps them beside itself.
        ranks: of a replica, which share the heads.
        itemsize: bytes per element.
        hybrid: whether vLLM's hybrid KV cache manager is on, which frees what a layer's window has left.
        least: leave out layers with a state, which are taken for full attention otherwise.
    """
    text = config.get_text_config()
    kinds = getattr(text, "layer_types", None)
    window: Any = getattr(text, "sliding_window", None)
    hybrid = hybrid and getattr(text, "attention_chunk_size", None) is None  # vLLM then switches it off
    slides = window is not None and (hybrid or not kinds or set(kinds) == {"sliding_attention"})
    every = -(-length // BLOCK) * sequences
    last = (-(-window // BLOCK) + 1) * sequences + -(-in_flight // BLOCK) if slides else every
    elements = 0
    shapes = attention_of(config)
    for layer in range(len(shapes) - (getattr(text, "num_kv_shared_layers", None) or 0)):
        kind = kinds[layer] if kinds else "sliding_attention"
        if not (least and kind in STATES):
            heads, width = shapes[layer]
            blocks = min(every, last) if kind == "sliding_attention" else every
            elements += (blocks + SPARE) * BLOCK * -(-heads // ranks) * width
    return elements * itemsize
