"""Handing a call to actors. What several of them get is put into the object store once, where it is large."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from .dispatch import Deal

LARGE = 96 << 10
"""Bytes from which one copy in the object store is cheaper than one in each call. Ray itself puts arguments there from
100 KiB, once for every call."""
WORD = 8
"""Bytes a number counts for."""


def at_least(value: Any, limit: int) -> bool:
    """Whether a value takes so many bytes or more, roughly. Looks at no more of it than it must."""
    pending, found = [value], 0
    while pending and found < limit:
        item = pending.pop()
        if isinstance(item, (str, bytes, bytearray)):
            found += len(item)
        elif isinstance(item, (list, tuple, set, frozenset)):
            pending.extend(_some(item, limit))
            found += WORD
        elif isinstance(item, Mapping):
            pending.extend(_some(item.keys(), limit))
            pending.extend(_some(item.values(), limit))
            found += WORD
        elif (size := getattr(item, "nbytes", None)) is not None:
            found += int(size)
        else:
            found += WORD
            pending.extend(_attributes(item))
    return found >= limit


def _some(items: Any, limit: int) -> Iterable[Any]:
    most = limit // WORD  # so many items reach the limit, whatever they are
    return items if len(items) <= most else [b"\0" * limit]


def _attributes(item: Any) -> Iterable[Any]:
    held = getattr(item, "__dict__", None)
    if held and not isinstance(item, type):
        return list(held.values())
    slots = getattr(type(item), "__slots__", ())
    return [getattr(item, name, None) for name in ((slots,) if isinstance(slots, str) else slots)]


def once(value: Any, receivers: int) -> Any:
    """The value, or a reference to the one copy of it that all receivers share."""
    if receivers < 2 or not at_least(value, LARGE):
        return value
    import ray

    return ray.put(value)


def sent(
    methods: Sequence[Callable[..., Any]], deal: Deal, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[Any]:
    """Call actors; the references to their answers, by position.

    Args:
        methods: `handle.method.remote`, by position.
        args, kwargs: what everyone gets.
    """
    receivers = len(methods)
    if receivers > 1:
        args = [once(value, receivers) for value in args]
        kwargs = {name: once(value, receivers) for name, value in kwargs.items()} if kwargs else kwargs
    if not deal.parcels:
        return [method(*args, **kwargs) for method in methods]
    each = receivers // len(deal.parcels)
    parcels = [once(parcel, each) for parcel in deal.parcels] if each > 1 else deal.parcels
    if not deal.keywords:
        return [
            method(parcels[parcel], *args, **kwargs) for method, parcel in zip(methods, deal.parcel_of, strict=True)
        ]
    return [
        method(parcels[parcel], *args, **kwargs, **deal.keywords[parcel])
        for method, parcel in zip(methods, deal.parcel_of, strict=True)
    ]
