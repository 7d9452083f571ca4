"""TRL environments that run in Ray actors, several in each: the function `remote_environment`."""

from __future__ import annotations

import asyncio
import functools
import gc
import inspect
import itertools
import logging
import threading
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Coroutine, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from trlx_hybrid.errors import ConfigError
from trlx_hybrid.interprocess.plain_data import NotPlainError

from .. import debugging
from ..actors import (
    DEADLINE,
    START_SECONDS,
    Pickled,
    PoolActor,
    UserPool,
    Worker,
    check_settings,
    ensure_connected,
    reply_of,
    result_of,
)
from ..errors import EnvironmentLostError, brief
from ..waiting import Handle, Reference, arrives, wait

T = TypeVar("T")

logger = logging.getLogger(__name__)
REMEDY = "Let its constructor make what cannot be sent: constructors run in the workers."
"""The advice for a user whose environment cannot be pickled."""
OPTIONAL = ("get_reward", "close")
"""The methods that return None, instead of raising, for an environment that is lost: it cannot be scored and need not
be closed."""
SPARE = 4
"""The number of threads of a worker (an actor with environments) in addition to one per environment, for making and
deleting environments, and for calls that hang."""
STUCK = 2
"""The number of environments with a hanging call, per worker, that are left out when a worker's environments are
counted, so that other environments can take their places."""
ORDER_SECONDS = 10.0
"""The seconds that a call waits for an earlier call of the same environment to start."""


def remote_environment(
    environment: Any,
    *,
    workers: int = 1,
    per_worker: int = 64,
    cpus: float = 1.0,
    gpus: float = 0.0,
    deadline: float = DEADLINE,
    start_deadline: float = START_SECONDS,
    name: str | None = None,
) -> RemoteEnvironments:
    """Make an `environment_factory` for TRL whose environments live in Ray actors.

    ```python
    trainer = GRPOTrainer(..., environment_factory=remote_environment(Sandbox, workers=16, per_worker=4))
    ```

    The factory's environments have the class's name and methods, with their signatures and docstrings: TRL finds the
    same tools and the same `get_reward`, and `episodes` of the package trlx-hybrid-multiturn, as in
    `episodes(remote_environment(Game))`, finds the same `reset` and `step`. Synchronous methods stay synchronous and
    coroutine functions stay coroutine functions. Reward functions can read attributes; each read is a call. Results of
    methods are plain data, such as numbers, text, lists, dicts, dataclasses, NumPy arrays and images of PIL, see
    `trlx_hybrid.interprocess.plain_data`.

    Args:
        environment: a class, or `functools.partial` of a class with its constructor's arguments.
        workers: the number of actors, which start at once.
        per_worker: the number of environments in each worker, each in a thread. Whatever these environments share must
            be thread-safe, and they die together. With 1, each environment has a process of its own.
        cpus, gpus: the resources of each worker. With a fraction of a GPU, workers share a GPU.
        deadline: seconds that a call may take; `math.inf` waits for ever.
        start_deadline: seconds for all workers to start, imports included.
        name: the name in messages, and in lists of who holds which resources; by default the class's name.

    Raises:
        ConfigError: `environment` is no class, or cannot be pickled.
        ClusterError: no cluster answers at `RAY_ADDRESS`, or none can be started here.
        PlacementError: the cluster does not have the resources.
        WorkerError: a worker did not start, or could not load the class.
    """
    kind = environment
    while isinstance(kind, functools.partial):
        kind = kind.func
    if not inspect.isclass(kind):
        raise ConfigError(
            f"remote_environment takes a class, whose methods it has to know, and got {environment!r:.80}. "
            "Arguments for its constructor: functools.partial(TheClass, argument=1)."
        )
    check_settings("remote_environment", deadline, workers=workers, per_worker=per_worker)
    ensure_connected()
    actors = UserPool(
        EnvironmentActor,
        Pickled.of(environment, f"Environment {kind.__name__!r}", REMEDY),
        name=name or kind.__name__,
        role="environment",
        workers=workers,
        cpus=cpus,
        gpus=gpus,
        threads=per_worker + SPARE,
        start_deadline=start_deadline,
    )
    proxy = proxy_class(cast("Hashable", kind))
    return RemoteEnvironments(actors, proxy, per_worker, debugging.patience(deadline))


