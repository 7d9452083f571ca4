"""Serialisation of values that processes send each other, as data instead of pickles: reading them imports nothing and
calls no foreign code.

The format is JSON, with tagged objects for values that JSON cannot express. A value arrives unchanged if it is None or
a number, text, bytes, list, tuple, set, dict, dataclass, named tuple, enum, NumPy array or image of PIL (sent as PNG).
A number of NumPy arrives as Python's number. An object of a class derived from a number, text, list or dict arrives
as the number, text, list or dict.

A class is looked up among the modules that the reader has imported already. If the sender may run code that a model
wrote, use `classes=False`, since otherwise the sender could choose any of the reader's classes. It refuses dataclasses
and enums, and makes a named tuple a tuple.
"""

from __future__ import annotations

import base64
import dataclasses
import enum
import io
import json
import math
import sys
from collections.abc import Mapping
from typing import Any

from .._moved import MOVED

TAG = "@"


class NotPlainError(TypeError):
    """An error for a value that cannot be sent as plain data, or whose class this process has not imported. The message
    names the part of the value, such as `.items[0]`."""


def dumps(value: Any, *, classes: bool = True) -> bytes:
    """Serialise a value to UTF-8 text, which `loads` reads.

    Args:
        classes: whether dataclasses and enums may be sent, and named tuples keep their class.

    Raises:
        NotPlainError: a part of the value has no plain form; the message begins with the class of the value.
    """
    try:
        return json.dumps(_plain(value, type(value), "", classes)).encode()
    except RecursionError:
        raise NotPlainError(f"{_a(type(value))} that holds itself, or nests too deep") from None
    except ValueError as error:  # a number of thousands of digits
        raise NotPlainError(f"{_a(type(value))}, which cannot be sent: {error}") from None


def loads(body: bytes, *, classes: bool = True, pixels: float = math.inf) -> Any:
    """Return the value that `dumps` has serialised.

    Args:
        classes: whether the value may hold dataclasses, named tuples and enums.
        pixels: the largest number of pixels of all its images together.

    Raises:
        NotPlainError: the value holds a class that this process has not imported, or that is no data class; or its
            images are too large.
        ValueError: the text is damaged.
    """
    left = pixels

    def built(found: dict[str, Any]) -> Any:
        nonlocal left
        if found.get(TAG) == "image":
            image = _image(found["data"])
            left -= image.width * image.height
            if left < 0:
                raise NotPlainError(f"images of more than {pixels:,} pixels")
            return image.copy()
        return _built(found, classes)

    return json.loads(body, object_hook=built)


def class_name(kind: type) -> str:
    """Return a class's name in the form that `find_class` takes."""
    return f"{kind.__module__}:{kind.__qualname__}"


def find_class(name: str) -> type | None:
    """Return the class with a name such as `module:Class`, or None if this process has not imported the module or it
    has no such class. Imports nothing.

    The module may have its former name, as in old recordings: it is replaced by the present one.
    """
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(MOVED.get(module, module))
    for part in path.split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, type) else None


