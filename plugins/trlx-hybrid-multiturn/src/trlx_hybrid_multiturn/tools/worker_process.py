"""The program that runs in a tool's process: it takes functions and calls over a socket, and returns the results.

The trainer starts this file by its path, not as a module of its package. On the socket, each message follows its number
and its length. Messages to the process are pickles. Messages from the process are plain data
(`trlx_hybrid.interprocess.plain_data`, without classes), so that the trainer never loads a pickle from a process that
runs code which a model wrote:

    to the process:   for each call the pickled function, and once that is loaded the pickled arguments
    from the process: {"kind": …, "content": …} with the number of the message that it answers; kinds are "loaded",
                      "refused" (why the function or its arguments cannot be loaded), "value" (what the model is
                      shown), "unshowable" (why the result cannot be shown) and "error" (the tool's exception, see
                      `trlx_hybrid.interprocess.remote_errors`)

A child process that a tool forks sends no answers: once the tool returns or raises in the child, the child exits. All
processes that a tool starts end with this process at the latest, see `trlx_hybrid.interprocess.process_tree`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import io
import json
import math
import os
import pickle
import socket
import struct
import sys
from collections.abc import Callable
from typing import Any

FUNCTIONS = 64  # kept in a process, and as pickles by the pool; beyond that, old ones are dropped
PLAIN = "Return plain data, or run it in threads."
ANSWER_BYTES = 64 << 20  # of one answer; images are most of it, as texts are cut
HEADER = struct.Struct("!QQ")  # number and length


class TooLongError(Exception):
    """Raised where a message on the socket is longer than its reader accepts."""


def send(channel: socket.socket, number: int, message: bytes) -> None:
    """Write one message to a socket.

    Args:
        channel: the socket.
        number: identifies the message; the answer to it has the same number.
        message: the message's body.
    """
    channel.sendall(HEADER.pack(number, len(message)))
    channel.sendall(message)


def receive(channel: socket.socket, limit: float = math.inf) -> tuple[int, bytes]:
    """Read exactly one message from a socket.

    Args:
        channel: the socket.
        limit: the largest number of bytes of the message's body.

    Returns:
        The message's number, and its body.

    Raises:
        EOFError: the other side has gone.
        TooLongError: the message has more than `limit` bytes; none of its body is read.
    """
    number, length = HEADER.unpack(_exactly(channel, HEADER.size))
    if length > limit:
        raise TooLongError(f"{length:,} bytes, more than {limit:,}")
    return number, _exactly(channel, length)


def _exactly(channel: socket.socket, length: int) -> bytes:
    body = bytearray(length)
    rest = memoryview(body)
    while rest:
        count = channel.recv_into(rest)
        if not count:
            raise EOFError
        rest = rest[count:]
    return bytes(body)


def connected(descriptor: int, parent: int) -> socket.socket:
    """Continue in a supervised child process, and return the socket to the trainer. The trainer's `sys.path` must be in
    place. Call it in a process with one thread only.

    Args:
        descriptor: file descriptor of this side's end of the socket.
        parent: process id of the trainer.
    """
    from trlx_hybrid.interprocess import process_tree  # here: where it lies is known from the trainer's path

    process_tree.supervise(parent, descriptor)
    channel = socket.socket(fileno=descriptor)
    channel.set_inheritable(False)  # what a tool starts must not keep the trainer waiting after this process crashed
    faulthandler.enable()  # a tool's segfault shows its Python stack
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # the trainer's stderr: prints appear when they are made
    del sys.argv[1:]
    return channel


def main(descriptor: int, parent: int, characters: int, path: list[str]) -> None:
    """Serve calls in a child process until the trainer closes the connection.

    Args:
        descriptor: file descriptor of this side's end of the socket.
        parent: process id of the trainer.
        characters: the largest number of characters of a result that the model is shown.
        path: the trainer's `sys.path`.
    """
    sys.path[:] = path
    channel = connected(descriptor, parent)
    with contextlib.suppress(EOFError, ConnectionError):
        Worker(channel, characters).serve()


class Worker:
    """Serves the calls that the trainer sends to a tool's process.

    Args:
        channel: the socket to the trainer.
        characters: the largest number of characters of a result that the model is shown.
    """

    def __init__(self, channel: socket.socket, characters: int) -> None:
        self._channel, self._characters, self._process = channel, characters, os.getpid()

    def serve(self) -> None:
        """Serve calls until the trainer closes the connection."""
        while True:
            number, message = receive(self._channel)
            try:
                function = loaded(message)
            except BaseException as error:  # a module may even exit when it is imported
                self._leave_if_forked(error)
                reason = f"cannot be loaded in a process of its own: {_described(error)}. "
                advice = "Define it in a module that can be imported there, or run it in threads."
                self._answer(number, "refused", reason + advice)
                continue
            self._answer(number, "loaded")
            number, message = receive(self._channel)
            self._answer(number, *self._called(function, message))

    def _called(self, function: Callable[..., Any], message: bytes) -> tuple[str, Any]:
        """Call a tool's function, and return the answer to the trainer as its kind and its content.

        Args:
            function: the function.
            message: its pickled keyword arguments.

        Returns:
            ("value", what the model is shown), ("unshowable", the reason why the model cannot be shown the result),
            ("error", a description of the tool's exception) or ("refused", the reason why the arguments cannot be
            loaded).
        """
        try:
            arguments = pickle.loads(message)
        except Exception as error:
            self._leave_if_forked(error)
            return "refused", f"cannot be given its arguments in a process: {_described(error)}. Run it in threads."
        from trlx_hybrid.episodes.answers import UnshowableError, as_content  # imported here, as plain_data below

        try:
            return "value", as_content(function(**arguments))
        except UnshowableError as error:
            return "unshowable", str(error)
        except BaseException as error:  # a tool's own SystemExit is its error, not the end of this process
            from trlx_hybrid.interprocess.remote_errors import describe

            self._leave_if_forked(error)
            return "error", describe(error, classes=False)
        finally:
            with contextlib.suppress(Exception):  # the tool may have closed it
                sys.stdout.flush()

    def _answer(self, number: int, kind: str, content: Any = None) -> None:
        self._leave_if_forked()
        from trlx_hybrid.episodes.answers import excerpt

        if kind == "error" and len(content["text"]) + len(content["trace"]) > self._characters:
            content = {key: excerpt(content[key], self._characters) for key in ("kind", "text", "trace")}
        try:
            body = _packed(kind, excerpt(content, self._characters))
        except TypeError as error:  # plain_data's NotPlainError
            body = _packed("refused", f"returned {error} from its process. {PLAIN}")
        if len(body) > ANSWER_BYTES:
            text = f"the result takes {len(body):,} bytes to send, of at most {ANSWER_BYTES:,}"
            body = _packed("error", {"kind": "ValueError", "text": text, "trace": ""})
        send(self._channel, number, body)

    def _leave_if_forked(self, error: BaseException | None = None) -> None:
        """End this process if a tool has forked it from the process that serves calls, so that it sends no answers.

        The process ends with exit code 0; if the tool raised an exception, that exception ends it.

        Args:
            error: the exception that the tool raised in this process, or None.
        """
        if os.getpid() != self._process:
            raise SystemExit if error is None else error


@functools.lru_cache(FUNCTIONS)
def loaded(pickled: bytes) -> Callable[..., Any]:
    """Return the function that a pickle holds. The most recently used functions are cached, so that the same pickle
    gives the same object."""
    function: Callable[..., Any] = pickle.loads(pickled)
    return function


def _packed(kind: str, content: object) -> bytes:
    from trlx_hybrid.interprocess import plain_data  # here: where it lies is known from the trainer's path

    # The content is dumped by itself, so that an error names a part of it.
    return b'{"kind": "%b", "content": %b}' % (kind.encode(), plain_data.dumps(content, classes=False))


def _described(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # the error's __str__ may be any code
        return type(error).__name__


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4]))
