"""What became of a call in another process: a value or an exception, exactly as here, as far as pickling allows."""

from __future__ import annotations

import contextlib
import pickle
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .. import debugging


class RemoteError(Exception):
    """Stands for an exception that could not be pickled; its text is the original's.

    Attributes:
        kind: class name of the original.
    """

    def __init__(self, text: str, kind: str) -> None:
        super().__init__(text)
        self.kind = kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """One call's.

    Attributes:
        value: pickled; None where there is none.
        error: the exception, pickled; None where it cannot be.
        kind, text, trace: of the exception.
        unsendable: why the value cannot travel.
    """

    value: bytes | None = None
    error: bytes | None = None
    kind: str = ""
    text: str = ""
    trace: str = ""
    unsendable: str = ""

    @classmethod
    def of(cls, function: Callable[[], Any]) -> Reply:
        """Call it."""
        from ray import cloudpickle

        try:
            value = function()
        except BaseException as error:  # a tool's SystemExit is its error, not the end of this process
            if debugging.post_mortem():
                import ray

                ray.util.rpdb._post_mortem()  # type: ignore[no-untyped-call]
            return cls(error=_pickled(error), kind=type(error).__name__, text=str(error), trace=_trace(error))
        try:
            return cls(value=bytes(cloudpickle.dumps(value)))  # type: ignore[no-untyped-call]
        except Exception as error:
            return cls(unsendable=f"a {type(value).__qualname__}, which cannot be sent: {error}")

    def result(self) -> Any:
        """The value.

        Raises:
            what the function raised, with its traceback as a note.
        """
        if self.value is not None:
            return pickle.loads(self.value)
        error: BaseException = RemoteError(self.text, self.kind)
        if self.error is not None:
            with contextlib.suppress(Exception):  # loads over there and not here
                error = pickle.loads(self.error)
        error.add_note(f"In the environment's process:\n{self.trace}")
        raise error


def _pickled(error: BaseException) -> bytes | None:
    """None unless it comes back the same: an exception with arguments of its own is pickled gladly, and fails later."""
    from ray import cloudpickle

    with contextlib.suppress(Exception):
        found = bytes(cloudpickle.dumps(error))  # type: ignore[no-untyped-call]
        copy = pickle.loads(found)
        if type(copy).__name__ == type(error).__name__ and str(copy) == str(error):
            return found
    return None


def _trace(error: BaseException) -> str:
    return "".join(traceback.format_tb(error.__traceback__)[1:])
