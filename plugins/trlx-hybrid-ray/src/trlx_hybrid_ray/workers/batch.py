"""Batches: nested data whose leaves have rows, cut into chunks and put together again. Pure functions.

Rows are the items of a list and the first dimension of a tensor or an array. Tuples, mappings and dataclasses give
structure: what is in them is cut, they are not. `None`, numbers, strings, bytes and tensors without dimensions have no
rows and go into every chunk as they are. `join` is the inverse of `split`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from .failure import DispatchError
from .structure import fields_of, is_array, is_tensor, mapped, unlike

SINGLES = (str, bytes, bytearray, bool, int, float, complex, type(None))


@dataclass(frozen=True, slots=True)
class Chunks:
    """How many rows each chunk has.

    Attributes:
        real: rows of the batch in each chunk; they differ by at most one, the larger ones first.
        sizes: rows in each chunk, padding included. Padding repeats a row and stands at a chunk's end.
    """

    real: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, rows: int, parts: int, *, padded: bool = False) -> Chunks:
        """`rows` rows in `parts` chunks, all of one size where `padded`. An empty batch has nothing to pad with."""
        each, longer = divmod(rows, parts)
        real = tuple(each + (part < longer) for part in range(parts))
        return cls(real, (real[0],) * parts if padded else real)

    @property
    def rows(self) -> list[range]:
        """The batch's rows that each chunk holds."""
        ends = list(accumulate(self.real, initial=0))
        return [range(start, end) for start, end in pairwise(ends)]

    def masks(self) -> list[Any]:
        """(size,) bool for each chunk: True where a row is the batch's, False where it is padding."""
        import numpy

        return [numpy.arange(size) < real for real, size in zip(self.real, self.sizes, strict=True)]

    @property
    def padded(self) -> bool:
        """Whether any chunk has padding."""
        return self.real != self.sizes


def rows_of(batch: Any) -> int:
    """The number of rows that every leaf with rows has.

    Raises:
        DispatchError: no leaf has rows, two leaves differ, or a value is neither rows nor structure.
    """
    found = list(_counts(batch, "the batch"))
    if not found:
        raise DispatchError(
            f"Nothing to split in a batch of type {type(batch).__name__}: it holds no list, tensor or array. "
            "Register the method as 'one_to_all' or 'broadcast', or pass rows."
        )
    first, rows = found[0]
    for path, count in found[1:]:
        if count != rows:
            raise DispatchError(f"A batch has one number of rows, but {first} has {rows} and {path} has {count}.")
    return rows


def split(batch: Any, chunks: Chunks) -> list[Any]:
    """One batch per chunk. Tensors are copied (a view would be sent with all its storage), arrays are views."""
    ranges = list(zip(chunks.rows, chunks.sizes, strict=True))
    cut = mapped(lambda leaf, path: _cuts(leaf, ranges), [batch], "the batch")  # every leaf is now a list of its pieces
    if fields_of(batch) is None:
        return list(cut)
    return [mapped(lambda pieces, path, n=n: pieces[n], [cut], "the batch") for n in range(len(ranges))]


def join(parts: Sequence[Any], chunks: Chunks | None = None) -> Any:
    """The results of all chunks as one, in order.

    Args:
        parts: one per chunk, alike in structure; how many rows each has is up to it.
        chunks: where padding has to be taken off: then each part must have as many rows as its chunk.

    Raises:
        DispatchError: the parts are not alike, a value without rows differs, or padding cannot be told from results.
    """
    if chunks is not None and chunks.padded:
        parts = [_unpadded(part, chunks, number) for number, part in enumerate(parts)]
    return mapped(_joined, parts, "the result")


def unpadded(part: Any, chunks: Chunks | None, number: int) -> Any:
    """The result of one chunk without its padding."""
    return part if chunks is None or not chunks.padded else _unpadded(part, chunks, number)


# --- leaves ---------------------------------------------------------------------------------------------------------


def _length(leaf: Any, path: str) -> int | None:
    """Rows of a leaf; None where it has none.

    Raises:
        DispatchError: it is nothing that can be cut or sent to all.
    """
    if isinstance(leaf, list):
        return len(leaf)
    if is_tensor(leaf) or is_array(leaf):
        return int(leaf.shape[0]) if leaf.ndim else None
    if isinstance(leaf, SINGLES):
        return None
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(leaf, numpy.generic):
        return None
    raise DispatchError(
        f"{path} is a {type(leaf).__name__}, which has no rows that could be cut. Use lists, tensors, arrays, tuples, "
        "dicts and dataclasses in what is split, or pass it as a further argument, which every worker gets as it is."
    )


def _counts(value: Any, path: str) -> Iterator[tuple[str, int]]:
    fields = fields_of(value)
    if fields is not None:
        for key, field in fields.items():
            yield from _counts(field, f"{path}[{key!r}]")
    elif (rows := _length(value, path)) is not None:
        yield path, rows


def _cuts(leaf: Any, ranges: Sequence[tuple[range, int]]) -> list[Any]:
    if _length(leaf, "the batch") is None:
        return [leaf] * len(ranges)
    tensor = is_tensor(leaf)
    pieces = []
    for rows, size in ranges:
        piece = leaf[rows.start : rows.stop]
        if size > len(rows):
            last = max(rows.stop, 1) - 1  # a chunk without rows repeats the batch's last one
            piece = _concatenated([piece, *[leaf[last : last + 1]] * (size - len(rows))])
        elif tensor:
            piece = piece.clone()
        pieces.append(piece)
    return pieces


def _concatenated(parts: Sequence[Any]) -> Any:
    if isinstance(parts[0], list):
        return [row for part in parts for row in part]
    if is_tensor(parts[0]):
        import torch

        return torch.cat(list(parts))
    import numpy

    return numpy.concatenate(list(parts))


def _joined(*values_and_path: Any) -> Any:
    *values, path = values_and_path
    first = values[0]
    for number, value in enumerate(values[1:], 1):
        if type(value) is not type(first):
            raise unlike(path, first, value, number)
    if not (isinstance(first, list) or is_tensor(first) or is_array(first)) or getattr(first, "ndim", 1) == 0:
        return _agreed(values, path)
    if len(values) == 1:
        return first
    # An empty chunk often has the wrong dtype or shape, and nothing to say.
    return _concatenated([value for value in values if len(value)] or [first])


def _agreed(values: Sequence[Any], path: str) -> Any:
    """A value without rows, which must be the same in every chunk: none of them may be dropped in silence."""
    for number, value in enumerate(values[1:], 1):
        if not _same(values[0], value):
            raise DispatchError(
                f"Results cannot be joined: {path} has no rows and differs, {values[0]!r} of chunk 0 and {value!r} of "
                f"chunk {number}. Return it per row, or register the method as 'reduce' or 'one_to_all'."
            )
    return values[0]


def _same(first: Any, second: Any) -> bool:
    if first is second or (first != first and second != second):  # NaN
        return True
    return bool(first == second)


def _unpadded(part: Any, chunks: Chunks, number: int) -> Any:
    def trimmed(leaf: Any, path: str) -> Any:
        if not (isinstance(leaf, list) or is_tensor(leaf) or is_array(leaf)) or getattr(leaf, "ndim", 1) == 0:
            return leaf
        if len(leaf) != chunks.sizes[number]:
            raise DispatchError(
                f"{path} of chunk {number} has {len(leaf)} rows for {chunks.sizes[number]} given, so that padding "
                "cannot be told from results. Return one row per row, or register the method without `pad`."
            )
        return leaf[: chunks.real[number]]

    return mapped(trimmed, [part], "the result")
