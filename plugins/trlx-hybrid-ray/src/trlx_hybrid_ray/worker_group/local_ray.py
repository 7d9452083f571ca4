"""What a worker group uses of Ray, in this process: actors are threads, and what they get is copied as by Ray."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import pickle
import queue
import threading
import traceback
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from ray import cloudpickle
from ray.exceptions import ActorDiedError, GetTimeoutError, RayTaskError, TaskCancelledError

END = "__ray_terminate__"
Copy = tuple[bytes, list[bytes]]
"""A value on its way: pickled, its large buffers beside it."""
Reference = concurrent.futures.Future[Copy]


class LocalActor:
    """An object in a thread of its own, with a queue of what it has to do. Called as Ray's handle of an actor is:
    `actor.method.remote(...)`."""

    def __init__(self, kind: type, args: Sequence[Any]) -> None:
        self.queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=_serve, args=(kind(*args), self.queue), name=kind.__name__, daemon=True).start()

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=functools.partial(self._call, method))

    def _call(self, method: str, *args: Any, **kwargs: Any) -> Reference:
        reference: Reference = concurrent.futures.Future()
        self.queue.put((reference, method, [_sent(arg) for arg in args], {k: _sent(arg) for k, arg in kwargs.items()}))
        return reference


def remote(kind: type) -> Any:
    """As `ray.remote` of a class. Options are taken and not looked at: there is nobody to claim resources from."""
    made = SimpleNamespace(remote=lambda *args: LocalActor(kind, args))
    return SimpleNamespace(options=lambda **_: made)


def put(value: Any) -> Reference:
    """As `ray.put`."""
    reference: Reference = concurrent.futures.Future()
    reference.set_result(_copy(value))
    return reference


def wait(
    references: Sequence[Reference], *, num_returns: int, timeout: float | None, fetch_local: bool = False
) -> tuple[list[Reference], list[Reference]]:
    """As `ray.wait`, for all of them."""
    done = concurrent.futures.wait(references, timeout).done
    return [r for r in references if r in done], [r for r in references if r not in done]


def get(references: Any, *, timeout: float | None) -> Any:
    """As `ray.get`."""
    if isinstance(references, concurrent.futures.Future):
        return get([references], timeout=timeout)[0]
    done, late = concurrent.futures.wait(references, timeout, concurrent.futures.FIRST_EXCEPTION)
    for reference in done:
        if reference.cancelled():
            raise TaskCancelledError
        reference.result()
    if late:
        raise GetTimeoutError
    return [_received(reference) for reference in references]


def cancel(reference: Reference) -> None:
    """As `ray.cancel`: what has begun goes on."""
    reference.cancel()


def kill(actor: LocalActor) -> None:
    """As `ray.kill`, but for what the actor is at: its thread ends when that does, or with the process."""
    with contextlib.suppress(queue.Empty):
        while True:
            actor.queue.get_nowait()[0].cancel()
    getattr(actor, END).remote()


def is_initialized() -> bool:
    """As `ray.is_initialized`."""
    return True


def _copy(value: Any) -> Copy:
    """With Ray's pickle, so that what can be sent there can be sent here."""
    buffers: list[pickle.PickleBuffer] = []
    body: bytes = cloudpickle.dumps(value, protocol=5, buffer_callback=buffers.append)  # type: ignore[no-untyped-call]
    return body, [bytes(buffer.raw()) for buffer in buffers]


def _sent(value: Any) -> Copy | Reference:
    return value if isinstance(value, concurrent.futures.Future) else _copy(value)


def _received(sent: Copy | Reference) -> Any:
    """The value as its receiver has it; arrays are read-only, and share memory with those of other receivers."""
    body, buffers = sent.result() if isinstance(sent, concurrent.futures.Future) else sent
    return pickle.loads(body, buffers=buffers)


def _serve(worker: Any, calls: queue.SimpleQueue[Any]) -> None:
    while True:
        reference, method, args, kwargs = calls.get()
        if reference.set_running_or_notify_cancel():
            try:
                reference.set_result(_result(worker, method, args, kwargs))
            except SystemExit:
                reference.set_exception(ActorDiedError())
            except BaseException as error:
                trace = "".join(traceback.format_exception(error))
                reference.set_exception(RayTaskError(method, trace, error, ip="this process"))  # type: ignore[no-untyped-call]
        if method == END:
            return
        del reference, args, kwargs  # an idle worker must not keep what it was given alive


def _result(worker: Any, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Copy:
    if method == END:
        return _copy(None)
    given = {name: _received(value) for name, value in kwargs.items()}
    return _copy(getattr(worker, method)(*map(_received, args), **given))
