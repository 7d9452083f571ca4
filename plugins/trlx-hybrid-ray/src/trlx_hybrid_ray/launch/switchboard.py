"""The launcher's end of the wires to all wardens."""

from __future__ import annotations

import json
import secrets
import selectors
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from signal import Signals
from typing import Any

from .frames import Kind, Unpacker, packed
from .rendezvous import bound
from .warden import accepted

SEND_SECONDS = 5.0
GREETING_SECONDS = 10.0
CHUNK = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """Something that a warden said.

    Attributes:
        actor: which rank's.
        event: "connected", "output", "beat", "gone" where its connection broke, or the event of a note.
        error: for output: it was standard error.
        data: for output: the bytes.
        fields: of a note; "time" among them is on this machine's clock.
    """

    actor: int
    event: str
    error: bool = False
    data: bytes = b""
    fields: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class _Line:
    connection: socket.socket
    opened: float
    unpacker: Unpacker = field(default_factory=Unpacker)
    actor: int | None = None
    clock: float = 0.0  # seconds by which the node's clock is behind ours


class Switchboard:
    """Accepts wardens that know the secret, and no one else.

    Attributes:
        host, port: where it listens.
        secret: what a warden has to show.
        seats: one name per actor, by which its warden says whose it is.
    """

    def __init__(self, host: str, actors: int) -> None:
        self.host = host
        self.secret = secrets.token_hex(32)
        self.seats = tuple(secrets.token_hex(8) for _ in range(actors))
        self._listener = bound(host)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._lines: dict[int, _Line] = {}  # by descriptor
        self._by_actor: dict[int, _Line] = {}

    def poll(self, seconds: float) -> list[Message]:
        """What has been said, in each warden's order; waits up to `seconds` for the first."""
        messages: list[Message] = []
        for key, _ in self._selector.select(seconds):
            if key.fileobj is self._listener:
                self._accept()
            elif key.fd in self._lines:
                messages += self._hear(self._lines[key.fd])
        now = time.monotonic()
        for line in [line for line in self._lines.values() if line.actor is None]:
            if now - line.opened > GREETING_SECONDS:
                self._drop(line)
        return messages

    def connected(self, actor: int) -> bool:
        """Whether this actor's warden is on the line."""
        return actor in self._by_actor

    def send(self, actor: int, which: Signals) -> bool:
        """Have a rank sent a signal; False where its warden is not on the line."""
        line = self._by_actor.get(actor)
        if line is None:
            return False
        try:
            line.connection.sendall(packed(Kind.SIGNAL, str(int(which)).encode()))
        except OSError:  # `poll` will say that it is gone
            return False
        return True

    def close(self) -> None:
        """Hang up. Wardens that are still there end their ranks."""
        for line in list(self._lines.values()):
            self._drop(line)
        self._selector.close()
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            connection, _ = self._listener.accept()
            connection.settimeout(SEND_SECONDS)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            self._lines[connection.fileno()] = _Line(connection, time.monotonic())
            self._selector.register(connection, selectors.EVENT_READ)

    def _hear(self, line: _Line) -> list[Message]:
        try:
            data = line.connection.recv(CHUNK)
            frames = line.unpacker.feed(data)
        except (OSError, ValueError):
            data, frames = b"", []
        messages: list[Message] = []
        for kind, payload in frames:
            if line.actor is None:
                if not self._greeted(line, kind, payload):
                    self._drop(line)
                    return []
                messages.append(Message(actor=line.actor or 0, event="connected"))
            else:
                messages.append(_message(line.actor, line.clock, kind, payload))
        if not data:
            self._drop(line)
            if line.actor is not None:
                messages.append(Message(actor=line.actor, event="gone"))
        return messages

    def _greeted(self, line: _Line, kind: Kind, payload: bytes) -> bool:
        fields = accepted(payload, self.secret) if kind is Kind.HELLO else None
        if fields is None or fields["seat"] not in self.seats:
            return False
        line.actor = self.seats.index(fields["seat"])
        line.clock = time.time() - float(fields["clock"])
        self._by_actor[line.actor] = line
        return True

    def _drop(self, line: _Line) -> None:
        self._selector.unregister(line.connection)
        del self._lines[line.connection.fileno()]
        if line.actor is not None:
            del self._by_actor[line.actor]
        line.connection.close()


def _message(actor: int, clock: float, kind: Kind, payload: bytes) -> Message:
    if kind in (Kind.OUT, Kind.ERR):
        return Message(actor=actor, event="output", error=kind is Kind.ERR, data=payload)
    if kind is Kind.NOTE:
        fields = json.loads(payload)
        if "time" in fields:
            fields["time"] += clock
        return Message(actor=actor, event=fields.pop("event"), fields=fields)
    return Message(actor=actor, event="beat")


def reachable_host(addresses: Sequence[str]) -> str:
    """The address to listen on so that ranks at `addresses`, and nobody who need not, can connect.

    Loopback where all are on this machine's loopback; otherwise this node's address in the cluster.
    """
    import ray

    own = str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
    return "127.0.0.1" if all(address.startswith("127.") for address in addresses) else own
