"""The beginning of a tool's long answer, and a note to the model that says how much it is."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

CHARACTERS = 1 << 20  # of an answer, where nobody says how many
NOTE = 200  # characters that a note takes at most


def excerpt(content: Any, characters: int) -> Any:
    """A text, or a list of content blocks, as it is where it has at most so many characters; else its beginning.

    The note is the last line of a text and the last item of a list, and is within the limit. In a list only texts and
    blocks of text are cut; the first other item that leads beyond the limit is left out, with all that follow it.

    Args:
        content: what a tool answered. Of another type it is returned as it is.
        characters: more than `NOTE`.
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
    """The beginning of a text or of a block of text; nothing of another item."""
    if isinstance(item, str):
        return [item[:characters]]
    if isinstance(item, Mapping) and isinstance(item.get("text"), str):
        return [{**item, "text": item["text"][:characters]}]
    return []


def _size(value: Any, enough: int) -> int:
    """Characters of all texts in a value, all else counted as one. Stops above `enough`: a list may hold itself."""
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
