"""What runs in a tool's process: takes functions and calls over a socket, sends back what became of them.

Run by its path, outside the package. Messages stand behind their length. Those to it are pickles; what it sends is
plain data (`trlx_hybrid.plain_data`), so that the trainer opens no pickle of a process that runs what a model wrote:

    to it:   for each call the pickled function, and once that is loaded the pickled arguments
    from it: {"kind": …, "content": …}; kinds are "loaded", "refused" (a text), "value" (what the model is shown),
             "unshowable" (a text) and "error" (see `trlx_hybrid.remote_errors`)
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import functools
import io
import json
import os
import pickle
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any, BinaryIO

FUNCTIONS = 64  # kept in a process, and as pickles by the pool; with more, one is forgotten
PLAIN = "Return plain data, or run it in threads."


class UnshowableError(Exception):
    """A tool's result cannot be turned into a string, so the model cannot be shown it."""


def send(channel: socket.socket, message: bytes) -> None:
    """Write one message."""
    channel.sendall(len(message).to_bytes(8, "big"))
    channel.sendall(message)


def receive(channel: BinaryIO) -> bytes:
    """Read one message.

    Raises:
        EOFError: the other side has gone.
    """
    length = int.from_bytes(channel.read(8), "big")
    message = channel.read(length)
    if not length or len(message) < length:
        raise EOFError
    return message


def main(descriptor: int, parent: int, path: list[str]) -> None:
    """Serve until the other side goes.

    Args:
        descriptor: of this side's end of the socket.
        parent: process id of the trainer.
        path: its `sys.path`.
    """
    channel = socket.socket(fileno=descriptor)
    channel.set_inheritable(False)  # what a tool starts must not keep the trainer waiting after this process crashed
    _end_with(parent)
    faulthandler.enable()  # a tool's segfault shows its Python stack
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # the trainer's stderr: prints appear when they are made
    del sys.argv[1:]
    sys.path[:] = path
    messages = channel.makefile("rb")
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            message = receive(messages)
            try:
                function = loaded(message)
            except BaseException as error:  # a module may even exit when it is imported
                reason = f"cannot be loaded in a process of its own: {_described(error)}. "
                advice = "Define it in a module that can be imported there, or run it in threads."
                send(channel, _packed("refused", reason + advice))
                continue
            send(channel, _packed("loaded"))
            send(channel, _answer(function, receive(messages)))


@functools.lru_cache(FUNCTIONS)
def loaded(pickled: bytes) -> Callable[..., Any]:
    """The function, the same one for the same pickle."""
    return pickle.loads(pickled)  # type: ignore[no-any-return]


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


def _answer(function: Callable[..., Any], message: bytes) -> bytes:
    try:
        arguments = pickle.loads(message)
    except Exception as error:
        reason = f"cannot be given its arguments in a process: {_described(error)}. Run it in threads."
        return _packed("refused", reason)
    try:
        value = as_shown(function(**arguments))
    except UnshowableError as error:
        return _packed("unshowable", str(error))
    except BaseException as error:  # a tool's own SystemExit is its error, not the end of this process
        from trlx_hybrid.remote_errors import describe

        return _packed("error", describe(error))
    finally:
        with contextlib.suppress(Exception):  # the tool's to close
            sys.stdout.flush()
    try:
        return _packed("value", value)
    except TypeError as error:  # plain_data's NotPlainError
        return _packed("refused", f"returned {error} from its process. {PLAIN}")


def _packed(kind: str, content: Any = None) -> bytes:
    from trlx_hybrid import plain_data  # here: where it lies is known from the trainer's path

    # The content by itself, so that an error names a part of it.
    return b'{"kind": "%b", "content": %b}' % (kind.encode(), plain_data.dumps(content))


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
    main(int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]))
