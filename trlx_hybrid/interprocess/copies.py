"""Copies of a batch's data for the user's functions, such as reward functions, so that a function that changes its
arguments does not change what is trained on, recorded or shown."""

from __future__ import annotations

import sys
from typing import Any

SCALARS = frozenset({int, float, bool, str, bytes, type(None)})
"""Immutable types, whose values need no copy."""


def copied(value: Any) -> Any:
    """Return a deep copy of a value: of lists, dicts, tuples, sets, arrays, tensors and PIL images in it.

    A tensor is detached. Objects of other classes are not copied: a dataset column may hold a client or a lock, and no
    such object is trained on. A list of a million token ids takes some 10 ms.
    """
    kind = type(value)
    if kind in SCALARS:
        return value
    if kind is list or kind is tuple:
        return kind(value) if SCALARS.issuperset(map(type, value)) else kind(copied(entry) for entry in value)
    if isinstance(value, dict):
        return {key: copied(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [copied(entry) for entry in value]
    if isinstance(value, set | bytearray):
        return kind(value)
    if isinstance(value, _imported("torch", "Tensor")):
        return value.detach().clone()
    if isinstance(value, _imported("numpy", "ndarray")) or kind.__module__.startswith("PIL."):
        return value.copy()
    return value


def _imported(module: str, name: str) -> Any:
    """Return a class of a module, or () if the module has not been imported. Both can be given to `isinstance`, which
    is False for every object with (). Without the module there is no object of the class.

    The module is not imported, because copies are also made in workers of rewards and environments, which would
    spend a second of CPU time on importing torch.
    """
    return getattr(sys.modules.get(module), name, ())
