"""A hash of all weights of an engine, computed on its device: equal numbers mean equal bits in equal places."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def digest(named: Iterable[tuple[str, Tensor]]) -> int:
    """Return a hash of the tensors' bits and names.

    It does not depend on the tensors' order or shapes, but on their names and on where in a tensor each value lies.
    Waits for the device once.
    """
    from trlx_hybrid_vllm.remote.worker import digest as of_one

    total = None
    for name, tensor in named:
        part = of_one(tensor.detach()) * (zlib.crc32(name.encode()) | 1)
        total = part if total is None else total + part
    return 0 if total is None else int(total)
