"""Messages between two processes, and the encoding of Python values in them.

A value is called plain if its type is exactly one of Python's own data types, such as int, list or dict: decoding a
copy of it executes no code of the sending process. Other values are never copied. They stay in their process, and the
message holds a number in their place.
"""

from __future__ import annotations

import builtins
import contextlib
import importlib
import json
import os
import select
import sys
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

Conversion = Callable[[Any], Any]
LARGEST = 64 << 20  # bytes of a frame
MODULES = sys.stdlib_module_names - {"unittest"}  # it has an object that equals everything, mock.ANY
COPIED: dict[str, Conversion] = {
    "collections.Counter": lambda value: [dict(value)],
    "collections.OrderedDict": lambda value: [list(value.items())],
    "collections.defaultdict": lambda value: [None, dict(value)],
    "collections.deque": lambda value: [list(value), value.maxlen],
    "decimal.Decimal": lambda value: [str(value)],
    "fractions.Fraction": lambda value: [value.numerator, value.denominator],
    "datetime.date": lambda value: [value.year, value.month, value.day],
    "datetime.datetime": lambda value: [*value.timetuple()[:6], value.microsecond, value.tzinfo],
    "datetime.timedelta": lambda value: [value.days, value.seconds, value.microseconds],
}
"""Types of the standard library whose values are copied to the other process, too, by qualified name. Each has a
function that takes a value and returns the constructor's arguments for the copy."""
BY_PARTS: dict[type, Conversion] = {
    tuple: list,
    set: list,
    frozenset: list,
    complex: lambda value: [value.real, value.imag],
    range: lambda value: [value.start, value.stop, value.step],
    slice: lambda value: [value.start, value.stop, value.step],
}
OF_PARTS: dict[str, Callable[[list[Any]], Any]] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "complex": lambda parts: complex(*parts),
    "range": lambda parts: range(*parts),
    "slice": lambda parts: slice(*parts),
}
BASES: dict[type, Conversion] = {
    int: int.__int__,
    float: float.__float__,
    str: str.__str__,
    bytes: lambda value: bytes.__getitem__(value, slice(None)),
    tuple: lambda value: tuple(tuple.__iter__(value)),
    list: lambda value: list(list.__iter__(value)),
    set: lambda value: set(set.__iter__(value)),
    frozenset: lambda value: frozenset(frozenset.__iter__(value)),
    dict: lambda value: dict(dict.items(value)),
}
"""Python's own data types that a class may derive from. Each has a function that takes an object of a derived class,
and returns its content as the data type, without calling methods of the class."""


