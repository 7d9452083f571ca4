"""Weights that bitsandbytes holds in 4 bits (QLoRA), as the values that the trainer's layers multiply by.

Source: bitsandbytes 0.50, `nn.modules.Linear4bit`, `functional.dequantize_4bit`. Its 8 bits are another thing: layers
of `Linear8bitLt` round what goes in as well, so no copy of their weights computes what they do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

REPACKS, REPACKED = "support_avx512bf16_for_cpu", "packing_format_for_cpu"
"""Of a layer, whether it does, and of a weight's state, whether it did."""


def in_4_bits(p: Any) -> bool:
    """Whether a parameter holds quantised bits, with what is needed to read them; recognised without an import."""
    if type(p).__name__ != "Params4bit":  # first: it is asked of every tensor at every phase edge
        return False
    return p.quant_state is not None and not getattr(p.quant_state, REPACKED, False)


def values(p: Any) -> Tensor:
    """A new tensor of the weight's own shape, bit for bit what `Linear4bit` casts to its compute dtype."""
    from bitsandbytes.functional import dequantize_4bit

    found: Tensor = dequantize_4bit(p.data, p.quant_state)
    return found


def elements(p: Any) -> int:
    """How many values a parameter has."""
    return int(p.quant_state.shape.numel()) if in_4_bits(p) else int(p.numel())


def keep_bits(modules: Iterable[Any]) -> None:
    """On CPUs with AVX512-BF16 bitsandbytes would pack weights anew in the first evaluation, round their scales, and
    compute in bfloat16 from then on: another policy than the one that trains. Has no effect on a GPU."""
    for module in modules:
        if hasattr(module, REPACKS):
            setattr(module, REPACKS, False)


def reads(conversion: Any) -> bool:
    """Whether a conversion of transformers makes quantised weights of a checkpoint's tensors. It has no way back, and
    none is needed: values have the names that they would have in a checkpoint."""
    return any(type(step).__name__.startswith("Bnb") for step in getattr(conversion, "operations", None) or ())


def scales(p: Any) -> Iterator[Tensor]:
    """What a quantised weight holds beside its bits: a scale for each block, which may be quantised too."""
    state = p.quant_state if in_4_bits(p) else None
    while state is not None:
        yield state.absmax
        state = state.state2
