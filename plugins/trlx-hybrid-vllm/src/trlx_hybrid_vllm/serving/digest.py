"""A number that stands for a tensor's bits: equal on every device, and cheap enough for a whole model."""

from __future__ import annotations

import torch
from torch import Tensor

from ..loading import BITS

PIECE = 1 << 22  # elements at a time: each takes 24 bytes on the way
MULTIPLIERS = (-7046029254386353131, -4658895280553007687)  # of splitmix64, as signed integers


def digest(tensor: Tensor) -> Tensor:
    """Sum over the elements of bits times a scrambled odd function of their position, modulo 2^64; int64, on the
    tensor's device.

    One changed element always changes it, since odd factors are invertible; several, or elements that changed places,
    cancel out with a probability of about 2^-60. Shape and dtype do not count.
    """
    bits = tensor.contiguous().reshape(-1).view(BITS[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, bits.numel(), PIECE):
        piece = bits[start : start + PIECE].to(torch.int64)
        total += (piece * _factors(start, piece)).sum()
    return total


def _factors(start: int, piece: Tensor) -> Tensor:
    mixed = torch.arange(start + 1, start + 1 + piece.numel(), device=piece.device)
    for multiplier in MULTIPLIERS:
        mixed = mixed * multiplier
        mixed = mixed ^ (mixed >> 29)
    return mixed | 1
