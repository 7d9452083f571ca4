"""A small process beside each rank: carries its output, says when it dies, ends it, and cleans up after it.

It is no child of the rank, of its Ray worker or of the raylet, so it outlives all three; that is what makes the last
line of a killed process arrive, its death known within milliseconds, and its children and shared memory go. Were this a
thread, it would die with what it watches; were it a Ray actor, with the node's raylet.

    rank ──stdout, stderr──▶ warden ──frames──▶ launcher       and back: signals
         ──control─────────▶                                   either end gone: the rank ends

Standard library only: it costs 12 MB and starts in 50 ms.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import select
import selectors
import signal
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from . import leftovers
from .frames import Kind, Unpacker, note, packed

TICK = 0.1  # seconds between looks at shared memory
BEAT = 1.0  # seconds between signs of life
CHILDREN_GRACE = 2.0  # seconds that a dead rank's children have to end by themselves
LONELY_GRACE = 5.0  # seconds between SIGTERM and SIGKILL when the launcher is gone
UNREACHABLE = 120_000  # milliseconds until a launcher that acknowledges nothing counts as gone
CONNECT = 15.0  # seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class WardenOrder:
    """What a warden has to know. Travels over a pipe, so that no secret shows in a list of processes.

    Attributes:
        host, port: where the launcher listens.
        secret: what proves to it that we are its.
        seat: which of its actors this is.
        pid: the rank's process.
        raylet: the process of its node's raylet.
        out, err, control: descriptors to read the rank's output and its notes from.
    """

    host: str
    port: int
    secret: str
    seat: str
    pid: int
    raylet: int
    out: int
    err: int
    control: int

    def as_line(self) -> bytes:
        """One line of JSON."""
        return json.dumps(asdict(self)).encode() + b"\n"


def greeting(order: WardenOrder) -> bytes:
    """The first frame."""
    fields = {"secret": order.secret, "seat": order.seat, "pid": order.pid, "clock": time.time()}
    return packed(Kind.HELLO, json.dumps(fields).encode())


def accepted(payload: bytes, secret: str) -> dict[str, Any] | None:
    """The fields of a greeting, or None where the secret is wrong."""
    try:
        fields = json.loads(payload)
        right = hmac.compare_digest(str(fields["secret"]).encode(), secret.encode())
    except (ValueError, KeyError, TypeError):
        return None
    return fields if right else None


class Warden:
    """Watches one rank until it and all that it left are gone."""

    def __init__(self, order: WardenOrder, connection: socket.socket) -> None:
        self._order = order
        self._connection = connection
        self._rank = os.pidfd_open(order.pid)
        self._segments = leftovers.Segments()
        self._unpacker = Unpacker()
        self._notes = b""
        self._launcher_gone = False
        self._kill_at = float("inf")

    def run(self) -> None:
        """Carry until the rank has ended, then clean up. Returns when nothing of it is left."""
        with selectors.DefaultSelector() as selector:
            for source in (self._order.out, self._order.err, self._order.control, self._rank, self._connection):
                selector.register(source, selectors.EVENT_READ)
            beat = 0.0
            while self._alive():
                for key, _ in selector.select(TICK):
                    if not self._serve(key.fd):
                        selector.unregister(key.fileobj)
                self._segments.look(self._order.pid, self._order.seat)
                now = time.monotonic()
                if now >= beat:
                    beat = now + BEAT
                    self._send(packed(Kind.BEAT))
                if now >= self._kill_at:
                    self._signal(signal.SIGKILL)
        died = time.time()
        raylet_died = not leftovers.alive(self._order.raylet)
        self._drain()
        self._send(note("ended", time=died, raylet_died=raylet_died))
        killed = leftovers.end(self._order.pid, self._order.seat, CHILDREN_GRACE)
        removed = self._segments.remove()
        self._drain()
        self._send(note("swept", killed=killed, segments=removed))
        self._connection.close()

    def _alive(self) -> bool:
        return not select.select([self._rank], [], [], 0)[0]

    def _serve(self, source: int) -> bool:
        """Move what has arrived; False once nothing more can come from there."""
        if source == self._rank:
            return False
        if source == self._connection.fileno():
            return self._listen()
        data = os.read(source, 1 << 16)
        if source == self._order.control:
            self._notes += data
            *lines, self._notes = self._notes.split(b"\n")
            for line in lines:
                self._send(packed(Kind.NOTE, line))
        elif data:
            self._send(packed(Kind.OUT if source == self._order.out else Kind.ERR, data))
        return bool(data)

    def _listen(self) -> bool:
        try:
            data = self._connection.recv(1 << 12)
        except OSError:
            data = b""
        if not data:
            self._lonely()
            return False
        for kind, payload in self._unpacker.feed(data):
            if kind is Kind.SIGNAL:
                self._signal(signal.Signals(int(payload)))
        return True

    def _lonely(self) -> None:
        """Nobody is left whom the rank works for."""
        if not self._launcher_gone:
            self._launcher_gone = True
            self._signal(signal.SIGTERM)
            self._kill_at = time.monotonic() + LONELY_GRACE

    def _signal(self, which: signal.Signals) -> None:
        self._segments.look(self._order.pid, self._order.seat)
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._rank, which)

    def _send(self, frame: bytes) -> None:
        """Blocks while the launcher does not read: the rank's output waits as it would in front of a full pipe."""
        if not self._launcher_gone:
            try:
                self._connection.sendall(frame)
            except OSError:
                self._lonely()

    def _drain(self) -> None:
        """What still lies in the pipes. Somebody else may hold their other end, so this must not wait."""
        for source in (self._order.control, self._order.out, self._order.err):
            os.set_blocking(source, False)
            for _ in _until_empty(source, self._serve):
                pass


def _until_empty(source: int, serve: Any) -> Iterator[None]:
    with contextlib.suppress(BlockingIOError):
        while serve(source):
            yield


def connect(order: WardenOrder) -> socket.socket:
    """A connection on which a peer that vanishes without a word is noticed.

    Raises:
        OSError: nobody listens there, or nothing gets through.
    """
    connection = socket.create_connection((order.host, order.port), timeout=CONNECT)
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNREACHABLE)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10)
    return connection


def main() -> None:
    """Started by the rank: reads a `WardenOrder` from standard input, and writes "ready" or what is wrong."""
    order = WardenOrder(**json.loads(sys.stdin.readline()))
    if os.fork():
        os._exit(0)
    os.setsid()
    for stop in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(stop, signal.SIG_IGN)
    try:
        connection = connect(order)
        connection.sendall(greeting(order))
        warden = Warden(order, connection)
    except OSError as error:
        print(f"{order.host}:{order.port}: {error}", flush=True)
        return
    print("ready", flush=True)
    with open(os.devnull, "r+b") as nothing:  # the rank reads our output to its end
        os.dup2(nothing.fileno(), 0)
        os.dup2(nothing.fileno(), 1)
    warden.run()


if __name__ == "__main__":
    main()