def _plain(value: Any, whole: type, path: str, classes: bool) -> Any:
    """Convert a value to JSON data, recursively.

    Args:
        whole: the class of the outermost value, for error messages.
        path: where this value stands in the outermost one, such as `.items[0]`; for error messages.
        classes: whether dataclasses and enums may be sent, and named tuples keep their class.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, enum.Enum) and classes:
        return {TAG: "enum", "class": class_name(type(value)), "name": value.name}
    if dataclasses.is_dataclass(value) and not isinstance(value, type) and classes:
        names = [f.name for f in dataclasses.fields(value)]
        fields = {
            name: _plain(getattr(value, name), whole, f"{path}.{name}", classes)
            for name in names
            if hasattr(value, name)
        }
        return {TAG: "dataclass", "class": class_name(type(value)), "fields": fields}
    if isinstance(value, Mapping):
        if type(value) is dict and TAG not in value and all(type(key) is str for key in value):
            return {key: _plain(item, whole, f"{path}[{key!r}]", classes) for key, item in value.items()}
        keys = [_plain(key, whole, f"{path}.keys()", classes) for key in value]
        items = [_plain(item, whole, f"{path}[{key!r}]", classes) for key, item in value.items()]
        return {TAG: "dict", "items": list(zip(keys, items))}
    if isinstance(value, list | tuple | set | frozenset):
        items = [_plain(item, whole, f"{path}[{i}]", classes) for i, item in enumerate(value)]
        if isinstance(value, list):
            return items
        if isinstance(value, tuple) and hasattr(value, "_fields") and classes:
            return {TAG: "namedtuple", "class": class_name(type(value)), "items": items}
        kind = next(kind for kind in (tuple, set, frozenset) if isinstance(value, kind))
        return {TAG: kind.__name__, "items": items}
    if isinstance(value, bytes | bytearray):
        return {TAG: "bytes", "data": _text(value)}
    found = _of_a_library(value)
    if found is None:
        where = f"{_a(whole)}, of which {path} is {_a(type(value))}" if path else _a(whole)
        raise NotPlainError(f"{where}, which cannot be sent")
    return found


def _of_a_library(value: Any) -> Any:
    """Convert a NumPy number or array, or a PIL image, to JSON data; return None for any other value. Imports neither
    library: as long as a library is not imported, no value can be an object of its classes."""
    numpy, images = sys.modules.get("numpy"), sys.modules.get("PIL.Image")
    if numpy is not None and isinstance(value, numpy.generic) and isinstance(value.item(), bool | int | float | str):
        return value.item()
    if numpy is not None and isinstance(value, numpy.ndarray) and not value.dtype.hasobject and not value.dtype.fields:
        return {TAG: "array", "dtype": value.dtype.str, "shape": value.shape, "data": _text(value.tobytes())}
    if images is not None and isinstance(value, images.Image):
        body = io.BytesIO()
        try:
            value.save(body, "PNG", compress_level=1)
        except OSError:  # PNG has no such mode
            return None
        return {TAG: "image", "data": _text(body.getvalue())}
    return None


def _built(found: dict[str, Any], classes: bool) -> Any:
    """Build the value that a JSON object of `dumps` stands for. The key TAG, if there is one, names the kind of the
    value, such as "bytes" or "dataclass"; an object without it is a dict.

    Args:
        found: the JSON object. The values in it are built already, since JSON is read from the inside out.
        classes: whether the value may be a dataclass, named tuple or enum.

    Raises:
        NotPlainError: the value is of a class, and `classes` is False, or the class cannot be used.
    """
    if TAG not in found:
        return found
    kind = found[TAG]
    if kind == "bytes":
        return base64.b64decode(found["data"])
    if kind == "dict":
        return dict(found["items"])
    if kind in ("tuple", "set", "frozenset"):
        return {"tuple": tuple, "set": set, "frozenset": frozenset}[kind](found["items"])
    if kind == "array":
        import numpy

        flat = numpy.frombuffer(base64.b64decode(found["data"]), numpy.dtype(found["dtype"]))
        return flat.reshape(found["shape"]).copy()
    if not classes:
        raise NotPlainError(f"{kind!r}, which is no plain value")
    return _instance(kind, found)


def _image(data: str) -> Any:
    """Open a PNG, base64 text, as a PIL image. Only its header is read yet, so that its size can be checked first."""
    from PIL import Image

    return Image.open(io.BytesIO(base64.b64decode(data)), formats=["PNG"])


def _instance(kind: str, found: dict[str, Any]) -> Any:
    """Build an enum member, a named tuple or a dataclass instance. Like unpickling, it does not call `__init__`.

    Args:
        kind: "enum", "namedtuple" or "dataclass".
        found: the JSON object, with the name of the class and its content.
    """
    owner = find_class(found["class"])
    if kind == "enum" and owner is not None and issubclass(owner, enum.Enum):
        return owner[found["name"]]
    if kind == "namedtuple" and owner is not None and issubclass(owner, tuple):
        return tuple.__new__(owner, found["items"])
    if kind == "dataclass" and dataclasses.is_dataclass(owner):
        instance = object.__new__(owner)
        for field in dataclasses.fields(owner):
            if field.name in found["fields"]:
                object.__setattr__(instance, field.name, found["fields"][field.name])
        return instance
    name = found["class"].replace(":", ".")
    raise NotPlainError(f"a {name}, which is no data class that this process has imported")


def _a(kind: type) -> str:
    return f"{'an' if kind.__qualname__[0] in 'aeiouAEIOU' else 'a'} {kind.__qualname__}"


def _text(body: bytes | bytearray) -> str:
    return base64.b64encode(body).decode()
