"""The comparison of two ways to compute the same outputs and gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

ALLOWED = {torch.float32: 1e-4, torch.float64: 1e-10, torch.bfloat16: 0.05, torch.float16: 0.01}
"""The largest difference that rounding explains, by the dtype of the products, as a fraction of the largest value."""


def difference(ours: Sequence[Tensor], theirs: Sequence[Tensor], dtype: torch.dtype) -> float | None:
    """Return the largest difference between tensors, as a fraction of the largest value of each; None where rounding
    explains it.

    Args:
        ours, theirs: the tensors that are compared, one by one, of equal shapes.
        dtype: the dtype of the products.
    """
    rough = ours[0].is_cuda and dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest"
    allowed = ALLOWED[torch.float16 if rough else dtype]
    pairs = ((a.float(), b.float()) for a, b in zip(ours, theirs, strict=True))
    gaps = torch.stack([(a - b).abs().max() / b.abs().max().clamp_min(1e-30) for a, b in pairs])
    return None if bool((gaps <= allowed).all()) else gaps.max().item()  # a NaN must not pass
