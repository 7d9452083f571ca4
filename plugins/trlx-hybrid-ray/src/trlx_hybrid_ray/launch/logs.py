"""What the ranks print, on one terminal: each line with its rank in front, whole, and in its rank's order."""

from __future__ import annotations

import codecs
import re
import time
from dataclasses import dataclass, field
from typing import BinaryIO

PIECES = re.compile(r"[^\r\n]*(?:\r\n|\n|\r)")
PATIENCE = (
    0.3  # seconds after which an unfinished line is shown as it is: a progress bar ends its line when it moves on
)


@dataclass(slots=True)
class _Source:
    decoder: codecs.IncrementalDecoder = field(default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace"))
    rest: str = ""
    since: float = 0.0
    open: bool = False  # its unfinished line is on the screen already


class Printer:
    """Puts ranks' output together. Output that no rank has finished with a newline is kept apart from others' lines."""

    def __init__(self, ranks: int, out: BinaryIO, err: BinaryIO) -> None:
        width = len(str(ranks - 1))
        self._prefixes = [f"[rank {rank:>{width}}] " for rank in range(ranks)]
        self._sinks = {False: out, True: err}
        self._sources: dict[tuple[int, bool], _Source] = {}
        self._open: tuple[int, bool] | None = None  # whose unfinished line the cursor is in

    def write(self, rank: int, error: bool, data: bytes) -> None:
        """Bytes as they come from a rank's standard output or error, cut anywhere."""
        key = rank, error
        source = self._sources.setdefault(key, _Source())
        text = source.rest + source.decoder.decode(data)
        end = 0
        for match in PIECES.finditer(text):
            end = match.end()
            self._line(key, source, match.group())
        source.rest, source.since = text[end:], time.monotonic()
        self._flush(error)

    def tick(self) -> None:
        """Show unfinished lines that have stood for a while."""
        for key, source in self._sources.items():
            if source.rest and time.monotonic() - source.since >= PATIENCE:
                self._line(key, source, source.rest)
                source.rest = ""
                self._flush(key[1])

    def close(self) -> None:
        """Show what is left, and leave the cursor at the start of a line."""
        for key, source in self._sources.items():
            source.rest += source.decoder.decode(b"", final=True)
            if source.rest:
                self._line(key, source, source.rest)
                source.rest = ""
        self._break()
        for error in self._sinks:
            self._flush(error)

    def _line(self, key: tuple[int, bool], source: _Source, text: str) -> None:
        if self._open != key:
            self._break()
        if not source.open and text.strip("\r\n") == "" and text == "\r":
            return  # a progress bar goes to the start of a line that it has not begun
        prefix = "" if source.open else self._prefixes[key[0]]
        self._sinks[key[1]].write((prefix + text).encode("utf-8", "replace"))
        source.open = not text.endswith(("\n", "\r"))
        self._open = key if source.open or text.endswith("\r") else None

    def _break(self) -> None:
        """End the unfinished line that somebody else's must not be appended to."""
        if self._open is not None:
            self._sources[self._open].open = False
            self._sinks[self._open[1]].write(b"\n")
            self._open = None

    def _flush(self, error: bool) -> None:
        self._sinks[error].flush()
