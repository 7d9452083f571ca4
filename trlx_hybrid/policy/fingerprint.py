"""A fingerprint of tensors: a number that changes when any tensor is written to, at the cost of reading them once.

No counter can replace it: torch's `_version` does not move when a fused optimizer or a write to `.data` changes a
tensor. So the bits of each tensor are read as 64-bit integers ("words") and laid out as square matrices. The sums of a
square's rows and those of its columns together depend on where each element stands. These few sums are then hashed with
their positions. `Frozen` detects writes to frozen weights more cheaply and less strictly.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Set

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors

_flat: Callable[[list[Tensor]], Tensor] = _flatten_dense_tensors  # torch's has no types

BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
SIDE = 2047
"""The number of 64-bit words in a row of a square, and the largest number of its rows: 32 MiB, so that a GPU's cache
still has the square for the second sum. Both numbers are odd: an even number of equal changes of the highest bit, which
is the sign of a weight, would add up to 0."""
SQUARE = 8 * SIDE * SIDE  # bytes
SMALL = 1 << 21  # bytes: smaller tensors share a square
SAMPLED = 64  # elements of each tensor that is sampled
PLAIN = (Tensor, torch.nn.Parameter)
FACTORS = (-7046029254386353131, -4658895280553007687)  # splitmix64's factors, as signed integers


@torch.no_grad()
def fingerprint(*groups: Iterable[Tensor]) -> int:
    """Return a hash of all bits of the tensors and of their order. Reads each tensor once and synchronises once per
    device.

    The bits are laid out as square matrices of 64-bit words, of which the sums of all rows and columns are hashed. One
    changed word always changes the sums of its row and its column. Changes that leave all sums equal are missed, for
    instance where four words at the corners of a rectangle swap two values.

    Args:
        groups: tensors of any dtype, shape and device. The hash does not depend on shapes and dtypes. Tensors of
            different groups are never summed together.
    """
    sums: dict[torch.device, list[Tensor]] = {}
    for square in itertools.chain.from_iterable(map(_squares, groups)):
        sums.setdefault(square.device, []).extend(_sums(square))
    return hash(tuple(int(_mixed(torch.cat(found))) for found in sums.values()))


@torch.no_grad()
def sample(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return about 64 elements of each tensor, spread evenly over it, concatenated per dtype and device. To compare it
    with an earlier sample is cheap, and shows most writes, because most writes change many elements."""
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
    """Yield the bits of the tensors as 64-bit words, in blocks of at most SIDE * SIDE words, each (n,) int64. `_sums`
    then lays a block out as a square, and sums its rows and columns. Small tensors of one dtype and device share a
    block.

    An adapter has hundreds of small tensors, and an operation on one of them takes longer to launch than to run. So one
    call concatenates them before they are viewed as words.
    """
    waiting: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    held: dict[tuple[torch.device, torch.dtype], int] = {}
    for tensor in tensors:
        size, kind = tensor.nbytes, (tensor.device, tensor.dtype)
        if size >= SMALL:
            yield from torch.split(_words(tensor), SIDE * SIDE)
            continue
        if held.get(kind, 0) + size > SQUARE:
            yield _words(_flat(waiting.pop(kind)))
            held[kind] = 0
        waiting.setdefault(kind, []).append(tensor)
        held[kind] = held.get(kind, 0) + size
    for parts in waiting.values():
        yield _words(_flat(parts))


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
    """Return the numbers that `fingerprint` hashes in place of some words (64-bit integers), as 1-D tensors.

    The words are laid out as a matrix with SIDE (2047) columns and an odd number of rows, since an even number of equal
    changes of the highest bit would add up to 0. The result is the matrix's column sums, its row sums, and the words
    that are left over, unchanged; if the words fill no row, it is only the words.

    Args:
        words: (n,) int64, with n of at most SIDE * SIDE, as `_squares` yields them.
    """
    rows = len(words) // SIDE
    rows -= rows > 0 and rows % 2 == 0
    square, rest = words[: rows * SIDE].view(rows, SIDE), words[rows * SIDE :]
    return [square.sum(0), square.sum(1), rest] if rows else [rest]


def _mixed(sums: Tensor) -> Tensor:
    """Return a hash, a scalar int64, of the sums by which `fingerprint` describes the tensors on one device: the sum of
    the splitmix64 hashes of each number together with its position.

    Args:
        sums: (n,) int64, what `_sums` returned for the tensors' words, concatenated: mostly sums of rows and columns.
    """
    hashed = sums + torch.arange(1, len(sums) + 1, device=sums.device) * FACTORS[0]
    for factor in FACTORS:
        # a logical shift, which int64 tensors do not have
        hashed = (hashed ^ ((hashed >> 29) & ((1 << 35) - 1))) * factor
    return (hashed ^ ((hashed >> 32) & ((1 << 32) - 1))).sum()


class Frozen:
    """Tracks frozen weights between two syncs, so that the engine gets them again only when they may have changed.

    Each call of `changed` compares tensors, storages, torch's version counters and a sample of the bits: a merge by
    PEFT writes through `.data`, which no counter sees. A weight that was trainable at the last call counts as changed,
    too.
    """

    def __init__(self) -> None:
        self._states: dict[str, tuple[int, int, int]] = {}
        self._samples: list[Tensor] = []
        self._bits: Tensor | None = None

    @property
    def names(self) -> Set[str]:
        """The names of the weights that were frozen at the last call of `changed`."""
        return self._states.keys()

    def changed(self, tensors: Mapping[str, Tensor]) -> bool:
        """Return whether some of the weights that are frozen now may hold other bits than at the last call, or were not
        frozen then.

        Args:
            tensors: the weights that are frozen now, by name.
        """
        states = {name: (id(t), t.untyped_storage()._cdata, t._version) for name, t in tensors.items()}
        news = any(self._states.get(name) != state for name, state in states.items())
        before, bits = self._bits, self._sampled()
        if before is not None and bits is not None:
            news = news or not torch.equal(before, bits)
        if states != self._states:
            flat = (t.detach().view(-1) for t in tensors.values() if t.is_contiguous() and t.numel())
            self._samples = [t[:: max(1, t.numel() // SAMPLED)] for t in flat]
            bits = self._sampled()
        self._states, self._bits = states, bits
        return news

    def _sampled(self) -> Tensor | None:
        return torch.cat([t.float() for t in self._samples]).view(torch.int32) if self._samples else None
