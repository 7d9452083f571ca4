"""What the user wrote, on its way to an actor: pickled here, where an error can be explained, and opened there."""

from __future__ import annotations

import io
import os
import pickle
import sys
from dataclasses import dataclass
from typing import Any

from trlx_hybrid.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Shipment:
    """A pickled object.

    Attributes:
        what: it is, for messages.
        body: the pickle.
        path: `sys.path` of the sender: modules beside the user's script are found there, on machines that share it.
    """

    what: str
    body: bytes
    path: tuple[str, ...]

    def opened(self) -> Any:
        """The object, in a process that need not know its module yet.

        Raises:
            ConfigError: a module is missing here, or its import fails.
        """
        sys.path += [entry for entry in self.path if entry not in sys.path]
        try:
            return pickle.loads(self.body)
        except Exception as error:  # unpickling imports anybody's modules
            raise ConfigError(
                f"{self.what} cannot be loaded on node {os.uname().nodename}: {type(error).__name__}: {error}. Its "
                "modules must be installed there, or lie in a folder that all nodes share."
            ) from error


def packed(value: Any, what: str, remedy: str) -> Shipment:
    """Pickle something for an actor. What the script itself defines goes by value, everything else by its import.

    Args:
        what: it is, for messages.
        remedy: what to do where it cannot be pickled.

    Raises:
        ConfigError: it cannot be pickled; names the part that is in the way.
    """
    from ray import cloudpickle

    try:
        body = bytes(cloudpickle.dumps(value))  # type: ignore[no-untyped-call]
    except Exception as error:  # pickling runs anybody's code
        raise ConfigError(f"{what} cannot be sent to its workers: {obstacle(value, error)}. {remedy}") from error
    return Shipment(what, body, tuple(os.path.abspath(entry) for entry in sys.path))


def obstacle(value: Any, error: BaseException) -> str:
    """Why something cannot be pickled, and which part of it is to blame, as far as that can be found out."""
    from ray.util import inspect_serializability

    reason = " ".join(str(error).split())[:200]
    try:
        _, found = inspect_serializability(value, name="it", print_file=io.StringIO())  # type: ignore[no-untyped-call]
    except Exception:  # it looks into anybody's objects, for a message only
        found = set()
    parts = sorted({f"{part.path[-1]!r}, a {type(part.obj).__qualname__}" for part in found if len(part.path) > 1})
    return f"it holds {'; '.join(parts)} ({reason})" if parts else reason
