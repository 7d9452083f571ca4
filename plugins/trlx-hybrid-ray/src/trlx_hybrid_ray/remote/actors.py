"""What rewards, environments and engines in Ray actors share: the connection to Ray, what travels to an actor and back,
waits for answers, and pools of actors on reserved resources.
"""

from __future__ import annotations

import atexit
import io
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from trlx_hybrid import plain_data, remote_errors
from trlx_hybrid.errors import ConfigError, listed

from .. import debugging
from ..cluster import ADDRESS, LOCAL, NAMESPACE, connect
from ..errors import brief
from ..placement import PlacementRequest, reserve
from ..printer import say
from ..worker_group.errors import DeadlineError, WorkerDiedError, WorkerError

DEADLINE = 600.0
"""Seconds that a batch of rewards, or a call of an environment, may take unless told otherwise."""
START_SECONDS = 120.0
"""Seconds that the workers of a reward or an environment may take to start unless told otherwise."""
LOOK = 1.0  # seconds of waiting at a time
RETURNED, RAISED, NOT_PLAIN = b"v", b"e", b"n"  # what a reply begins with
BREAKPOINT = "PYTHONBREAKPOINT"


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
        before = os.environ.get(BREAKPOINT)
        cluster = _connection.enter_context(
            connect(
                address,
                namespace=os.environ.get(NAMESPACE),
                forward_logs=debugging.wanted(),
                dashboard=address == LOCAL and debugging.wanted() and not debugging.legacy(),
            )
        )
        # `breakpoint()` in the user's own script stays pdb's: Ray's, without debugpy, passes it over.
        if before is None:
            os.environ.pop(BREAKPOINT, None)
        else:
            os.environ[BREAKPOINT] = before
        atexit.register(_connection.close)  # registered after Ray's own handler, so it runs before that
    say(str(cluster))
    if debugging.legacy():
        say(f"debugger: {debugging.attach_command(cluster.address, cluster.token)}")


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
            import ray

            ray.util.rpdb._post_mortem()  # type: ignore[no-untyped-call]
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


# --- waits ----------------------------------------------------------------------------------------------------------


class RunningClock:
    """Seconds that this process ran since the clock was made; looked at once a second or so.

    A process that is stopped (SIGSTOP, a suspended machine) hears nothing of the others meanwhile. That time says
    nothing about them: of the time between two looks, no more than `2 * LOOK` counts.
    """

    def __init__(self) -> None:
        self._seconds, self._looked = 0.0, time.monotonic()

    def now(self) -> float:
        """Seconds so far."""
        before, self._looked = self._looked, time.monotonic()
        self._seconds += min(self._looked - before, 2 * LOOK)
        return self._seconds


def wait(
    references: Sequence[Any], seconds: float, count: int | None = None, clock: RunningClock | None = None
) -> tuple[list[Any], list[Any]]:
    """As `ray.wait`, for so many seconds in which this process ran: those that are there, and those that are not.

    Args:
        count: how many are enough; by default all.
        clock: that the seconds are read from; by default they begin now.
    """
    import ray

    clock, count = clock or RunningClock(), len(references) if count is None else count
    while references:
        look = min(LOOK, max(0.0, seconds - clock.now()))
        ready, late = ray.wait(list(references), num_returns=count, timeout=look)
        if len(ready) >= count or clock.now() >= seconds:
            return ready, late
    return [], []


def arriving(references: Sequence[Any], seconds: float) -> Iterator[Any]:
    """References in the order in which their answers come.

    Raises:
        TimeoutError: not all came in that time.
    """
    clock, late = RunningClock(), list(references)
    while late:
        ready, late = wait(late, seconds, 1, clock)
        if not ready:
            raise TimeoutError
        yield from ready


# --- pools ----------------------------------------------------------------------------------------------------------


class PoolActor:
    """Base of actors in a pool. Loads what the user wrote when it starts; `ready` tells what came of that."""

    def __init__(self, pickled: Pickled, settings: Sequence[Any]) -> None:
        see_own_gpus()
        self._started = reply_of(lambda: self.load(pickled.load(), *settings))

    def load(self, loaded: Any, *settings: Any) -> None:
        """Take what the user wrote."""
        raise NotImplementedError

    def ready(self) -> tuple[bytes, str]:
        """Reply to the start, and where this is."""
        return self._started, whereabouts()


