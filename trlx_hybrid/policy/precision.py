"""The dtypes that a run computes in, and the largest allowed difference between two log-probs of one token in each
dtype."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import TrainingArguments

PROBE_TOKENS = 8
"""The number of tokens of a short sequence whose log-probs are computed in two ways and compared."""

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.5, torch.float16: 0.1}
"""The largest allowed log-prob difference of one token, in nats, by dtype. Healthy runs stay far below: 1e-6 in fp32 on
CPU, about 0.05 in bf16, where kernels differ in rounding. Stale or misplaced weights of a trained model exceed it at
once."""


def autocast_dtype(args: TrainingArguments) -> torch.dtype:
    """Return the dtype of the trainer's matrix products, as set by its `transformers.TrainingArguments`."""
    return torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else torch.float32


def coarsest(*dtypes: torch.dtype) -> torch.dtype:
    """Return the dtype that rounds most. Float32 counts as float16 where torch computes products in TF32, because
    both round to the same number of bits."""
    dtype = max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)
    tf32 = dtype is torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
    return torch.float16 if tf32 else dtype
