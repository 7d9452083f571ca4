"""Replacements for the functions of `ray` that a worker group uses, for a group in this process: its actors are
threads, and values are copied as Ray copies them."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import pickle
import queue
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from ray import cloudpickle
from ray.exceptions import ActorDiedError, GetTimeoutError, RayTaskError, TaskCancelledError

END = "__ray_terminate__"
"""The name of the method with which Ray ends an actor after its current call."""
Copy = tuple[bytes, list[bytes]]
"""A pickled value, with its large buffers beside the pickle."""
Reference = concurrent.futures.Future[Copy]
"""The counterpart of Ray's `ObjectRef`: a future of a pickled value."""

Call = tuple[Reference, str, list[Copy | Reference], dict[str, Copy | Reference]]
"""A call of an actor: the reference to its result, the method's name, and its arguments."""


class LocalActor:
    """An object with a thread of its own and a queue of calls. It is called like Ray's handle of an actor:
    `actor.method.remote(...)`.

    Args:
        kind: the class of the object.
        args: the arguments of its constructor.
    """

    def __init__(self, kind: type, args: Sequence[object]) -> None:
        self.queue: queue.SimpleQueue[Call] = queue.SimpleQueue()
        threading.Thread(target=_serve, args=(kind(*args), self.queue), name=kind.__name__, daemon=True).start()

    def __getattr__(self, method: str) -> SimpleNamespace:
        return SimpleNamespace(remote=functools.partial(self._call, method))

    def _call(self, method: str, *args: object, **kwargs: object) -> Reference:
        """Put a call into the queue, and return a reference to its result."""
        reference: Reference = concurrent.futures.Future()
        self.queue.put((reference, method, [_sent(arg) for arg in args], {k: _sent(arg) for k, arg in kwargs.items()}))
        return reference


def remote(kind: type) -> SimpleNamespace:
    """Return an object whose `options(...).remote(...)` makes a `LocalActor` of a class, as with `ray.remote`. The
    options are ignored, since there are no resources to claim."""
    made = SimpleNamespace(remote=lambda *args: LocalActor(kind, args))
    return SimpleNamespace(options=lambda **_: made)


def put(value: object) -> Reference:
    """Copy a value as `ray.put` does, and return a reference to it."""
    reference: Reference = concurrent.futures.Future()
    reference.set_result(_copy(value))
    return reference


def wait(
    references: Sequence[Reference], *, num_returns: int, timeout: float | None, fetch_local: bool = False
) -> tuple[list[Reference], list[Reference]]:
    """Stand in for `ray.wait` where actors are threads: wait until all references are finished or `timeout` seconds
    have passed (None: no limit). Returns the finished and the unfinished references. `num_returns` and `fetch_local`
    are ignored: worker groups always wait for all references, and none is fetched from another node."""
    done = concurrent.futures.wait(references, timeout).done
    return [r for r in references if r in done], [r for r in references if r not in done]


def get(references: Reference | Sequence[Reference], *, timeout: float | None) -> Any:
    """Return the values of references, or of a single one, as `ray.get` does."""
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
    """Cancel a call that has not begun, as `ray.cancel` does; a call that has begun goes on."""
    reference.cancel()


def kill(actor: LocalActor) -> None:
    """End an actor as `ray.kill` does, except that a running call goes on: the actor's thread ends after it, or with
    the process."""
    with contextlib.suppress(queue.Empty):
        while True:
            actor.queue.get_nowait()[0].cancel()
    getattr(actor, END).remote()


def is_initialized() -> bool:
    """Return True always, as `ray.is_initialized` does in a process that is connected to a cluster."""
    return True


def _copy(value: object) -> Copy:
    """Pickle a value with Ray's pickle, so that whatever can be sent to a Ray actor can be sent to a local one."""
    buffers: list[pickle.PickleBuffer] = []
    dumps: Callable[..., bytes] = cloudpickle.dumps
    body = dumps(value, protocol=5, buffer_callback=buffers.append)
    return body, [bytes(buffer.raw()) for buffer in buffers]


def _sent(value: object) -> Copy | Reference:
    """Copy an argument for an actor; a reference is passed on as it is."""
    return value if isinstance(value, concurrent.futures.Future) else _copy(value)


def _received(sent: Copy | Reference) -> Any:
    """Unpickle a value for its receiver. Arrays are read-only, and all receivers of a value share their memory."""
    body, buffers = sent.result() if isinstance(sent, concurrent.futures.Future) else sent
    return pickle.loads(body, buffers=buffers)


def _serve(worker: object, calls: queue.SimpleQueue[Call]) -> None:
    """Carry out an actor's calls one after another, until it is ended. It runs in the actor's thread.

    Args:
        worker: the actor's object.
        calls: the queue of the actor's calls.
    """
    while True:
        reference, method, args, kwargs = calls.get()
        if reference.set_running_or_notify_cancel():
            try:
                reference.set_result(_result(worker, method, args, kwargs))
            except SystemExit:
                reference.set_exception(ActorDiedError())
            except BaseException as error:
                trace = "".join(traceback.format_exception(error))
                failed: Callable[..., RayTaskError] = RayTaskError
                reference.set_exception(failed(method, trace, error, ip="this process"))
        if method == END:
            return
        del reference, args, kwargs  # an idle worker must not keep the arguments of its last call alive


def _result(
    worker: object, method: str, args: Sequence[Copy | Reference], kwargs: Mapping[str, Copy | Reference]
) -> Copy:
    """Call a method of an actor's object with copies of the arguments, and return a copy of its result."""
    if method == END:
        return _copy(None)
    given = {name: _received(value) for name, value in kwargs.items()}
    return _copy(getattr(worker, method)(*map(_received, args), **given))
