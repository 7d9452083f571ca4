"""Functions that split a batch by rows into chunks, and join chunks again. A batch is nested data. All functions are
pure.

Rows are the items of a list and the first dimension of a tensor or an array. Tuples, mappings and dataclasses are
structure: their contents are split, and each chunk has the same structure. `None`, numbers, strings, bytes and tensors
without dimensions have no rows, so every chunk gets them as they are. `join` is the inverse of `split`.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, Literal, TypeVar

from ..errors import DispatchError

T = TypeVar("T")

SINGLES = (str, bytes, bytearray, bool, int, float, complex, type(None))
"""The types of values without rows."""


def row_ranges(rows: int, chunks: int) -> list[range]:
    """Divide rows into consecutive chunks. The numbers of rows differ by at most one, and the larger chunks come first.

    Args:
        rows: the number of rows.
        chunks: the number of chunks.

    Returns:
        The row numbers of each chunk, in order.
    """
    each, longer = divmod(rows, chunks)
    ends = accumulate((each + (chunk < longer) for chunk in range(chunks)), initial=0)
    return [range(start, end) for start, end in pairwise(ends)]


def rows_of(batch: object) -> int:
    """Return the number of rows of a batch. All its lists, tensors and arrays must have the same number.

    Raises:
        DispatchError: the batch has no list, tensor or array, two of them differ in their number of rows, or a value is
            of a type that cannot be split.
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


def split(batch: T, ranges: Sequence[range]) -> list[T]:
    """Return one batch for each range of rows, with the structure of the given batch. Tensors are copied, because Ray
    would send a view with all its storage; arrays are views."""
    return [_mapped(lambda leaf, path, rows=rows: _cut(leaf, rows), [batch], "the batch") for rows in ranges]


def join(parts: Sequence[T]) -> T:
    """Join the results of all chunks into one, in order. The results may have any number of rows.

    Args:
        parts: the results, which must have the same structure.

    Raises:
        DispatchError: the structures differ, or a value without rows, such as a number, is not the same in all results.
    """
    joined: T = _mapped(_joined, parts, "the result")
    return joined


# --- structure ------------------------------------------------------------------------------------------------------


def fields_of(value: object) -> Mapping[Any, Any] | None:
    """Return the contents of a tuple, mapping or dataclass, by index, key or field name. Returns None for any other
    value, which is not taken apart when a batch is split."""
    if isinstance(value, tuple):
        return dict(zip(getattr(value, "_fields", range(len(value))), value, strict=True))
    if isinstance(value, Mapping):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return None


def _rebuilt(value: Any, fields: Mapping[Any, Any]) -> Any:
    """Return a tuple, mapping or dataclass of the class of `value` with other contents. The constructor of a mapping or
    dataclass is not called, since it could compute something.

    Raises:
        DispatchError: `value` is a mapping that cannot be changed.
    """
    if isinstance(value, tuple):
        return type(value)(*fields.values()) if hasattr(value, "_fields") else tuple(fields.values())
    if type(value) is dict:
        return dict(fields)
    made = copy.copy(value)
    if not isinstance(value, Mapping):
        for key, field in fields.items():
            object.__setattr__(made, key, field)  # frozen dataclasses too
        return made
    try:
        for key, field in fields.items():
            made[key] = field
    except TypeError:
        raise DispatchError(f"A batch of type {type(value).__name__} cannot be changed; pass a dict.") from None
    return made


def _mapped(leaf: Callable[..., Any], values: Sequence[Any], path: str) -> Any:
    """Apply a function to the corresponding innermost values of several nested objects, and return the results in the
    same structure.

    Args:
        leaf: the function; it gets one value of each object, and the path of these values as text.
        values: the objects, which must have the same structure.
        path: the path of the objects, for messages.

    Raises:
        DispatchError: the structures differ.
    """
    first = values[0]
    fields = fields_of(first)
    if fields is None:
        return leaf(*values, path)
    found = [fields]
    for number, value in enumerate(values[1:], 1):
        others = fields_of(value) if type(value) is type(first) else None
        if others is None or others.keys() != fields.keys():
            raise _unlike(path, first, value, number)
        found.append(others)
    return _rebuilt(first, {k: _mapped(leaf, [each[k] for each in found], f"{path}[{k!r}]") for k in fields})


