"""A recorded trajectory for a reader: as text for a terminal, and as an HTML page (`as_html`)."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator

from .blocks import Block, blocks, facts, messages
from .page import as_html
from .record import Recorded

__all__ = ["as_html", "as_text"]

BOLD, DIM, RED, RESET = "\x1b[1m", "\x1b[2m", "\x1b[31m", "\x1b[0m"
SAMPLED, OBSERVED = "  ", "│ "  # also without colour, and in a copy, the first column tells them apart
FAILED = "✗ failed: no token of it is trained on"


def as_text(recorded: Recorded, *, colour: bool, width: int) -> str:
    """One trajectory as lines of at most `width` columns (at least 4), without a line break at the end.

    Sampled text is indented by two blanks; what the model was given or shown is dimmed, behind a bar. With `colour`
    False there is no escape code; asking for colour is the caller's decision (`NO_COLOR`, whether it is a terminal).
    """
    width = max(4, width)

    def painted(text: str, code: str, margin: str = "") -> Iterator[str]:
        for line in _lines(text, width - len(margin)):
            shown = margin + line if margin and line else (margin + line).rstrip()
            yield f"{code}{shown}{RESET}" if colour and code else shown

    title = " · ".join([f"trajectory {recorded.line}", *(f"{name} {value}" for name, value in facts(recorded))])
    lines = [*painted(title, BOLD), *painted(FAILED if recorded.failed else "", BOLD + RED)]
    for block in blocks(recorded):
        text = "".join(span.text for span in block.spans)
        lines += ["", *painted(_heading(block), BOLD)]
        lines += painted(text, "", SAMPLED) if block.kind == "sampled" else painted(text, DIM, OBSERVED)
    if recorded.failed and isinstance(recorded.completion, list):  # its mask cannot tell who said what; these can
        lines += ["", *painted("messages", BOLD)]
        for role, text in messages(recorded):
            own = role == "assistant"
            lines += [*painted(f"{role}:", BOLD, SAMPLED if own else OBSERVED)]
            lines += painted(text, "" if own else DIM, SAMPLED if own else OBSERVED)
    return "\n".join(lines)


def _heading(block: Block) -> str:
    if block.kind != "sampled":
        return block.label
    return " · ".join(filter(None, (f"turn {block.turn}", block.label, block.mean)))


def _lines(text: str, width: int) -> Iterator[str]:
    """`text` cut at its line breaks and at `width` columns, between words where that is possible."""
    if not text:
        return
    for line in text.removesuffix("\n").split("\n"):
        yield from _wrapped(line.expandtabs(4), width)


def _wrapped(line: str, width: int) -> Iterator[str]:
    """Pieces of at most `width` columns that put together are `line`."""
    piece, used = "", 0
    for word in re.findall(r"\S+|\s+", line):
        needed = sum(map(_columns, word))
        if used and used + needed > width and not word.isspace() and needed <= width:
            yield piece
            piece, used = "", 0
        for character in word:
            if used and used + _columns(character) > width:
                yield piece
                piece, used = "", 0
            piece, used = piece + character, used + _columns(character)
    yield piece


def _columns(character: str) -> int:
    """Columns that a terminal gives a character: 2 in East Asian scripts and for emoji, 0 for accents that combine.

    As Markus Kuhn's wcwidth has it, where the soft hyphen is seen.
    """
    if unicodedata.east_asian_width(character) in "WF":
        return 2
    return 0 if unicodedata.category(character) in ("Mn", "Me", "Cf") and character != "\N{SOFT HYPHEN}" else 1
