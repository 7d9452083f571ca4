"""What a warden and the launcher send each other: small framed messages over one TCP connection.

A frame is one byte of kind, four bytes of length and that many bytes of payload. Nothing is unpickled: payloads are raw
output, JSON, or a signal number.
"""

from __future__ import annotations

import json
import struct
from enum import Enum
from typing import Any

HEADER = struct.Struct("!cI")
LONGEST = 16 << 20  # bytes; what is longer was not sent by a warden


class Kind(Enum):
    """What a frame carries."""

    HELLO = b"h"
    """First frame of a warden: JSON with the secret, the seat, and the node's clock."""
    OUT = b"o"
    """Bytes that a rank wrote to its standard output."""
    ERR = b"e"
    """Bytes that a rank wrote to its standard error."""
    NOTE = b"n"
    """JSON: something happened to a rank."""
    BEAT = b"b"
    """Nothing happened: the warden is there."""
    SIGNAL = b"s"
    """To a warden: the number of the signal its rank is to get."""


Frame = tuple[Kind, bytes]


def packed(kind: Kind, payload: bytes = b"") -> bytes:
    """A frame, ready to be sent."""
    return HEADER.pack(kind.value, len(payload)) + payload


def note(event: str, **fields: Any) -> bytes:
    """A NOTE frame. `fields` must be JSON."""
    return packed(Kind.NOTE, json.dumps({"event": event, **fields}).encode())


class Unpacker:
    """Puts frames together again from whatever pieces a socket delivers."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[Frame]:
        """The frames that are complete now, in order.

        Raises:
            ValueError: the peer speaks another language.
        """
        self._rest += data
        frames: list[Frame] = []
        while len(self._rest) >= HEADER.size:
            kind, length = HEADER.unpack_from(self._rest)
            if length > LONGEST:
                raise ValueError(f"a frame of {length} bytes")
            if len(self._rest) < HEADER.size + length:
                break
            frames.append((Kind(kind), bytes(self._rest[HEADER.size : HEADER.size + length])))
            del self._rest[: HEADER.size + length]
        return frames