def _unlike(path: str, first: object, value: object, number: int) -> DispatchError:
    """Return the error for two results that differ in structure.

    Args:
        path: where they differ.
        first: the part of chunk 0's result.
        value: the part of another chunk's result.
        number: the number of that chunk.
    """

    def described(one: object) -> str:
        fields = fields_of(one)
        return type(one).__name__ + (f" of {list(fields)}"[:120] if fields is not None else "")

    return DispatchError(
        f"Results cannot be joined: {path} of chunk 0 is {described(first)}, of chunk {number} {described(value)}. "
        "Return the same structure for every chunk."
    )


# --- leaves ---------------------------------------------------------------------------------------------------------


def _kind(leaf: object) -> Literal["list", "tensor", "array"] | None:
    """Return what kind of rows a value has; None for a value without rows. Imports neither torch nor NumPy."""
    if isinstance(leaf, list):
        return "list"
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and isinstance(leaf, torch.Tensor) and leaf.ndim:
        return "tensor"
    return "array" if numpy is not None and isinstance(leaf, numpy.ndarray) and leaf.ndim else None


def _counts(value: Any, path: str) -> Iterator[tuple[str, int]]:
    """Yield the path and the number of rows of every list, tensor and array in a batch.

    Raises:
        DispatchError: a value can neither be split nor passed to every worker as it is.
    """
    fields = fields_of(value)
    if fields is not None:
        for key, field in fields.items():
            yield from _counts(field, f"{path}[{key!r}]")
    elif _kind(value) is not None:
        yield path, len(value)
    elif not isinstance(value, SINGLES) and getattr(value, "ndim", None) != 0:
        raise DispatchError(
            f"{path} is a {type(value).__name__}, which has no rows that could be split. Use lists, tensors, arrays, "
            "tuples, dicts and dataclasses in a batch, or pass it as a further argument, which every worker gets as it "
            "is."
        )


def _cut(leaf: Any, rows: range) -> Any:
    """Return some rows of a value; a value without rows is returned as it is."""
    kind = _kind(leaf)
    if kind is None:
        return leaf
    piece = leaf[rows.start : rows.stop]
    return piece.clone() if kind == "tensor" else piece


def _joined(*values_and_path: Any) -> Any:
    """Join the values that stand at the same path in the nested results of all chunks (the parts of a batch, one for
    each worker). Lists, tensors and arrays are concatenated along their rows. Any other value has no rows, such as a
    number: it must be equal in all results and is returned as it is.

    Args:
        values_and_path: one value from each result, and last their path as text, for messages.

    Raises:
        DispatchError: the values differ in type, or values without rows are not equal.
    """
    *values, path = values_and_path
    first = values[0]
    for number, value in enumerate(values[1:], 1):
        if type(value) is not type(first):
            raise _unlike(path, first, value, number)
        if _kind(first) is None and not _same(first, value):
            raise DispatchError(  # dropping one of them would go unnoticed
                f"Results cannot be joined: {path} has no rows and differs, {first!r} of chunk 0 and {value!r} of "
                f"chunk {number}. Return it per row, or register the method as 'one_to_all', which returns a list."
            )
    if len(values) == 1 or _kind(first) is None:
        return first
    filled = [value for value in values if len(value)] or [first]  # an empty one often has another dtype or shape
    if _kind(first) == "list":
        return [row for value in filled for row in value]
    if _kind(first) == "tensor":
        import torch

        return torch.cat(filled)
    import numpy

    return numpy.concatenate(filled)


def _same(first: object, second: object) -> bool:
    """Return whether two values are equal, where NaN equals NaN."""
    if first is second or (first != first and second != second):  # NaN
        return True
    return bool(first == second)