# --- in the trainer -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EnvironmentHandle:
    """A picklable reference to an environment in an actor. Other processes that receive the reference may call the
    environment, too.

    Attributes:
        name: the name of the environment's class.
        actor: Ray's handle of the environment's actor.
        key: the environment's number in the actor.
        where: a description of the actor, for messages.
        deadline: seconds that a call may take.
    """

    name: str
    actor: Handle
    key: int
    where: str
    deadline: float

    async def reply(self, method: str, reference: Reference, *, blocking: bool) -> bytes:
        """Wait for the worker's reply to a call, and return the reply: bytes for `result`.

        Args:
            method: the name of the called method, for messages.
            reference: Ray's reference to the reply.
            blocking: whether to wait in this thread rather than on an event loop.

        Raises:
            EnvironmentLostError: the worker died or did not answer in time; `__cause__` is Ray's error or a
                `TimeoutError`.
        """
        import ray

        ready = wait([reference], self.deadline)[0] if blocking else await arrives(reference, self.deadline)
        if not ready:
            raise EnvironmentLostError(
                f"environment '{self.name}.{method}' did not return within {self.deadline:g} s, in {self.where}; the "
                "call may still run. Give it a timeout of its own, or raise deadline=."
            ) from TimeoutError()
        try:
            reply: bytes = ray.get(reference)
        except ray.exceptions.RayError as error:
            raise EnvironmentLostError(
                f"environment '{self.name}.{method}': {self.where} died: {brief(error).rstrip('.')}. Its log and the "
                "node's say why; out of memory is the usual cause"
            ) from error
        return reply

    def result(self, method: str, reply: bytes) -> Any:
        """Decode a worker's reply: return the method's result, or raise the exception that the method raised.

        Args:
            method: the name of the called method, for messages.
            reply: the bytes that `EnvironmentHandle.reply` returned.

        Raises:
            EnvironmentLostError: the method returned a value that cannot be sent.
            BaseException: whatever the method raised.
        """
        try:
            return result_of(reply, "the environment's process")
        except NotPlainError as error:
            raise EnvironmentLostError(
                f"environment '{self.name}.{method}' returned {error}. Return plain data."
            ) from None


