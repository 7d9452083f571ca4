"""The common parts of rewards, environments and engines in Ray actors: the connection to Ray, the values that travel to
an actor and back, and pools of actors on reserved resources."""

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
from typing import TYPE_CHECKING, Any, cast

from trlx_hybrid.errors import ConfigError, listed
from trlx_hybrid.interprocess import plain_data, remote_errors

from . import debugging, internals, reaper
from .cluster import ADDRESS, LOCAL, NAMESPACE, connect
from .errors import DeadlineError, WorkerDiedError, WorkerError, brief
from .placement import Placement, PlacementRequest, reserve
from .printer import say
from .waiting import Handle, Reference, replies

if TYPE_CHECKING:
    from ray.actor import ActorHandle

DEADLINE = 600.0
"""The default limit in seconds for scoring a batch with a remote reward, or for one call of a remote environment."""
START_SECONDS = 120.0
"""The default limit in seconds for the workers of a remote reward or environment to start."""
GRACE = 1.0  # seconds in which an actor's child processes may end by themselves once the actor is gone
RETURNED, RAISED, NOT_PLAIN = b"v", b"e", b"n"  # the first byte of a reply


# --- the connection -------------------------------------------------------------------------------------------------

_connecting = threading.Lock()
_connection = ExitStack()  # ends with the process


