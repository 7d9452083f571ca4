"""What runs in a tool's process: takes functions and calls over a socket, sends back what became of them.

Run by its path, outside the package, with nothing imported but the standard library and cloudpickle; what a tool needs
comes with the tool. Messages are pickles behind their length:

    to it:   sys.path, then ("load", number, pickled function) and ("call", number, arguments)
    from it: ("ready",), ("loaded",), ("value", value, cpu seconds), ("error", pickled exception or None, type name,
             text, traceback, cpu seconds), ("refused", text)
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
import traceback
from collections.abc import Callable
from typing import Any

LENGTH = struct.Struct(">Q")
FUNCTIONS = 64  # kept in a process; with more, the one that came first is forgotten, here and by the pool


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
        send(channel, pickle.dumps(("ready",)))
        while True:
            send(channel, _answer(receive(channel), functions))


def _answer(message: bytearray, functions: dict[int, Callable[..., Any]]) -> bytes:
    try:
        kind, number, content = pickle.loads(message)
    except Exception as error:
        return _refusal(f"cannot be given its arguments in a process: {_described(error)}. Run it in threads.")
    del message
    if kind == "load":
        return _load(number, content, functions)
    started = time.process_time()
    try:
        value = functions[number](**content)
    except BaseException as error:  # a tool's own SystemExit is its error, not the end of this process
        return _failure(error, time.process_time() - started)
    seconds = time.process_time() - started
    import cloudpickle  # type: ignore[import-untyped]  # here: where it lies is known from sys.path as sent

    try:
        return bytes(cloudpickle.dumps(("value", value, seconds)))
    except Exception as error:
        return _refusal(
            f"returned a value of type {type(value).__qualname__!r}, which cannot be sent back from its process "
            f"({_described(error)}). Return plain data, or run it in threads."
        )


def _load(number: int, pickled: bytes, functions: dict[int, Callable[..., Any]]) -> bytes:
    if len(functions) >= FUNCTIONS:
        del functions[next(iter(functions))]
    try:
        functions[number] = pickle.loads(pickled)
    except BaseException as error:  # a module may even exit when it is imported
        return _refusal(
            f"cannot be loaded in a process of its own: {_described(error)}. Define it in a module that can be "
            "imported there, or run it in threads."
        )
    return pickle.dumps(("loaded",))


def _failure(error: BaseException, seconds: float) -> bytes:
    import cloudpickle

    text = _text(error)
    pickled: bytes | None = None
    # An exception with arguments of its own is pickled gladly and fails when it is loaded: try both here.
    with contextlib.suppress(Exception):
        candidate = bytes(cloudpickle.dumps(error))
        copy = pickle.loads(candidate)
        if type(copy).__name__ == type(error).__name__ and str(copy) == text:
            pickled = candidate
    trace = "".join(traceback.format_tb(error.__traceback__)[1:])
    return pickle.dumps(("error", pickled, type(error).__name__, text, trace, seconds))


def _refusal(text: str) -> bytes:
    return pickle.dumps(("refused", text))


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return f"<{type(error).__name__} without a text>"


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {_text(error)}"


def _end_with(parent: int) -> None:
    """Have Linux kill this process when the trainer dies: amid a tool nobody reads the socket, which would tell too."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:  # it died before that call
        sys.exit()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
