"""What rewards, environments and engines in Ray actors share: the connection to Ray, what travels to an actor and back,
and pools of actors on reserved resources.
"""

from __future__ import annotations

import atexit
import io
import itertools
import os
import pickle
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from trlx_hybrid import plain_data, remote_errors
from trlx_hybrid.errors import ConfigError, listed

from . import debugging, internals, reaper
from .cluster import ADDRESS, LOCAL, NAMESPACE, connect
from .errors import brief
from .placement import Placement, PlacementRequest, reserve
from .printer import say
from .waiting import replies
from .worker_group.errors import DeadlineError, WorkerDiedError, WorkerError

DEADLINE = 600.0
"""Seconds that a batch of rewards, or a call of an environment, may take unless told otherwise."""
START_SECONDS = 120.0
"""Seconds that the workers of a reward or an environment may take to start unless told otherwise."""
GRACE = 1.0  # seconds that what an actor's user started has to end by itself, once the actor is gone
RETURNED, RAISED, NOT_PLAIN = b"v", b"e", b"n"  # what a reply begins with


# --- the connection -------------------------------------------------------------------------------------------------

_connecting = threading.Lock()
_connection = ExitStack()  # ends with the process


def ensure_connected() -> None:
    """Make sure that this process is connected to Ray. Says on standard error what it connected to.

    `RAY_ADDRESS` names the cluster to join, as it does in a job of `ray job submit` and under `trlx-hybrid launch`.
    Where it is not set, a cluster is started on this machine, and ends with this process.

    Raises:
        ConfigError: several training processes would each start a cluster.
        ClusterError: no cluster answers, or none can be started.
    """
    import ray

    with _connecting:
        debugging.check()
        if ray.is_initialized():
            return
        address = os.environ.get(ADDRESS) or LOCAL
        world = os.environ.get("WORLD_SIZE", "1")
        if address == LOCAL and world != "1":
            raise ConfigError(
                f"This is one of {world} training processes, and each would start a Ray cluster of its own. Start them "
                "with `trlx-hybrid launch`, or start one with `ray start --head` and set RAY_ADDRESS=auto."
            )
        cluster = _connection.enter_context(connect(address, namespace=os.environ.get(NAMESPACE)))
        atexit.register(_connection.close)  # registered after Ray's own handler, so it runs before that
    say(str(cluster))


def check_settings(function: str, deadline: float, **counts: int) -> None:
    """Of `remote_reward` and `remote_environment`, before anything starts.

    Raises:
        ConfigError: names the setting.
    """
    for setting, value in counts.items():
        if value < 1:
            raise ConfigError(f"{function}: {setting}={value}: at least one is needed.")
    if not deadline > 0:
        raise ConfigError(f"{function}: deadline={deadline}: seconds above 0, or math.inf to wait for ever.")