class Channel:
    """One end of a connection that carries messages, called frames: 8 bytes with the length, then the bytes.

    Args:
        descriptor: file descriptor of a stream socket. It must be non-blocking if deadlines are used.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def send(self, frame: bytes, deadline: float | None = None) -> None:
        """Write one frame.

        Args:
            frame: the bytes to send.
            deadline: the time on the monotonic clock, in seconds, by which the other end must have taken them; None
                waits without a limit.

        Raises:
            TimeoutError: the deadline has passed.
            OSError: the other end is closed.
        """
        left = memoryview(len(frame).to_bytes(8, "little") + frame)
        while left:
            self._wait(select.POLLOUT, deadline)
            with contextlib.suppress(BlockingIOError):
                left = left[os.write(self.descriptor, left) :]

    def receive(self, deadline: float | None = None) -> bytes:
        """Return the content of the next frame.

        Args:
            deadline: the time on the monotonic clock, in seconds, by which the frame must have arrived; None waits
                without a limit.

        Raises:
            TimeoutError: the deadline has passed.
            EOFError: nothing is left to read because the other end was closed; or the other end announced a frame of
                more than `LARGEST` bytes.
            OSError: reading failed. The error is ECONNRESET, for example, if the other end was closed before it had
                read all that was sent to it.
        """
        length = int.from_bytes(self._exactly(8, deadline), "little")
        if length > LARGEST:
            raise EOFError(f"the other end announced a frame of {length} bytes, and {LARGEST} are allowed")
        return self._exactly(length, deadline)

    def _exactly(self, length: int, deadline: float | None) -> bytes:
        said = bytearray()
        while len(said) < length:
            self._wait(select.POLLIN, deadline)
            more = os.read(self.descriptor, min(length - len(said), 1 << 20))
            if not more:
                raise EOFError(f"the other end was closed, and {length - len(said)} bytes of a frame are missing")
            said += more
        return bytes(said)

    def _wait(self, event: int, deadline: float | None) -> None:
        if deadline is not None:
            ready = select.poll()
            ready.register(self.descriptor, event)
            if not ready.poll(max(deadline - time.monotonic(), 0) * 1000):
                raise TimeoutError("the other end was not ready before the deadline")


def encode(value: Any, number: Conversion) -> Any:
    """Return a value as objects that `json.dumps` accepts; `decode` reverses it.

    Args:
        value: any Python value.
        number: called with each value that cannot be copied: its type is neither one of Python's own data types nor
            in `COPIED`, but may be a class derived from them. Returns the JSON object that stands for the value,
            such as an object that holds a number for the value.
    """
    kind: Any = type(value)
    if kind in (type(None), bool, float, str) or (kind is int and -(1 << 63) < value < 1 << 63):
        return value
    if kind is list:
        return [encode(item, number) for item in value]
    if kind is int:
        return {"int": hex(value)}
    if kind is dict:
        return {"dict": [[encode(key, number), encode(item, number)] for key, item in value.items()]}
    if kind in (bytes, bytearray):
        return {kind.__name__: value.decode("latin-1")}
    if parts := BY_PARTS.get(kind):
        return {kind.__name__: [encode(part, number) for part in parts(value)]}
    if is_module(value):
        return {"module": value.__name__}
    if isinstance(value, type) and vars(builtins).get(value.__name__) == value:
        return {"type": value.__name__}
    name = f"{kind.__module__}.{kind.__qualname__}"
    if (parts := COPIED.get(name)) and kind is standard(name):
        return {"copied": [name, [encode(part, number) for part in parts(value)]]}
    return number(value)


def decode(said: Any, numbered: Callable[[str, Any], Any]) -> Any:
    """Return the value from which `encode` made some JSON.

    Args:
        said: the parsed JSON.
        numbered: called for each JSON object that stands for a value which could not be copied, with the object's key
            and content; returns this value or a stand-in for it.
    """
    if isinstance(said, list):
        return [decode(item, numbered) for item in said]
    if not isinstance(said, dict):
        return said
    ((kind, parts),) = said.items()
    if kind == "int":
        return int(parts, 16)
    if kind == "dict":
        return {decode(key, numbered): decode(item, numbered) for key, item in parts}
    if kind in ("bytes", "bytearray"):
        return {"bytes": bytes, "bytearray": bytearray}[kind](parts, "latin-1")
    if kind in OF_PARTS:
        return OF_PARTS[kind]([decode(part, numbered) for part in parts])
    if kind == "module" and parts.partition(".")[0] in MODULES:
        return importlib.import_module(parts)
    if kind == "type" and isinstance(vars(builtins).get(parts), type):
        return vars(builtins)[parts]
    if kind == "copied" and parts[0] in COPIED:
        return standard(parts[0])(*(decode(part, numbered) for part in parts[1]))
    return numbered(kind, parts)


def is_module(value: object) -> bool:
    """Return whether a value is a module of the standard library. Such a module is sent by its name, and the receiver
    imports it."""
    return type(value) is ModuleType and value.__name__.partition(".")[0] in MODULES


def standard(name: str) -> Any:
    """Return the type that a qualified name of the standard library stands for, such as "collections.deque", to rebuild
    a value that the other process sent. `decode` calls it for the names in `COPIED` only."""
    module, _, kind = name.rpartition(".")
    return getattr(importlib.import_module(module), kind)


def dump(value: object) -> bytes:
    """Return objects that JSON can hold as JSON text, encoded in bytes."""
    return json.dumps(value).encode()