def ensure_connected() -> None:
    """Connect this process to a Ray cluster unless it is connected, and print the cluster's address to standard error.

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
    """Check numbers that a user passed to `remote_reward` or `remote_environment`, before anything starts.

    Args:
        function: the name of the called function, for messages.
        deadline: seconds, which must be above 0.
        counts: numbers by the name of their argument, such as `workers`, which must be 1 or more.

    Raises:
        ConfigError: a setting is out of range; the message names it.
    """
    for setting, value in counts.items():
        if value < 1:
            raise ConfigError(f"{function}: {setting}={value}: at least one is needed.")
    if not deadline > 0:
        raise ConfigError(f"{function}: deadline={deadline}: seconds above 0, or math.inf to wait for ever.")


# --- to an actor and back -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Pickled:
    """A pickled object of the user's, such as a reward function, to be sent to an actor and loaded there.

    Attributes:
        what: a description of the object, for messages.
        body: the pickle.
        path: `sys.path` of the sender. With it an actor finds modules beside the user's script, on machines that share
            the folder.
    """

    what: str
    body: bytes
    path: tuple[str, ...]

    @classmethod
    def of(cls, value: object, what: str, remedy: str) -> Pickled:
        """Pickle an object. Classes and functions that the script itself defines are pickled by value, all others by
        reference to their module.

        Args:
            what: a description of the object, for messages.
            remedy: advice for the user where the object cannot be pickled.

        Raises:
            ConfigError: the object cannot be pickled; the message names the part that prevents it.
        """
        from ray import cloudpickle

        try:
            dumps: Callable[[object], bytes] = cloudpickle.dumps
            body = dumps(value)
        except Exception as error:  # pickling runs arbitrary code
            raise ConfigError(f"{what} cannot be sent to its workers: {obstacle(value, error)}. {remedy}") from error
        return cls(what, body, tuple(os.path.abspath(entry) for entry in sys.path))

    def load(self) -> Any:
        """Unpickle the object in the actor. The sender's `sys.path` is added first, so that modules beside the user's
        script are found.

        Raises:
            ConfigError: a module is missing on this node, or its import fails.
        """
        sys.path += [entry for entry in self.path if entry not in sys.path]
        try:
            return pickle.loads(self.body)
        except Exception as error:  # unpickling imports arbitrary modules
            raise ConfigError(
                f"{self.what} cannot be loaded on node {os.uname().nodename}: {type(error).__name__}: {error}. Its "
                "modules must be installed there, or lie in a folder that all nodes share."
            ) from error


def obstacle(value: object, error: BaseException) -> str:
    """Return, for a message, why an object cannot be pickled, and which of its parts prevents it, as far as that can be
    found out.

    Args:
        error: the exception that pickling the object raised.
    """
    from ray.util import inspect_serializability

    reason = " ".join(str(error).split())[:200]
    try:
        _, found = inspect_serializability(value, name="it", print_file=io.StringIO())
    except Exception:  # it inspects arbitrary objects, only for a message
        found = set()
    parts = sorted({f"{part.path[-1]!r}, a {type(part.obj).__qualname__}" for part in found if len(part.path) > 1})
    return f"it holds {'; '.join(parts)} ({reason})" if parts else reason


def reply_of(function: Callable[[], object]) -> bytes:
    """Call a function in an actor, and return its result, or the exception that it raised, as bytes for the trainer,
    which decodes them with `result_of`. The bytes are no pickle but plain data (JSON with tags), whose decoding runs no
    foreign code. If the result cannot be sent as plain data, the bytes hold an error message that names the part of the
    result which cannot, and `result_of` raises NotPlainError with it."""
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
    """Decode, in the trainer, the bytes in which `reply_of` encoded the outcome of a function in an actor: return the
    function's result, or raise the exception that the function raised.

    Args:
        where: a description of the actor, for the note on an exception.

    Raises:
        NotPlainError: the result could not be encoded, or holds a class that this process has not imported; the message
            names the part.
        BaseException: the function's exception, with its traceback as a note; a `RemoteError` with its text where it
            cannot be rebuilt.
    """
    kind, body = reply[:1], reply[1:]
    if kind == NOT_PLAIN:
        raise plain_data.NotPlainError(body.decode())
    found = plain_data.loads(body)
    if kind == RAISED:
        raise remote_errors.restore(found, where)
    return found


def whereabouts() -> str:
    """Return node and process id of this actor as text, for messages."""
    import ray

    return f"node {ray.get_runtime_context().get_node_id()[:12]}, pid {os.getpid()}"


def see_own_gpus() -> None:
    """Let this actor see only the GPUs that Ray gave it, before CUDA starts in it.

    Ray does so by itself, but not for an actor without a GPU, nor where the actor inherited
    RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES from the process that started it.
    """
    import ray

    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(str(gpu) for gpu in ray.get_gpu_ids())


# --- pools ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Worker:
    """An actor of an `ActorPool`, with its position in the pool and whether it lives.

    Attributes:
        noun: the word for such an actor in messages, such as "engine".
        index: the position in the pool. A replacement takes the index and the resources of the actor that it replaces.
        number: a number that is unique in the pool, replacements included.
        handle: Ray's handle of the actor.
        where: the actor's node and process, for messages; "" until it runs.
        dead: whether the actor can no longer be called.
    """

    noun: str
    index: int
    number: int
    handle: Handle
    where: str = ""
    dead: bool = False

    def __str__(self) -> str:
        return f"{self.noun} {self.index}" + (f" ({self.where})" if self.where else "")


class ActorPool:
    """A pool of actors of one class, on resources that are reserved before anything starts.

    Args:
        kind: the actors' class. Its method `ready` returns two values: the outcome of the start, as bytes that
            `reply_of` made, and the actor's node and process as text, from `whereabouts()`. It may also raise.
        arguments: the arguments of its constructor.
        size: the number of actors.
        places: a function that reserves the resources, called at the first start. It returns Ray placement groups, of
            which the last one has a bundle for each actor.
        noun: the word for an actor in messages.
        start_deadline: seconds for all actors to start.
        threads: the number of calls that an actor carries out at once; by default Ray's.

    Attributes:
        workers: the actors, by index; empty before `launch` and after `close`.
    """

    def __init__(
        self,
        kind: type,
        arguments: Sequence[object],
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
        self._starting: dict[Worker, Reference] = {}
        self._numbers = itertools.count()

    def launch(self, indices: Sequence[int] | None = None) -> None:
        """Start the actors of these indices in the background, in place of any that exist; by default all actors of the
        pool. Call `started` to wait for them.

        Raises:
            PlacementError: the resources are not available.
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
        """Wait for all launched actors, and yield each with None, or with the error that kept it from starting. That is
        one of Ray's errors, or the exception that the actor raised. An actor that does not start is killed."""
        from ray.exceptions import RayError

        for worker, found in replies(self._starting, self._seconds):
            del self._starting[worker]
            error: BaseException | None = found if isinstance(found, RayError) else None
            if error is None:
                reply, worker.where = found
                try:
                    result_of(reply, str(worker))
                except (Exception, SystemExit) as met:  # the user's SystemExit must not end this process
                    error = met
            if error is not None:
                self.kill(worker)
            yield worker, error

    def kill(self, worker: Worker) -> None:
        """Kill an actor of the pool, even during a call, and mark it as dead."""
        import ray

        worker.dead = True
        ray.kill(cast("ActorHandle[object]", worker.handle))

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
    """The base class of actors in a `UserPool`. The constructor loads the user's object, and `ready` reports whether
    that worked.

    On Linux no process that an actor started outlives it, daemons included, however the actor ends.
    """

    def __init__(self, pickled: Pickled, settings: Sequence[object]) -> None:
        see_own_gpus()
        self._started = reply_of(lambda: self._start(pickled, settings))

    def _start(self, pickled: Pickled, settings: Sequence[object]) -> None:
        if sys.platform == "linux":
            self._reaper = reaper.Reaper(GRACE, segments=False)  # first, since the user's code may start processes
        self.load(pickled.load(), *settings)

    def load(self, loaded: Any, *settings: Any) -> None:
        """Store the user's object and the settings of the pool; the actor's constructor calls this. Subclasses
        implement it; an exception that it raises is reported as a failed start.

        Args:
            loaded: the user's object, unpickled.
            settings: the argument `settings` of the actor's `UserPool`, item by item.
        """
        raise NotImplementedError

    def ready(self) -> tuple[bytes, str]:
        """Return the outcome of the start (None, or the exception that was raised), as bytes that the trainer decodes
        with `result_of`; and a text that names the actor's node and process."""
        return self._started, whereabouts()


class UserPool(ActorPool):
    """A pool of actors that each load a copy of one object of the user's: a reward or an environment. The actors start
    when the pool is made.

    Args:
        kind: the actors' class. Ray shows the actors under `name`.
        pickled, settings: the object and the further values that each actor gets, see `PoolActor.load`.
        name: the reward's or environment's name.
        role: "reward" or "environment", for messages and for lists of who holds which resources.
        workers: the number of actors.
        cpus, gpus: the resources of each actor.
        start_deadline: seconds for all actors to start.
        threads: the number of calls that an actor carries out at once.

    Raises:
        ConfigError: the resources make no sense.
        HybridError: the resources are not available, or an actor does not start; `restore` lists the classes.
    """

    def __init__(
        self,
        kind: type[PoolActor],
        pickled: Pickled,
        settings: Sequence[object] = (),
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
        """Start another actor in place of each dead one, or all actors where there are none yet or after `close`. Waits
        until they have started.

        Raises:
            PlacementError: the resources are not available.
            DeadlineError: an actor did not start in time; the message names it.
            WorkerDiedError: an actor died while it started.
            WorkerError: an actor raised while it loaded the user's object; `__cause__` is that exception. If it is a
                `HybridError`, the reaper, a process that later ends what the actor has started, could not start.
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
