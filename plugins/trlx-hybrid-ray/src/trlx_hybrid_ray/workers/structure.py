"""Nested data: which values are structure and which are leaves, and a walk over several alike values at once."""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .failure import DispatchError


def fields_of(value: Any, lists: bool = False) -> Mapping[Any, Any] | None:
    """What a structure holds, by path suffix; None for a leaf. Lists are leaves unless `lists` says otherwise."""
    if lists and isinstance(value, list):
        return dict(enumerate(value))
    if isinstance(value, tuple):
        names = getattr(value, "_fields", range(len(value)))
        return dict(zip(names, value, strict=True))
    if isinstance(value, Mapping):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return None


def rebuilt(value: Any, fields: Mapping[Any, Any]) -> Any:
    """A structure like `value`, without calling its constructor where that could compute."""
    if isinstance(value, list):
        return list(fields.values())
    if isinstance(value, tuple):
        return type(value)(*fields.values()) if hasattr(value, "_fields") else tuple(fields.values())
    if type(value) is dict:
        return dict(fields)
    made = copy.copy(value)
    if isinstance(value, Mapping):
        try:
            for key, field in fields.items():
                made[key] = field
        except TypeError:
            raise DispatchError(f"A batch of type {type(value).__name__} cannot be changed; pass a dict.") from None
    else:
        for key, field in fields.items():
            object.__setattr__(made, key, field)  # frozen dataclasses too
    return made


def mapped(leaf: Callable[..., Any], values: Sequence[Any], path: str, *, lists: bool = False) -> Any:
    """`leaf(value, ..., path)` for the corresponding leaves of values that are alike."""
    first = values[0]
    fields = fields_of(first, lists)
    if fields is None:
        return leaf(*values, path)
    found = [fields]
    for number, value in enumerate(values[1:], 1):
        others = fields_of(value, lists) if type(value) is type(first) else None
        if others is None or others.keys() != fields.keys():
            raise unlike(path, first, value, number)
        found.append(others)
    made = {key: mapped(leaf, [each[key] for each in found], f"{path}[{key!r}]", lists=lists) for key in fields}
    return rebuilt(first, made)


def unlike(path: str, first: Any, value: Any, number: int) -> DispatchError:
    """Of the results at one place, that of a chunk is something else than the first."""
    return DispatchError(
        f"Results cannot be joined: {path} of chunk 0 is {described(first)}, of chunk {number} {described(value)}. "
        "Return the same structure for every chunk."
    )


def described(value: Any) -> str:
    """A value's type, and what it is made of."""
    fields = fields_of(value)
    return type(value).__name__ + (f" of {list(fields)}"[:120] if fields is not None else "")


def is_tensor(value: Any) -> bool:
    """Without importing torch: who has no torch has no tensor."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def is_array(value: Any) -> bool:
    """Without importing NumPy."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)
