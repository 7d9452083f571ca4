"""One number for all weights of an engine, made on its device: equal numbers, equal bits in equal places."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

CHUNK = 1 << 24  # elements at a time: two int64 buffers of 128 MiB
MIXER = 0x9E3779B1  # odd: multiplying by it loses nothing modulo 2^64


def digest(named: Iterable[tuple[str, Tensor]]) -> int:
    """A hash of the tensors' bits, shapes left out: independent of their order, dependent on their names and on where
    in a tensor each value lies. Waits for the device once."""
    total = None
    for name, tensor in named:
        part = _of_one(tensor) * (zlib.crc32(name.encode()) | 1)
        total = part if total is None else total + part
    return 0 if total is None else int(total)


def _of_one(tensor: Tensor) -> Tensor:
    """The sum of bits times position, which int64 takes modulo 2^64; the sum is the same in whatever order a GPU adds.

    Two exchanged values a and b at i and j change it by (a - b) * (w(i) - w(j)); the weight w is odd, so that a single
    changed value always shows, and not linear in the position, so that neighbouring changes do not cancel out.
    """
    import torch

    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    flat = tensor.detach().reshape(-1).view(integers[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, flat.numel(), CHUNK):
        bits = flat[start : start + CHUNK].to(torch.int64)
        weights = torch.arange(start + 1, start + 1 + bits.numel(), device=tensor.device).mul_(MIXER)
        weights.bitwise_xor_(weights >> 15).bitwise_or_(1)
        total += bits.mul_(weights).sum()
    return total