class RemoteEnvironments:
    """The factory that `remote_environment` returns: a call makes an environment. Workers are filled evenly, and
    replaced when they die.

    Every training process that makes a factory has workers of its own. They end with the process, or when `close` is
    called or a `with` block is left.

    Args:
        actors: the pool of actors.
        kind: the class of the objects that a call returns: a proxy class, whose methods call the environment in its
            worker.
        per_worker: the largest number of environments in each worker.
        deadline: seconds that a call may take.
    """

    def __init__(self, actors: UserPool, kind: type[RemoteEnvironment], per_worker: int, deadline: float) -> None:
        self.__name__ = kind.__name__
        self._actors, self._kind, self._per_worker, self._deadline = actors, kind, per_worker, deadline
        self._lock = threading.RLock()
        self._numbers = itertools.count()
        self._places: dict[int, Worker] = {}  # worker of each environment, by the environment's number
        self._stuck: dict[Reference, int] = {}  # calls that timed out and may still run -> number of their environment
        self._freed: deque[int] = deque()

    def __call__(self) -> RemoteEnvironment:
        """Make an environment in the worker with the fewest environments, and return a proxy of it. Dead workers are
        replaced first; if the worker dies or does not answer in time, a second attempt is made.

        Raises:
            ConfigError: all workers are full, or were ended.
            EnvironmentLostError: the worker died in the constructor, or the constructor did not return in time, and the
                same happened in the second attempt.
            WorkerError: the replacement of a dead worker did not start.
            BaseException: whatever the environment's constructor raises.
        """
        return self._kind(self)

    def close(self) -> None:
        """End the workers, with the environments in them, and give their resources back."""
        with self._lock:
            self._actors.close()

    def __enter__(self) -> RemoteEnvironments:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- for the environments ---------------------------------------------------------------------------------------

    def make(self) -> EnvironmentHandle:
        """Make an environment in the worker with the fewest environments, and return a handle of it. Dead workers are
        replaced first; if the worker dies or does not answer in time, a second attempt is made.

        Raises:
            ConfigError: all workers are full, or were ended.
            EnvironmentLostError: in both attempts the worker died, or the constructor did not return in time.
            WorkerError: the replacement of a dead worker did not start.
            BaseException: whatever the environment's constructor raises.
        """
        try:
            return self._made()
        except EnvironmentLostError:
            return self._made()

    def lose(self, key: int, call: Reference, *, died: bool) -> None:
        """Record that an environment is lost: its worker died, or a call of it hangs. A dead worker is replaced when
        the next environment is made.

        A call that hangs may still run, and its thread cannot be ended. If workers have one environment each, the
        worker is killed. Otherwise the environment counts as stuck until the call returns; up to `STUCK` stuck
        environments of a worker do not count towards its `per_worker` environments.

        Args:
            key: the environment's number.
            call: Ray's reference to the answer of the call that failed or hangs.
            died: whether the worker died.
        """
        worker = self._places.get(key)
        if worker is None:
            return
        if died:
            worker.dead = True
        elif self._per_worker == 1 and not worker.dead:
            self._actors.kill(worker)
        if not worker.dead:
            self._stuck[call] = key
            call.future().add_done_callback(lambda _: self.free(self._stuck.pop(call)))

    def free(self, key: int) -> None:
        """Record that an environment is no longer used. The garbage collector may call this, so it only adds the
        environment's number to a queue."""
        self._freed.append(key)

    def _made(self) -> EnvironmentHandle:
        """Make an environment in the worker with the fewest environments, and return a handle of it. Unlike `make`, it
        raises `EnvironmentLostError` at once if the worker dies or does not answer in time."""
        with self._lock:
            if not self._actors.workers:
                raise ConfigError(f"The remote environments {self.__name__!r} were closed. Make new ones.")
            self._actors.restore()
            taken = self._taken()
            if min(taken.values()) >= self._per_worker:
                gc.collect()  # an error's traceback can hold an environment that is no longer used
                taken = self._taken()
            worker = min(taken, key=lambda worker: (taken[worker], worker.index))
            if taken[worker] >= self._per_worker:
                raise ConfigError(self._full())
            key = next(self._numbers)
            self._places[key] = worker
        handle = EnvironmentHandle(self.__name__, worker.handle, key, str(worker), self._deadline)
        made = worker.handle.make.remote(key)
        try:
            reply = _now(handle.reply("__init__", made, blocking=True))
        except EnvironmentLostError as error:
            self.lose(key, made, died=not isinstance(error.__cause__, TimeoutError))
            raise
        try:
            handle.result("__init__", reply)
        except BaseException:
            self.free(key)
            raise
        return handle

    def _taken(self) -> dict[Worker, int]:
        """Delete the environments that were freed, and return each worker's number of environments, to be compared with
        `per_worker`. Up to `STUCK` stuck environments of a worker are left out."""
        stuck = set(self._stuck.values())
        gone: defaultdict[Worker, list[int]] = defaultdict(list)
        while self._freed:
            key = self._freed.popleft()
            if key in self._places and key not in stuck:  # a stuck environment is freed when its call returns
                gone[self._places.pop(key)].append(key)
        for worker, keys in gone.items():
            if not worker.dead:
                worker.handle.drop.remote(keys)
        held = Counter(self._places.values())
        hanging = Counter(self._places[key] for key in stuck if key in self._places)
        return {worker: held[worker] - min(hanging[worker], STUCK) for worker in self._actors.workers.values()}

    def _full(self) -> str:
        """Return the error message for a new environment when all workers are full."""
        workers, stuck = list(self._actors.workers.values()), set(self._stuck.values())
        held = [key for key, worker in self._places.items() if worker in workers]
        hanging = sum(key in stuck for key in held)
        told = f" {hanging} of them hang in a call that was given up, and keep a thread each." if hanging else ""
        return (
            f"{len(held)} environments {self.__name__!r} are in use, all that workers={len(workers)} with "
            f"per_worker={self._per_worker} have places for: each completion of a batch takes one.{told} Raise either."
        )


