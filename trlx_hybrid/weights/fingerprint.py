"""A fingerprint: a number that changes whenever a tensor is written to, at the cost of reading the tensors once.

No counter can replace it: torch's `_version` does not move when a fused optimizer or a write to `.data` changes a
tensor. So the bits are read and summed as 64-bit integers, twice: each tensor is cut into squares, and the sums of a
square's rows and of its columns depend on where each element stands. These few sums are then hashed with their
positions.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors

BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
SIDE = 2047
"""Words in a row of a square, and its largest number of rows: 32 MiB, so that a GPU's cache still has the square for
the second sum. Both are odd: an even number of equal changes of the highest bit, the sign of a weight, would add up to
0."""
SQUARE = 8 * SIDE * SIDE  # bytes
SMALL = 1 << 21  # bytes: smaller tensors share a square
SAMPLED = 64  # elements of each tensor that is sampled
PLAIN = (Tensor, torch.nn.Parameter)
FACTORS = (-7046029254386353131, -4658895280553007687)  # splitmix64's factors, as signed integers


@torch.no_grad()
def fingerprint(*groups: Iterable[Tensor]) -> int:
    """Return a number over all bits of the tensors and their order. Reads each tensor once and synchronises once per
    device.

    One changed element always changes two sums. Changes that leave the sums of all rows and columns equal are missed:
    four elements at the corners of a rectangle that swap two values.

    Args:
        groups: tensors of any dtype, shape and device. The number does not depend on shapes and dtypes. Tensors of
            different groups never share a square.
    """
    sums: dict[torch.device, list[Tensor]] = {}
    for square in itertools.chain.from_iterable(map(_squares, groups)):
        sums.setdefault(square.device, []).extend(_sums(square))
    return hash(tuple(int(_mixed(torch.cat(found))) for found in sums.values()))


@torch.no_grad()
def sample(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return about 64 elements of each tensor, spread evenly over it, concatenated per dtype and device."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        count = tensor.numel()
        if count and not tensor.is_meta:
            step = max(1, count // SAMPLED)
            # one operation for a plain contiguous tensor: there are hundreds
            whole = type(tensor) in PLAIN and tensor.is_contiguous()
            part = tensor.as_strided((-(-count // step),), (step,)) if whole else tensor.reshape(-1)[::step]
            groups.setdefault((tensor.device, tensor.dtype), []).append(part)
    return [torch.cat(parts) for parts in groups.values()]


def _squares(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield the tensors as 64-bit words, at most one square's worth at a time; small tensors of one dtype share a
    square.

    An adapter has hundreds of small tensors, and each operation on one takes longer to launch than to run. So one call
    concatenates them before they are viewed as words.
    """
    waiting: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    held: dict[tuple[torch.device, torch.dtype], int] = {}
    for tensor in tensors:
        size, kind = tensor.nbytes, (tensor.device, tensor.dtype)
        if size >= SMALL:
            yield from torch.split(_words(tensor), SIDE * SIDE)
            continue
        if held.get(kind, 0) + size > SQUARE:
            yield _words(_flatten_dense_tensors(waiting.pop(kind)))  # type: ignore[no-untyped-call]
            held[kind] = 0
        waiting.setdefault(kind, []).append(tensor)
        held[kind] = held.get(kind, 0) + size
    for parts in waiting.values():
        yield _words(_flatten_dense_tensors(parts))  # type: ignore[no-untyped-call]


def _words(tensor: Tensor) -> Tensor:
    """Return the bits of a tensor as int64, zero-padded to whole words."""
    flat = tensor.reshape(-1)
    flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    bits = flat.view(BITS[flat.element_size()])
    in_a_word = 8 // bits.element_size()
    if bits.numel() % in_a_word:
        bits = torch.nn.functional.pad(bits, (0, -bits.numel() % in_a_word))
    elif bits.storage_offset() % in_a_word:
        # a view as wider integers must begin at a whole word
        bits = bits.clone()
    return bits.view(torch.int64)


def _sums(words: Tensor) -> list[Tensor]:
    """Return the sums of columns and of rows, and the remaining words, which do not fill an odd number of rows, as they
    are."""
    rows = len(words) // SIDE
    rows -= rows > 0 and rows % 2 == 0
    square, rest = words[: rows * SIDE].view(rows, SIDE), words[rows * SIDE :]
    return [square.sum(0), square.sum(1), rest] if rows else [rest]


def _mixed(sums: Tensor) -> Tensor:
    """Return one number over the sums and their positions: the sum of their splitmix64 hashes."""
    hashed = sums + torch.arange(1, len(sums) + 1, device=sums.device) * FACTORS[0]
    for factor in FACTORS:
        # a logical shift, which int64 tensors do not have
        hashed = (hashed ^ ((hashed >> 29) & ((1 << 35) - 1))) * factor
    return (hashed ^ ((hashed >> 32) & ((1 << 32) - 1))).sum()