@dataclass(slots=True, eq=False)
class Worker:
    """One actor of a pool.

    Attributes:
        number: in its pool; a replacement takes the number of the one it replaces.
        handle: of the actor.
        where: node and process.
        dead: it cannot be called any more.
    """

    number: int
    handle: Any
    where: str = ""
    dead: bool = False

    def __str__(self) -> str:
        return f"worker {self.number} ({self.where})" if self.where else f"worker {self.number}"


class ActorPool:
    """Actors of one class, on resources that are reserved before anything starts.

    Args:
        kind: a `PoolActor`.
        pickled, settings: what each of them loads.
        name: of the reward or environment; Ray shows its actors under it.
        role: what it is, for messages and for whoever looks up who holds what: "reward" or "environment".
        cpus, gpus: of each actor.
        threads: calls that an actor carries out at once.
        start_deadline: seconds for all to start.

    Attributes:
        workers: by number; none once the pool is closed.

    Raises:
        ConfigError: the resources make no sense.
        PlacementError: they cannot be had.
        WorkerError, WorkerDiedError, DeadlineError: a worker did not start; see `replace_dead`.
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
        threads: int = 1,
        start_deadline: float = START_SECONDS,
    ) -> None:
        import ray

        # Under the user's name: it is what `ray list actors` and Ray's own messages show.
        self._class: Any = ray.remote(type(name, (kind,), {"__module__": kind.__module__}))
        self._arguments, self._name, self._role, self._threads = (pickled, settings), name, role, threads
        self._seconds = debugging.patience(start_deadline)
        self._reserved = reserve(
            PlacementRequest(name=f"{role} {name}", replicas=workers, cpus=cpus, gpus=gpus, strategy="spread")
        )
        self.workers: list[Worker] = []
        try:
            self.workers = [self._launched(number) for number in range(workers)]
            self._await(self.workers)
        except BaseException:
            self.close()
            raise

    def replace_dead(self) -> None:
        """Start another actor in the place of each that is dead.

        Raises:
            DeadlineError: one did not start in time; names it.
            WorkerDiedError: one died while it started.
            WorkerError: it raised when it loaded what the user wrote; `__cause__` is that exception.
        """
        dead = [worker.number for worker in self.workers if worker.dead]
        for number in dead:
            self.workers[number] = self._launched(number)
        self._await([self.workers[number] for number in dead])

    def kill(self, worker: Worker) -> None:
        """End a worker, with whatever it is at."""
        import ray

        worker.dead = True
        ray.kill(worker.handle)

    def close(self) -> None:
        """End all workers and give the resources back. Safe to call twice."""
        import ray

        workers, self.workers = self.workers, []
        if ray.is_initialized():
            for worker in workers:
                ray.kill(worker.handle)
            self._reserved.remove()

    def _launched(self, number: int) -> Worker:
        actor = self._class.options(
            **self._reserved.options(number),
            runtime_env={"env_vars": dict(debugging.variables())},
            max_concurrency=self._threads,
        )
        return Worker(number, actor.remote(*self._arguments))

    def _await(self, workers: Sequence[Worker]) -> None:
        import ray

        pending = {worker.handle.ready.remote(): worker for worker in workers}
        try:
            for reference in arriving(list(pending), self._seconds):
                worker = pending.pop(reference)
                try:
                    reply, worker.where = ray.get(reference)
                    result_of(reply, str(worker))
                except ray.exceptions.RayActorError as error:
                    worker.dead = True
                    raise self._error(WorkerDiedError, worker, f"died while it started: {brief(error)}") from error
                except Exception as error:
                    self.kill(worker)
                    raise self._error(WorkerError, worker, f"did not start: {brief(error)}") from error
        except TimeoutError:
            late = list(pending.values())
            for worker in late:
                self.kill(worker)
            numbers = listed([str(worker.number) for worker in late])
            raise self._error(
                DeadlineError,
                late[0],
                f"did not start within {self._seconds:g} s (not ready: {numbers}). Raise start_deadline= if its "
                "imports are that slow.",
            ) from None

    def _error(self, kind: type[WorkerError], worker: Worker, what: str) -> WorkerError:
        text = f"{self._role.capitalize()} {self._name!r}: {worker} {what}"
        return kind(text, rank=worker.number, method="__init__", node=worker.where)
