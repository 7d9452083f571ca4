"""A number that changes whenever a tensor is written to, at the cost of reading the tensors once.

No counter tells this: torch's `_version` does not move when a fused optimizer or a write to `.data` changes one. So
the bits are read. All are summed as 64-bit integers, twice: a tensor is cut into squares, and the sums of each square's
rows and of its columns depend on what stands where. The sums are few, and are mixed with their position.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
SIDE = 2047
"""Words in a row of a square, and rows in it at most: 32 MiB, so that a GPU's cache has it for the second sum. Odd, as
the number of rows is: an even number of equal changes of the highest bit, the sign of a weight, would add up to 0."""
SMALL = 1 << 18  # words: smaller tensors are copied into a square together
SAMPLED = 64  # elements of each tensor that is sampled
FACTORS = (-7046029254386353131, -4658895280553007687)  # of splitmix64, as signed integers


@torch.no_grad()
def fingerprint(tensors: Iterable[Tensor]) -> int:
    """Return a number over all bits of the tensors and their order. Reads each tensor once, and waits once per device.

    One changed element always changes two sums. What leaves the sums of all rows and columns as they were is missed:
    four elements at the corners of a rectangle that trade two values.

    Args:
        tensors: of any dtype, shape and device. Shapes and dtypes do not count.
    """
    sums: dict[torch.device, list[Tensor]] = {}
    for square in _squares(tensors):
        sums.setdefault(square.device, []).extend(_sums(square))
    return hash(tuple(int(_mixed(torch.cat(found))) for found in sums.values()))


def sample(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return some 64 elements of each tensor, spread evenly over it, as one tensor for each dtype and device."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        flat = tensor.detach().reshape(-1)
        if flat.numel() and not flat.is_meta:
            part = flat[:: max(1, flat.numel() // SAMPLED)]
            groups.setdefault((flat.device, flat.dtype), []).append(part)
    return [torch.cat(parts) for parts in groups.values()]


def _squares(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield the tensors as 64-bit words, at most a square's at a time; small tensors share one."""
    waiting: dict[torch.device, list[Tensor]] = {}
    held: dict[torch.device, int] = {}
    for tensor in tensors:
        words = _words(tensor)
        size, device = words.numel(), words.device
        if size >= SMALL:
            yield from torch.split(words, SIDE * SIDE)
            continue
        waiting.setdefault(device, []).append(words)
        held[device] = held.get(device, 0) + size
        if held[device] >= SMALL:
            yield torch.cat(waiting.pop(device))
            held[device] = 0
    yield from map(torch.cat, waiting.values())


def _words(tensor: Tensor) -> Tensor:
    """Return the bits of a tensor as int64, with zeros behind the last where they do not fill a word."""
    flat = tensor.detach().reshape(-1)
    flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    bits = flat.view(BITS[flat.element_size()])
    in_a_word = 8 // bits.element_size()
    if bits.numel() % in_a_word:
        bits = torch.nn.functional.pad(bits, (0, -bits.numel() % in_a_word))
    elif bits.storage_offset() % in_a_word:
        # a view as wider integers has to begin at a whole word
        bits = bits.clone()
    return bits.view(torch.int64)


def _sums(words: Tensor) -> list[Tensor]:
    """Return the sums of columns and rows, and as they are the words that fill no odd number of rows."""
    rows = len(words) // SIDE
    rows -= rows > 0 and rows % 2 == 0
    square, rest = words[: rows * SIDE].view(rows, SIDE), words[rows * SIDE :]
    return [square.sum(0), square.sum(1), rest] if rows else [rest]


def _mixed(sums: Tensor) -> Tensor:
    """Return one number over the sums and their positions: the sum of splitmix64's hashes of them."""
    hashed = sums + torch.arange(1, len(sums) + 1, device=sums.device) * FACTORS[0]
    for factor in FACTORS:
        # a logical shift, which an int64 tensor has not
        hashed = (hashed ^ ((hashed >> 29) & ((1 << 35) - 1))) * factor
    return (hashed ^ ((hashed >> 32) & ((1 << 32) - 1))).sum()