# --- to an actor and back -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Pickled:
    """What the user wrote, on its way to an actor.

    Attributes:
        what: it is, for messages.
        body: the pickle.
        path: `sys.path` of the sender: modules beside the user's script are found there, on machines that share it.
    """

    what: str
    body: bytes
    path: tuple[str, ...]

    @classmethod
    def of(cls, value: Any, what: str, remedy: str) -> Pickled:
        """What the script itself defines goes by value, everything else by its import.

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
        return cls(what, body, tuple(os.path.abspath(entry) for entry in sys.path))

    def load(self) -> Any:
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


def reply_of(function: Callable[[], Any]) -> bytes:
    """In an actor: call it; what it returned or raised, as plain data."""
    try:
        value = function()
    except BaseException as error:  # a tool's SystemExit is its error, not the end of this process
        if debugging.post_mortem():
            internals.stop_where_raised()
        return RAISED + plain_data.dumps(remote_errors.describe(error))
    try:
        return RETURNED + plain_data.dumps(value)
    except plain_data.NotPlainError as error:
        return NOT_PLAIN + str(error).encode()


def result_of(reply: bytes, where: str) -> Any:
    """In the trainer: what the function returned over there.

    Args:
        where: the actor, for the note on an exception.

    Raises:
        NotPlainError: it returned what is no plain data, or what is not known here; names the part.
        BaseException: what the function raised, with its traceback as a note.
    """
    kind, body = reply[:1], reply[1:]
    if kind == NOT_PLAIN:
        raise plain_data.NotPlainError(body.decode())
    found = plain_data.loads(body)
    if kind == RAISED:
        raise remote_errors.restore(found, where)
    return found


def whereabouts() -> str:
    """Of this actor, for messages."""
    import ray

    return f"node {ray.get_runtime_context().get_node_id()[:12]}, pid {os.getpid()}"


def see_own_gpus() -> None:
    """Let this actor see the GPUs that Ray gave it and no others, before CUDA starts in it.

    Ray does so by itself, but not where RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES has come down from what started the
    actor, nor for an actor without a GPU.
    """
    import ray

    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(str(gpu) for gpu in ray.get_gpu_ids())


# --- pools ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Worker:
    """One actor of a pool.

    Attributes:
        noun: what messages call it.
        index: in its pool; a replacement takes that of the one it replaces, and its resources.
        number: no two of a pool have the same.
        handle: of the actor.
        where: node and process, once it runs.
        dead: it cannot be called any more.
    """

    noun: str
    index: int
    number: int
    handle: Any
    where: str = ""
    dead: bool = False

    def __str__(self) -> str:
        return f"{self.noun} {self.index}" + (f" ({self.where})" if self.where else "")


class ActorPool:
    """Actors of one class, on resources that are reserved before anything starts.

    Args:
        kind: their class. Its method `ready` returns the reply to the start, and where the actor is, or raises.
        arguments: of its constructor.
        size: how many there are.
        places: reserves the resources. The last placement has a bundle for each actor.
        noun: what messages call one of them.
        start_deadline: seconds for all to start.
        threads: calls that an actor carries out at once; by default Ray's.

    Attributes:
        workers: by index; none before `launch` and after `close`.
    """

    def __init__(
        self,
        kind: type,
        arguments: Sequence[Any],
        size: int,
        places: Callable[[], Sequence[Placement]],
        *,
        noun: str = "worker",
        start_deadline: float,
        threads: int | None = None,
    ) -> None:
        import ray

        self.workers: dict[int, Worker] = {}
        self._class: Any = ray.remote(kind)
        self._arguments, self._size, self._places, self._noun, self._threads = arguments, size, places, noun, threads
        self._seconds = debugging.patience(start_deadline)
        self._reserved: Sequence[Placement] = ()
        self._starting: dict[Worker, Any] = {}
        self._numbers = itertools.count()

    def launch(self, indices: Sequence[int] | None = None) -> None:
        """Start actors in the background, in the place of those that are there; by default all that there are to be.

        Raises:
            PlacementError: the resources cannot be had.
        """
        self._reserved = self._reserved or self._places()
        for index in range(self._size) if indices is None else indices:
            actor = self._class.options(
                **self._reserved[-1].options(index),
                runtime_env={"env_vars": dict(debugging.variables())},
                max_concurrency=self._threads,
            )
            handle = actor.remote(*self._arguments)
            self.workers[index] = worker = Worker(self._noun, index, next(self._numbers), handle)
            self._starting[worker] = handle.ready.remote()

    def started(self) -> Iterator[tuple[Worker, BaseException | None]]:
        """Wait for all that were launched. What does not start is ended, and comes with the error: one of Ray's, or
        what it raised."""
        from ray.exceptions import RayError

        for worker, found in replies(self._starting, self._seconds):
            del self._starting[worker]
            error: BaseException | None = found if isinstance(found, RayError) else None
            if error is None:
                reply, worker.where = found
                try:
                    result_of(reply, str(worker))
                except (Exception, SystemExit) as met:  # the user's: it must not end this process
                    error = met
            if error is not None:
                self.kill(worker)
            yield worker, error

    def kill(self, worker: Worker) -> None:
        """End a worker, with whatever it is at."""
        import ray

        worker.dead = True
        ray.kill(worker.handle)

    def close(self) -> None:
        """End all actors and give the resources back. Safe to call twice."""
        import ray

        if ray.is_initialized():
            for worker in self.workers.values():
                self.kill(worker)
            for placement in self._reserved:
                placement.remove()
        self.workers, self._reserved, self._starting = {}, (), {}


class PoolActor:
    """Base of actors in a `UserPool`. Loads what the user wrote when it starts; `ready` tells what came of that.

    However an actor ends, on Linux nothing that it started outlives it, daemons included.
    """

    def __init__(self, pickled: Pickled, settings: Sequence[Any]) -> None:
        see_own_gpus()
        self._started = reply_of(lambda: self._start(pickled, settings))

    def _start(self, pickled: Pickled, settings: Sequence[Any]) -> None:
        if sys.platform == "linux":
            self._reaper = reaper.Reaper(GRACE, segments=False)  # first: what the user wrote may start something
        self.load(pickled.load(), *settings)

    def load(self, loaded: Any, *settings: Any) -> None:
        """Take what the user wrote."""
        raise NotImplementedError

    def ready(self) -> tuple[bytes, str]:
        """Reply to the start, and where this is."""
        return self._started, whereabouts()


class UserPool(ActorPool):
    """Actors that load what the user wrote: a reward or an environment.

    Args:
        kind: what they are; Ray shows them under `name`.
        pickled, settings: what each of them loads.
        role: for messages and for whoever looks up who holds what: "reward" or "environment".
        workers: how many.
        cpus, gpus: of each.
        others: as of `ActorPool`.

    Raises:
        ConfigError: the resources make no sense.
        others: see `restore`.
    """

    def __init__(
        self,
        kind: type[PoolActor],
        pickled: Pickled,
        settings: Sequence[Any] = (),
        *,
        name: str,
        role: str,
        workers: int,
        cpus: float,
        gpus: float,
        start_deadline: float,
        threads: int = 1,
    ) -> None:
        request = PlacementRequest(name=f"{role} {name}", replicas=workers, cpus=cpus, gpus=gpus, strategy="spread")
        super().__init__(
            type(name, (kind,), {"__module__": kind.__module__}),
            (pickled, settings),
            workers,
            lambda: [reserve(request)],
            start_deadline=start_deadline,
            threads=threads,
        )
        self._called = f"{role.capitalize()} {name!r}"
        try:
            self.restore()
        except BaseException:
            self.close()
            raise

    def restore(self) -> None:
        """Start another actor in the place of each that is dead; all after `close`.

        Raises:
            PlacementError: the resources cannot be had.
            DeadlineError: one did not start in time; names it.
            WorkerDiedError: one died while it started.
            WorkerError: it raised when it loaded what the user wrote; `__cause__` is that exception. A `HybridError`
                there is of what comes before: its reaper cannot start.
        """
        from ray.exceptions import GetTimeoutError, RayActorError

        self.launch([index for index, worker in self.workers.items() if worker.dead] if self.workers else None)
        for worker, error in self.started():
            if isinstance(error, GetTimeoutError):
                late = listed([str(other.index) for other in (worker, *self._starting)])
                raise self._error(
                    DeadlineError,
                    worker,
                    f"did not start within {self._seconds:g} s (not ready: {late}). Raise start_deadline= if its "
                    "imports are that slow.",
                ) from None
            if isinstance(error, RayActorError):
                raise self._error(WorkerDiedError, worker, f"died while it started: {brief(error)}") from error
            if error is not None:
                raise self._error(WorkerError, worker, f"did not start: {brief(error)}") from error

    def _error(self, kind: type[WorkerError], worker: Worker, what: str) -> WorkerError:
        return kind(f"{self._called}: {worker} {what}", rank=worker.index, method="__init__", node=worker.where)
