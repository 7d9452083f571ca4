"""The printer of all ranks' output on the launcher's terminal. Lines of different ranks are never mixed, lines of one
rank keep their order, and each begins with its node and rank."""

from __future__ import annotations

import codecs
import os
import queue
import re
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import BinaryIO

PIECES = re.compile(r"[^\r\n]*(?:\r\n|\n|\r)|[^\r\n]+")
PATIENCE = 0.3  # seconds until an unfinished line is printed: a progress bar ends its line only with the next update
LONGEST = 1 << 16  # the most characters of an unfinished line that wait for its end
ROOM = 64 << 20  # bytes that may wait for a blocked terminal


def say(text: str) -> None:
    """Print a message of the launcher or of this package on standard error. If standard error is closed, nothing
    happens."""
    with suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


Source = tuple[int, int | None, bool]
"""The source of a piece of output: the node's number, the rank (None for accelerate itself), and whether it is standard
error."""
LAUNCHER: Source = (-1, None, True)


def prefixes(nodes: int, ranks_per_node: int) -> dict[tuple[int, int | None], str]:
    """Return the text that is put before each line of output, such as "[node 0 rank 3] ", by the node's number and the
    rank (None for `accelerate launch` itself). Ranks are numbered node by node."""
    width, found = len(str(nodes * ranks_per_node - 1)), dict[tuple[int, int | None], str]()
    for number in range(nodes):
        node = f"node {number} " if nodes > 1 else ""
        found[number, None] = f"[{node}accelerate] "
        for rank in range(number * ranks_per_node, (number + 1) * ranks_per_node):
            found[number, rank] = f"[{node}rank {rank:>{width}}] "
    return found


@dataclass(slots=True)
class _Line:
    """The unfinished line of one source (a rank's standard output or error), and the decoder of the source's bytes."""

    decoder: codecs.IncrementalDecoder = field(default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace"))
    rest: list[str] = field(default_factory=list)
    length: int = 0
    since: float = 0.0
    shown: bool = False  # its beginning is printed already


class Printer:
    """A printer of all ranks' output, line by line. It prints in a thread of its own, so that a blocked terminal delays
    neither the handling of signals nor the run.

    Args:
        names: the texts to put before lines, by node and rank, from `prefixes`. The launcher's own lines have none.
        out, err: the binary files for standard output and standard error, such as `sys.stdout.buffer`.
    """

    def __init__(self, names: Mapping[tuple[int, int | None], str], out: BinaryIO, err: BinaryIO) -> None:
        self._names = names
        self._sinks = {False: out, True: err}
        self._lines: dict[Source, _Line] = {}
        self._open: Source | None = None  # the source whose unfinished line the cursor is in
        self._queue: queue.SimpleQueue[tuple[Source, bytes] | None] = queue.SimpleQueue()
        self._taken = self._shown = 0  # bytes; each of the two counters is changed by one thread only
        self._thread = threading.Thread(target=self._run, name="prints", daemon=True)
        self._thread.start()

    @property
    def has_room(self) -> bool:
        """True while less than `ROOM` bytes wait to be printed. Otherwise the launcher asks the nodes for no more
        output."""
        return self._taken - self._shown < ROOM

    def write(self, source: Source, data: bytes) -> None:
        """Queue bytes that a rank printed. They may end anywhere, even within a character.

        Args:
            source: the node's number, the rank (None for `accelerate launch` itself), and whether it is standard error.
            data: the bytes.
        """
        self._taken += len(data)
        self._queue.put((source, data))

    def say(self, text: str) -> None:
        """Queue a line of the launcher's own for standard error. It is printed after all that was queued before."""
        self.write(LAUNCHER, f"{text}\n".encode())

    def close(self, seconds: float | None = None) -> bool:
        """Print what is queued, end an unfinished line, and end the printing thread. Returns whether that was done
        within `seconds` (None waits for ever)."""
        self._queue.put(None)
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def __enter__(self) -> Printer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- in the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            try:
                entry = self._queue.get(timeout=PATIENCE)
            except queue.Empty:
                self._show_unfinished(PATIENCE)
                continue
            if entry is None:
                break
            if entry[0] == LAUNCHER:
                self._show_unfinished(0.0)  # so that the launcher's last message is the last line
            self._add(*entry)
            self._shown += len(entry[1])
        for source, line in self._lines.items():
            self._keep(source, line, line.decoder.decode(b"", final=True))
        self._show_unfinished(0.0)
        self._break()
        self._flush()

    def _add(self, source: Source, data: bytes) -> None:
        line = self._lines.setdefault(source, _Line())
        for piece in PIECES.findall(line.decoder.decode(data)):
            self._keep(source, line, piece)
            if piece.endswith(("\n", "\r")) or line.length > LONGEST:
                self._show(source, line)
        self._flush()

    @staticmethod
    def _keep(source: Source, line: _Line, text: str) -> None:
        if text:
            line.rest.append(text)
            line.length += len(text)
            line.since = time.monotonic()

    def _show_unfinished(self, patience: float) -> None:
        for source, line in self._lines.items():
            if line.rest and time.monotonic() - line.since >= patience:
                self._show(source, line)
        self._flush()

    def _show(self, source: Source, line: _Line) -> None:
        text = "".join(line.rest)
        line.rest, line.length = [], 0
        if self._open != source:
            self._break()
        if text == "\r" and not line.shown:
            return  # a progress bar returns to the start of a line that it has not begun
        node, rank, error = source
        self._write(error, text if line.shown else self._names.get((node, rank), "") + text)
        line.shown = not text.endswith(("\n", "\r"))
        self._open = source if line.shown or text.endswith("\r") else None

    def _break(self) -> None:
        """End the line that is unfinished on the terminal, so that another rank's output is not appended to it."""
        if self._open is not None:
            self._lines[self._open].shown = False
            self._write(self._open[2], "\n")
            self._open = None

    def _write(self, error: bool, text: str) -> None:
        try:
            self._sinks[error].write(text.encode("utf-8", "replace"))
        except OSError as why:
            self._lose(error, why)

    def _flush(self) -> None:
        for error, sink in list(self._sinks.items()):
            try:
                sink.flush()
            except OSError as why:
                self._lose(error, why)

    def _lose(self, error: bool, why: OSError) -> None:
        """Replace standard output or standard error with /dev/null after a failed write, so that the run goes on. The
        reader may be gone (`| head -1`), or the disk full.

        Args:
            error: whether it is standard error.
            why: the error of the write, for the message.
        """
        name = "standard error" if error else "standard output"
        with suppress(OSError):
            sink = self._sinks[error]
            os.dup2(os.open(os.devnull, os.O_WRONLY), sink.fileno())  # Python still flushes its buffer to it at exit
            sink.flush()
        say(f"{name} takes no more ({why.strerror}): what ranks print there is lost from here on. The run goes on.")
