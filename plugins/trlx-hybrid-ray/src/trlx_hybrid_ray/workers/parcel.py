"""A value on its way between threads, copied as Ray would copy it between processes."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Parcel:
    """A value on its way: pickled, its large buffers beside it."""

    body: bytes
    buffers: tuple[bytes, ...]

    @classmethod
    def of(cls, value: Any) -> Parcel:
        """Pickled as Ray pickles, so that what can be sent there can be sent here."""
        from ray import cloudpickle

        buffers: list[pickle.PickleBuffer] = []
        body: bytes = cloudpickle.dumps(value, protocol=5, buffer_callback=buffers.append)  # type: ignore[no-untyped-call]
        return cls(body, tuple(bytes(buffer.raw()) for buffer in buffers))

    def copy(self) -> Any:
        """The value as its receiver has it; arrays are read-only, and share memory with those of other receivers."""
        return pickle.loads(self.body, buffers=self.buffers)
