"""Excerpts of tools' results that are too long: the beginning, with a note to the model that says how much is shown."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

CHARACTERS = 1 << 20  # the default limit of an answer
NOTE = 200  # the largest number of characters of a note


def excerpt(content: Any, characters: int) -> Any:
    """Return a text, or a list of content blocks, as it is if it has at most `characters` characters; else its
    beginning, with a note.

    The note is the last line of a text or the last item of a list, and counts towards the limit. In a list only texts
    and text blocks are cut; the first other item that exceeds the limit is left out, with all that follow it.

    Args:
        content: a tool's result; one that is neither a text nor a list is returned as it is.
        characters: the largest number of characters, more than `NOTE`.
    """
    kept = characters - NOTE
    if isinstance(content, str) and len(content) > characters:
        return f"{content[:kept]}\n[This answer was cut: {kept:,} of its {len(content):,} characters are shown.]"
    if not isinstance(content, list) or _size(content, characters) <= characters:
        return content
    items, left = [], kept
    for item in content:
        if (size := _size(item, left)) > left:
            items += _cut(item, left)
            break
        items.append(item)
        left -= size
    note = f"[This answer was cut: its first {kept:,} characters are shown.]"
    return [*items, note if items and isinstance(items[-1], str) else {"type": "text", "text": note}]


def _cut(item: Any, characters: int) -> list[Any]:
    """Return the first `characters` characters of a text or a text block, as a list of one item; an empty list for any
    other item."""
    if isinstance(item, str):
        return [item[:characters]]
    if isinstance(item, Mapping) and isinstance(item.get("text"), str):
        return [{**item, "text": item["text"][:characters]}]
    return []


def _size(value: Any, enough: int) -> int:
    """Return the number of characters of all texts in a value, to any depth; anything else counts as one character. The
    count stops above `enough`, since a list may contain itself."""
    size, inside = 0, [iter((value,))]
    while inside and size <= enough:
        item = next(inside[-1], inside)
        if item is inside:
            inside.pop()
            continue
        size += len(item) if isinstance(item, str | bytes) else 1
        if isinstance(item, Mapping):
            inside.append(chain.from_iterable(item.items()))
        elif isinstance(item, list | tuple | set | frozenset):
            inside.append(iter(item))
    return size
