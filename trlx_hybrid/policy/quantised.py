"""Weights that bitsandbytes holds in 4 bits (QLoRA), dequantised to the values that the trainer's layers multiply by.

Source: bitsandbytes 0.50, `nn.modules.Linear4bit`, `functional.dequantize_4bit`. 8-bit weights are not handled: layers
of `Linear8bitLt` round their inputs as well, so an engine with a copy of their weights would compute other values.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from bitsandbytes.nn import Params4bit
    from torch import nn

REPACKS, REPACKED = "support_avx512bf16_for_cpu", "packing_format_for_cpu"
"""Attribute names of bitsandbytes: whether a layer packs its weight anew on a CPU, and whether a weight's quantisation
state says that it did."""


def in_4_bits(p: Params4bit) -> bool:
    """Return whether a parameter holds 4-bit values and the state needed to read them. Does not import bitsandbytes."""
    if type(p).__name__ != "Params4bit":  # checked first: this runs for every tensor at every phase
        return False
    return p.quant_state is not None and not getattr(p.quant_state, REPACKED, False)


def values(p: Params4bit) -> Tensor:
    """Return a 4-bit weight dequantised, as a new tensor of its original shape: bit for bit the values that
    `Linear4bit` casts to its compute dtype."""
    from bitsandbytes.functional import dequantize_4bit

    found: Tensor = dequantize_4bit(p.data, p.quant_state)
    return found


def elements(p: Params4bit) -> int:
    """Return the number of a parameter's values; for a 4-bit parameter, the number before two values were packed into a
    byte."""
    return int(p.quant_state.shape.numel()) if in_4_bits(p) else int(p.numel())


def keep_bits(modules: Iterable[nn.Module]) -> None:
    """Keep bitsandbytes from repacking the 4-bit weights of some modules. On CPUs with AVX512-BF16 it would repack them
    in the first forward pass in evaluation mode, round their scales, and compute in bfloat16 from then on, by a product
    without a gradient: layers below would learn nothing. Has no effect on a GPU."""
    for module in modules:
        if hasattr(module, REPACKS):
            setattr(module, REPACKS, False)


def reads(conversion: Any) -> bool:
    """Return whether a weight conversion, by which transformers loads a checkpoint, is one of bitsandbytes: it makes or
    reads quantised tensors. To name tensors as a checkpoint does, the other conversions are reversed. This kind cannot
    be reversed, and need not be: dequantised values have the names that they would have in a checkpoint."""
    return any(type(step).__name__.startswith("Bnb") for step in getattr(conversion, "operations", None) or ())


def scales(p: Params4bit) -> Iterator[Tensor]:
    """Yield the scales of a quantised weight, one for each block; where bitsandbytes quantised the scales, their own
    scales follow."""
    state = p.quant_state if in_4_bits(p) else None
    while state is not None:
        yield state.absmax
        state = state.state2
