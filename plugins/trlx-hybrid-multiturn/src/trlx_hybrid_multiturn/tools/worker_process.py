"""What runs in a tool's process: takes functions and calls over a socket, sends back what became of them.

Run by its path, outside the package. Messages stand behind their length. Those to it are pickles; what it sends is
plain data (`trlx_hybrid.plain_data`), so that the trainer opens no pickle of a process that runs what a model wrote:

    to it:   sys.path, then ("load", number, pickled function) and ("call", number, arguments)
    from it: {"kind": …, "content": …, "cpu_seconds": …}; kinds are "ready", "loaded", "refused" (a text), "value" (what
             the model is shown), "unshowable" (a text) and "error" (see `trlx_hybrid.remote_errors`)
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import io
import os
import pickle
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from typing import Any

LENGTH = struct.Struct(">Q")
FUNCTIONS = 64  # kept in a process; with more, the one that came first is forgotten, here and by the pool
PLAIN = "Return plain data, or run it in threads."


class UnshowableError(Exception):
    """A tool's result cannot be turned into a string, so the model cannot be shown it."""


def send(channel: socket.socket, message: bytes) -> None:
    """Write one message. A timeout of the socket holds for each half, and raises `TimeoutError`."""
    channel.sendall(LENGTH.pack(len(message)))
    channel.sendall(message)


def receive(channel: socket.socket, until: float | None = None) -> bytearray:
    """Read one message.

    Args:
        until: `time.monotonic()` at which to give up; None waits for ever.

    Raises:
        EOFError: the other side has gone.
        TimeoutError: `until` has passed.
    """
    (length,) = LENGTH.unpack(_read(channel, LENGTH.size, until))
    return _read(channel, length, until)


def _read(channel: socket.socket, length: int, until: float | None) -> bytearray:
    data = bytearray(length)
    rest = memoryview(data)
    while rest:
        if until is not None:
            left = until - time.monotonic()
            if left <= 0:
                raise TimeoutError
            channel.settimeout(left)
        count = channel.recv_into(rest)
        if not count:
            raise EOFError
        rest = rest[count:]
    return data


def main(descriptor: int, parent: int) -> None:
    """Serve until the other side goes.

    Args:
        descriptor: of this side's end of the socket.
        parent: process id of the trainer.
    """
    channel = socket.socket(fileno=descriptor)
    channel.set_inheritable(False)  # what a tool starts must not keep the trainer waiting after this process crashed
    _end_with(parent)
    faulthandler.enable()  # a tool's segfault shows its Python stack
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # the trainer's stderr: prints appear when they are made
    del sys.argv[1:]
    functions: dict[int, Callable[..., Any]] = {}
    with contextlib.suppress(EOFError, ConnectionError):
        sys.path[:] = pickle.loads(receive(channel))
        send(channel, _packed("ready"))
        while True:
            send(channel, _answer(receive(channel), functions))


def as_shown(value: Any) -> Any:
    """A tool's result as TRL shows it to the model: content blocks as they are, all else as a string."""
    if isinstance(value, list):
        return value
    try:
        return str(value)
    except Exception as error:
        raise UnshowableError(
            f"the result, a {type(value).__qualname__}, cannot be turned into a string: {type(error).__name__}: {error}"
        ) from error


def _answer(message: bytearray, functions: dict[int, Callable[..., Any]]) -> bytes:
    try:
        kind, number, content = pickle.loads(message)
    except Exception as error:
        return _packed(
            "refused", f"cannot be given its arguments in a process: {_described(error)}. Run it in threads."
        )
    del message
    if kind == "load":
        return _load(number, content, functions)
    started = time.process_time()
    try:
        value = as_shown(functions[number](**content))
    except UnshowableError as error:
        return _packed("unshowable", str(error), time.process_time() - started)
    except BaseException as error:  # a tool's own SystemExit is its error, not the end of this process
        from trlx_hybrid.remote_errors import describe

        return _packed("error", describe(error), time.process_time() - started)
    seconds = time.process_time() - started
    try:
        return _packed("value", value, seconds)
    except TypeError:
        return _packed("refused", f"returned {_not_plain(value)} from its process. {PLAIN}")


def _load(number: int, pickled: bytes, functions: dict[int, Callable[..., Any]]) -> bytes:
    if len(functions) >= FUNCTIONS:
        del functions[next(iter(functions))]
    try:
        functions[number] = pickle.loads(pickled)
    except BaseException as error:  # a module may even exit when it is imported
        return _packed(
            "refused",
            f"cannot be loaded in a process of its own: {_described(error)}. Define it in a module that can be "
            "imported there, or run it in threads.",
        )
    return _packed("loaded")


def _not_plain(value: Any) -> str:
    from trlx_hybrid import plain_data

    try:
        plain_data.dumps(value)
    except plain_data.NotPlainError as error:
        return str(error)
    return "what cannot be sent"


def _packed(kind: str, content: Any = None, cpu_seconds: float = 0.0) -> bytes:
    from trlx_hybrid import plain_data  # here: where it lies is known from sys.path as sent

    return plain_data.dumps({"kind": kind, "content": content, "cpu_seconds": cpu_seconds})


def _described(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # its text is anybody's code
        return type(error).__name__


def _end_with(parent: int) -> None:
    """Have Linux kill this process when the trainer dies: amid a tool nobody reads the socket, which would tell too."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:  # it died before that call
        sys.exit()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
