"""Exceptions sent between processes as plain data: rebuilt as the same exception, or replaced by a RemoteError."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Mapping
from typing import Any

from . import plain_data


class RemoteError(Exception):
    """A replacement for an exception of another process that cannot be rebuilt here, because its class is not imported
    or it holds more than plain data. It has the text of the original.

    Attributes:
        kind: class name of the original.
    """

    def __init__(self, text: str, kind: str) -> None:
        super().__init__(text)
        self.kind = kind


def describe(error: BaseException, *, classes: bool = True) -> dict[str, Any]:
    """Describe an exception as a dict that `plain_data.dumps` can serialise and `restore` takes: its class name, its
    text, its traceback without the frame that caught it, and, where these are plain data, its arguments and attributes.

    Args:
        classes: whether arguments and attributes may hold dataclasses and enums, and named tuples keep their class.
    """
    try:
        text = str(error)
    except Exception:  # a foreign __str__ may raise anything
        text = f"<{type(error).__name__} without a text>"
    trace = "".join(traceback.format_tb(error.__traceback__)[1:])
    found: dict[str, Any] = {"kind": type(error).__name__, "text": text, "trace": trace}
    with contextlib.suppress(Exception):  # if it holds more than plain data, only its name and text are sent
        reduced: Any = error.__reduce__()
        maker, arguments, *state = reduced
        content = {"arguments": list(arguments), "state": dict(state[0]) if state and state[0] else {}}
        if maker is type(error):
            plain_data.dumps(content, classes=classes)
            found |= {"class": plain_data.class_name(type(error))} | content
    return found


def restore(description: Mapping[str, Any], where: str, *, classes: bool = True) -> BaseException:
    """Return the exception that `describe` described, with its remote traceback as a note; a `RemoteError` where it
    cannot be rebuilt.

    Args:
        where: the place where the exception was raised, for the note, such as "the tool's process".
        classes: whether the exception may be of any class that this process has imported; else only of Python's own
            classes.
    """
    error: BaseException = RemoteError(description["text"], description["kind"])
    kind = plain_data.find_class(description["class"]) if "class" in description else None
    if kind is not None and issubclass(kind, BaseException) and (classes or kind.__module__ == "builtins"):
        with contextlib.suppress(Exception):
            error = _built(kind, description["arguments"], description["state"], description["text"])
    error.add_note(f"In {where}:\n{description['trace']}")
    return error


def _built(kind: type[BaseException], arguments: list[Any], state: Mapping[str, Any], text: str) -> BaseException:
    """Rebuild an exception from the arguments and the state that its `__reduce__` returned. If its class has no
    `__reduce__` of its own, these arguments may not fit its `__init__`, so only the `__init__` of its built-in base
    class is called.

    Args:
        text: the text of the original.

    Raises:
        ValueError: the result has another text than the original.
    """
    base: Any = next(c for c in kind.__mro__ if c.__module__ == "builtins")
    if kind.__reduce__ is not base.__reduce__:
        error = kind(*arguments)
    else:
        error = kind.__new__(kind, *arguments)
        base.__init__(error, *arguments)
    vars(error).update(state)
    if str(error) != text:
        raise ValueError(text)
    return error