class RemoteEnvironment:
    """The base class of proxies for environments. A proxy's methods call the methods of the environment in its worker
    (an actor); reading any other attribute reads it there; attributes cannot be set.

    Args:
        factory: the object that `remote_environment` returned, which owns the workers.
    """

    __slots__ = ("__weakref__", "_factory", "_finalizer", "_handle", "_lost", "_turn")

    _factory: RemoteEnvironments | None  # None in a process that received the environment from another one
    _handle: EnvironmentHandle
    _lost: str | None  # the reason, once the environment is lost
    _turn: int | None  # number of the next asynchronous call; None in other processes, whose calls are not ordered

    def __init__(self, factory: RemoteEnvironments) -> None:
        self._factory = factory
        self._make(factory)

    def _make(self, factory: RemoteEnvironments) -> None:
        """Make an environment in a worker for this proxy. The environment is deleted in the worker when the proxy is no
        longer used here."""
        self._handle, self._lost, self._turn = factory.make(), None, 0
        self._finalizer = weakref.finalize(self, factory.free, self._handle.key)
        self._finalizer.atexit = False

    def _renew(self, factory: RemoteEnvironments) -> None:
        """Make another environment for this proxy, in place of a lost one."""
        self._finalizer()
        self._make(factory)

    def _call(self, method: str, args: Sequence[object], kwargs: Mapping[str, object]) -> Any:
        """Call a method of the environment in its worker, wait in this thread, and return the method's result. If the
        environment is lost, `get_reward` and `close` return None."""
        return self._result(method, _now(self._reply("call", method, args, kwargs, blocking=True)))

    async def _call_later(self, method: str, args: Sequence[object], kwargs: Mapping[str, object]) -> Any:
        """Call a method of the environment in its worker, and return the method's result. The event loop runs other
        coroutines during the call. If the environment is lost, `get_reward` and `close` return None."""
        return self._result(method, await self._reply("call", method, args, kwargs, blocking=False))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self._result(name, _now(self._reply("read", name, blocking=True)))

    async def _reply(self, verb: str, method: str, *details: object, blocking: bool) -> bytes | None:
        """Send a call to the environment's worker, and return the reply as bytes. None if the environment is lost and
        no answer is needed: for an attribute, `get_reward` and `close`.

        `reset` makes a new environment if the old one is lost, or dies in `reset`. The episode has not begun, so
        nothing is lost with the old environment.

        Args:
            verb: "call" a method, or "read" an attribute.
            method: the name of the method or attribute.
            details: the arguments of the method, as a sequence and a mapping.
            blocking: whether to wait in this thread rather than on an event loop.

        Raises:
            EnvironmentLostError: the environment's worker died, or an earlier call may still run: the environment
                cannot be called any more.
        """
        optional = verb == "read" or method in OPTIONAL
        factory = self._factory if method == "reset" else None
        again = factory is not None
        while True:
            if self._lost is not None:
                if optional:
                    return None
                if factory is None:
                    raise EnvironmentLostError(self._lost)
                if blocking:
                    self._renew(factory)
                else:
                    await asyncio.to_thread(self._renew, factory)
            handle, given = self._handle, details
            if not blocking and self._turn is not None:
                given, self._turn = (*details, self._turn), self._turn + 1
            call = getattr(handle.actor, verb).remote(handle.key, method, *given)
            try:
                return await handle.reply(method, call, blocking=blocking)
            except EnvironmentLostError as error:
                self._lost, died = str(error), not isinstance(error.__cause__, TimeoutError)
                if self._factory is not None:
                    self._factory.lose(handle.key, call, died=died)
                if optional:
                    logger.warning("The episode of an environment is over, and cannot be scored by it: %s", error)
                elif not (died and again):
                    raise
                again = False

    def _result(self, method: str, reply: bytes | None) -> Any:
        """Decode a worker's reply: return the method's result, or raise what the method raised. It is not a part of the
        coroutine `_reply`, because a coroutine cannot raise StopIteration, and a method may.

        Args:
            method: the name of the method or attribute.
            reply: the reply; None where the environment is lost and no reply is needed, and the result is then None.
        """
        return None if reply is None else self._handle.result(method, reply)

    def __reduce__(self) -> tuple[object, ...]:
        return _visiting, (type(self), self._handle, self._lost)

    def __repr__(self) -> str:
        return f"<remote environment {self._handle.name!r} in {self._handle.where}>"


def _visiting(kind: type[RemoteEnvironment], handle: EnvironmentHandle, lost: str | None) -> RemoteEnvironment:
    """Return a proxy of an environment that another process has made; unpickling a proxy, such as in a reward
    function's worker, calls this. The proxy cannot replace a lost environment by a new one.

    Args:
        kind: the proxy class.
        handle: the environment's handle.
        lost: why the environment is lost, or None.
    """
    found = object.__new__(kind)
    found._factory, found._handle, found._lost, found._turn = None, handle, lost, None
    return found


def _now(coroutine: Coroutine[object, None, T]) -> T:
    """Run a coroutine to its end without an event loop, and return its result. Its calls may block this thread.
    Raises RuntimeError if it waits for an event loop."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        result: T = stop.value
        return result
    raise RuntimeError("it waits for an event loop")


@functools.cache  # TRL tells environments apart by their class, so one class has one proxy
def proxy_class(environment: type) -> type[RemoteEnvironment]:
    """Return the proxy class of an environment class. It has the same name, methods, docstrings and signatures, from
    which TRL makes tools."""
    methods = {
        name: _method(environment, name, function)
        for name, function in inspect.getmembers(environment, predicate=inspect.isfunction)
        if not name.startswith("_")
    }
    about = {"__slots__": (), "__doc__": environment.__doc__, "__module__": __name__}
    return type(environment.__name__, (RemoteEnvironment,), about | methods)


def _method(environment: type, name: str, function: Callable[..., object]) -> Callable[..., object]:
    """Return a proxy's method, which calls the environment's method of that name in the worker. It is a coroutine
    function if the environment's method is one."""
    method: Any
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def method(self: RemoteEnvironment, *args: object, **kwargs: object) -> object:
            return await self._call_later(name, args, kwargs)

    else:

        @functools.wraps(function)
        def method(self: RemoteEnvironment, *args: object, **kwargs: object) -> object:
            return self._call(name, args, kwargs)

    if isinstance(inspect.getattr_static(environment, name), staticmethod):  # it has no `self` to leave out
        signature = inspect.signature(function)
        own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        method.__signature__ = signature.replace(parameters=[own, *signature.parameters.values()])
    return cast("Callable[..., object]", method)


# --- in the actor ---------------------------------------------------------------------------------------------------


class EnvironmentActor(PoolActor):
    """An actor that makes environments and calls their methods, each call in a thread of its own. Results and
    exceptions are returned as bytes, which `result_of` decodes in the trainer."""

    def load(self, loaded: Callable[[], object]) -> None:
        """Store the function that makes environments, and start the event loop for their coroutines.

        Args:
            loaded: the environment's class, or a `functools.partial` of it.
        """
        self._make = loaded
        self._environments: dict[int, object] = {}
        self._turns: dict[int, int] = {}
        self._turning = threading.Condition()
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="environments", daemon=True).start()

    def make(self, key: int) -> bytes:
        """Make a new environment and store it. Returns None, or the constructor's exception, as bytes that the trainer
        decodes with `result_of`.

        Args:
            key: the number by which the environment is called from now on.
        """
        return reply_of(lambda: self._environments.update({key: self._make()}))

    def call(
        self, key: int, method: str, args: Sequence[object], kwargs: Mapping[str, object], turn: int | None = None
    ) -> bytes:
        """Call a method of an environment. Returns the result or exception as bytes that the trainer decodes with
        `result_of`. All coroutines run on one event loop, on which they may share clients.

        Args:
            key: the environment's number.
            method: the name of its method.
            args, kwargs: the method's arguments.
            turn: the call's number among the calls of this environment that must start in order, from 0; None for a
                call that may start at any time. A trainer's own event loop would start coroutines in the order of their
                calls, and an environment's answers can depend on that order.
        """

        def called() -> object:
            with nullcontext() if turn is None else self._in_turn(key, turn):
                answer = getattr(self._environments[key], method)(*args, **kwargs)
                coroutine = inspect.iscoroutine(answer)
                if coroutine:
                    answer = asyncio.run_coroutine_threadsafe(answer, self._loop)
            return answer.result() if coroutine else answer

        return reply_of(called)

    def read(self, key: int, attribute: str) -> bytes:
        """Return the value of an environment's attribute, as bytes that the trainer decodes with `result_of`.

        Args:
            key: the environment's number.
            attribute: the name of the attribute.
        """
        return reply_of(lambda: getattr(self._environments[key], attribute))

    def drop(self, keys: Iterable[int]) -> None:
        """Delete the environments of these numbers."""
        for key in keys:
            self._environments.pop(key, None)
            self._turns.pop(key, None)

    @contextmanager
    def _in_turn(self, key: int, turn: int) -> Iterator[None]:
        """Return a context in which to start a call, so that an environment's calls start in order. Entering it waits
        until all earlier calls have started, at most for `ORDER_SECONDS`. After its exit the next call may start.

        Args:
            key: the environment's number.
            turn: the number of the call among the calls that must start in order, from 0.
        """
        with self._turning:
            self._turning.wait_for(lambda: self._turns.get(key, 0) >= turn, ORDER_SECONDS)
        try:
            yield
        finally:
            with self._turning:
                self._turns[key] = max(self._turns.get(key, 0), turn + 1)  # one that came late lets no later one wait
                self._turning.notify_all()
