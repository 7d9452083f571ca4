"""Environments in Ray actors, several in each: `remote_environment`."""

from __future__ import annotations

import asyncio
import functools
import gc
import inspect
import itertools
import logging
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from trlx_hybrid.errors import ConfigError
from trlx_hybrid.plain_data import NotPlainError

from .. import debugging
from ..errors import brief
from .actors import (
    DEADLINE,
    LOOK,
    START_SECONDS,
    ActorPool,
    Pickled,
    PoolActor,
    RunningClock,
    Worker,
    ensure_connected,
    reply_of,
    result_of,
    wait,
)

logger = logging.getLogger(__name__)
REMEDY = "Let its constructor make what cannot be sent: constructors run in the workers."
OPTIONAL = ("get_reward", "close")
"""Methods that a lost environment answers with None: it cannot be scored, and need not be closed."""
SPARE = 4  # threads of a worker beside one for each environment: to make them and to let them go
STUCK = 2  # of these, for calls that hang: so many environments more than it has places for
ORDER_SECONDS = 10.0  # for a call that was made before this one to arrive


class EnvironmentLostError(asyncio.CancelledError):
    """An environment will not answer any more: its worker died, or a call of it never came back. Says which, and why.

    No `Exception`, so that no tool loop shows it to the model as if the tool had raised it, and lets the episode go on
    with an environment that is gone. The rollout `multi_turn` ends the trajectory, masked and counted. TRL's own loop
    cannot leave a trajectory out: there it ends the run. Of what is no `Exception`, a cancellation is what an event
    loop survives.
    """


def remote_environment(
    environment: Any,
    *,
    workers: int = 1,
    per_worker: int = 64,
    cpus: float = 1.0,
    gpus: float = 0.0,
    deadline: float = DEADLINE,
    start_deadline: float = START_SECONDS,
) -> RemoteEnvironments:
    """Make an `environment_factory` for TRL whose environments live in Ray actors.

    ```python
    trainer = GRPOTrainer(..., environment_factory=remote_environment(Sandbox, workers=16, per_worker=4))
    ```

    What the factory makes has the class's name and methods, with their signatures and docstrings: TRL finds the same
    tools and the same `get_reward`, and multi-turn's `episodes(remote_environment(Game))` the same `reset` and `step`.
    Synchronous methods stay synchronous and coroutine functions stay coroutine functions. Attributes can be read, as
    reward functions do, each time with a call. What methods return comes back as plain data, see
    `trlx_hybrid.plain_data`.

    Args:
        environment: a class, or `functools.partial` of one with its constructor's arguments.
        workers: how many actors. They start at once.
        per_worker: environments in each, side by side in threads: what these share must be thread-safe, and they die
            together. 1 gives each environment a process of its own.
        cpus, gpus: of each worker. A fraction of a GPU shares it.
        deadline: seconds that a call may take; `math.inf` waits for ever.
        start_deadline: seconds for all workers to start, imports included.

    Raises:
        ConfigError: it is no class, or cannot be pickled.
        ClusterError: no cluster answers at `RAY_ADDRESS`, or none can be started here.
        PlacementError: the cluster has no such room.
        WorkerError: a worker did not start, or could not load the class.
    """
    kind: Any = environment
    while isinstance(kind, functools.partial):
        kind = kind.func
    if not inspect.isclass(kind):
        raise ConfigError(
            f"remote_environment takes a class, whose methods it has to know, and got {environment!r:.80}. "
            "Arguments for its constructor: functools.partial(TheClass, argument=1)."
        )
    for setting, value in (("workers", workers), ("per_worker", per_worker)):
        if value < 1:
            raise ConfigError(f"remote_environment: {setting}={value}: at least one is needed.")
    if not deadline > 0:
        raise ConfigError(f"remote_environment: deadline={deadline}: seconds above 0, or math.inf to wait for ever.")
    ensure_connected()
    actors = ActorPool(
        EnvironmentActor,
        Pickled.of(environment, f"Environment {kind.__name__!r}", REMEDY),
        name=kind.__name__,
        role="environment",
        workers=workers,
        cpus=cpus,
        gpus=gpus,
        threads=per_worker + SPARE,
        start_deadline=start_deadline,
    )
    proxy: type[RemoteEnvironment] = proxy_class(kind)  # type: ignore[arg-type]  # classes are hashable
    return RemoteEnvironments(actors, proxy, per_worker, debugging.patience(deadline))


# --- in the trainer -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EnvironmentHandle:
    """Where an environment is, and how it is asked. Can be sent to other processes, which may call it too.

    Attributes:
        name: of its class.
        actor: Ray's handle of the actor that it is in.
        key: its number there.
        where: for messages.
        deadline: seconds that a call may take.
    """

    name: str
    actor: Any
    key: int
    where: str
    deadline: float

    def answer(self, method: str, reference: Any) -> Any:
        """What a call returned.

        Raises:
            EnvironmentLostError: the worker died or did not answer in time (that is its `__cause__`), or returned what
                cannot be sent.
            what the method raised.
        """
        ready, _ = wait([reference], self.deadline)
        return self._result(method, reference, bool(ready))

    async def answer_later(self, method: str, reference: Any) -> Any:
        """The same, for an event loop."""
        future, clock = asyncio.wrap_future(reference.future()), RunningClock()
        try:
            while not future.done() and (left := self.deadline - clock.now()) > 0:
                await asyncio.wait([future], timeout=min(LOOK, left))
            return self._result(method, reference, future.done())
        finally:
            if not future.cancel():
                future.exception()  # or asyncio logs that nobody asked for it

    def _result(self, method: str, reference: Any, ready: bool) -> Any:
        import ray

        name = f"environment '{self.name}.{method}'"
        if not ready:
            raise EnvironmentLostError(
                f"{name} did not return within {self.deadline:g} s, in {self.where}; the call may still run. Give it a "
                "timeout of its own, or raise deadline=."
            ) from TimeoutError()
        try:
            reply = ray.get(reference)
        except ray.exceptions.RayError as error:
            raise EnvironmentLostError(
                f"{name}: {self.where} died: {brief(error).rstrip('.')}. Its log and the node's say why; out of memory "
                "is the usual cause"
            ) from error
        try:
            return result_of(reply, "the environment's process")
        except NotPlainError as error:
            raise EnvironmentLostError(f"{name} returned {error}. Return plain data.") from None


class RemoteEnvironments:
    """What `remote_environment` returns: makes environments when called. Workers are filled evenly, and replaced when
    they die.

    Every training process that makes one has workers of its own. They end with the process, or when `close` is called
    or a `with` block is left.

    Args:
        kind: what stands for the environments.
        per_worker: places in each worker.
        deadline: seconds that a call may take.
    """

    def __init__(self, actors: ActorPool, kind: type[RemoteEnvironment], per_worker: int, deadline: float) -> None:
        self.__name__ = kind.__name__
        self._actors, self._kind, self._per_worker, self._deadline = actors, kind, per_worker, deadline
        self._lock = threading.RLock()
        self._numbers = itertools.count()
        self._keys: defaultdict[Worker, set[int]] = defaultdict(set)
        # Calls that were given up and may still run, by the environment that they hold a thread of.
        self._stuck: defaultdict[Worker, dict[int, Any]] = defaultdict(dict)
        self._freed: deque[tuple[Worker, int]] = deque()

    def __call__(self) -> RemoteEnvironment:
        """A new environment, in the emptiest worker. Workers that died are replaced first, or when this finds them so.

        Raises:
            ConfigError: all places are taken, or the workers were ended.
            EnvironmentLostError: the worker died in the constructor, and so did the next.
            WorkerError: another worker in the place of a dead one did not start.
            what the environment's constructor raises.
        """
        return self._kind(self)

    def close(self) -> None:
        """End the workers, with the environments in them, and give their resources back."""
        with self._lock:
            self._actors.close()

    def __enter__(self) -> RemoteEnvironments:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<remote environments {self.__name__!r}>"

    # --- for the environments ---------------------------------------------------------------------------------------

    def make(self) -> tuple[Worker, EnvironmentHandle]:
        """See `__call__`: what the environment is known by."""
        try:
            return self._made()
        except EnvironmentLostError:
            return self._made()

    def lose(self, worker: Worker, key: int, call: Any, *, died: bool) -> None:
        """Note what a call found out: a dead worker is replaced when the next environment is made.

        A call that hangs may still run, and a thread cannot be ended: only a worker with one environment can. Beside
        others it is stuck, until it returns.

        Args:
            call: reference to its answer.
        """
        if died:
            worker.dead = True
        elif self._per_worker == 1 and not worker.dead:
            self._actors.kill(worker)
        if not worker.dead:
            self._stuck[worker][key] = call

    def free(self, worker: Worker, key: int) -> None:
        """Nobody uses this environment any more. May be called by the garbage collector, so it only takes a note."""
        self._freed.append((worker, key))

    def _made(self) -> tuple[Worker, EnvironmentHandle]:
        with self._lock:
            self._let_go()
            workers = self._actors.workers
            if not workers:
                raise ConfigError(f"The remote environments {self.__name__!r} were closed. Make new ones.")
            self._actors.replace_dead()
            if all(self._taken(worker) >= self._per_worker for worker in workers):
                gc.collect()  # an error's traceback can hold an environment that nobody uses
                self._let_go()
            worker = min(workers, key=lambda worker: (self._taken(worker), worker.number))
            if self._taken(worker) >= self._per_worker:
                raise ConfigError(self._full())
            key = next(self._numbers)
            self._keys[worker].add(key)
        handle = EnvironmentHandle(self.__name__, worker.handle, key, str(worker), self._deadline)
        made = worker.handle.make.remote(key)
        try:
            handle.answer("__init__", made)
        except EnvironmentLostError as error:
            self.lose(worker, key, made, died=not isinstance(error.__cause__, TimeoutError))
            raise
        except BaseException:
            self.free(worker, key)
            raise
        return worker, handle

    def _taken(self, worker: Worker) -> int:
        return len(self._keys[worker]) - min(len(self._stuck[worker]), STUCK)

    def _full(self) -> str:
        workers = self._actors.workers
        stuck = sum(len(self._stuck[worker]) for worker in workers)
        hanging = f" {stuck} of them hang in a call that was given up, and keep a thread each." if stuck else ""
        return (
            f"{sum(len(self._keys[worker]) for worker in workers)} environments {self.__name__!r} are in use, all that "
            f"workers={len(workers)} with per_worker={self._per_worker} have places for: each completion of a batch "
            f"takes one.{hanging} Raise either."
        )

    def _let_go(self) -> None:
        import ray

        for worker in self._actors.workers:
            stuck = dict(self._stuck[worker])  # calls are given up in other threads
            if stuck:
                late = set(ray.wait(list(stuck.values()), num_returns=len(stuck), timeout=0)[1])
                for key in [key for key, call in stuck.items() if call not in late]:
                    del self._stuck[worker][key]
                    self.free(worker, key)
        gone: dict[Worker, list[int]] = {}
        while self._freed:
            worker, key = self._freed.popleft()
            if key in self._stuck[worker]:  # freed when it returns
                continue
            self._keys[worker].discard(key)
            gone.setdefault(worker, []).append(key)
        for worker, keys in gone.items():
            if not worker.dead:
                worker.handle.drop.remote(keys)


class RemoteEnvironment:
    """Base of what stands for environments: methods go to the worker; other attributes are read there, and cannot be
    set here."""

    __slots__ = ("__weakref__", "_finalizer", "_handle", "_lost", "_maker", "_turn", "_worker")

    _handle: EnvironmentHandle
    _maker: RemoteEnvironments | None  # None in a process that did not make it
    _worker: Worker | None
    _lost: str | None  # why, once it is
    _turn: int | None  # of the next asynchronous call; only its maker's process keeps them in order

    def __init__(self, maker: RemoteEnvironments) -> None:
        self._maker = maker
        self._make()

    def _make(self) -> None:
        assert self._maker is not None, "only its maker's process makes another"
        self._worker, self._handle = self._maker.make()
        self._lost, self._turn = None, 0
        self._finalizer = weakref.finalize(self, self._maker.free, self._worker, self._handle.key)
        self._finalizer.atexit = False

    def _call(self, method: str, args: Any, kwargs: Any) -> Any:
        if self._lost is not None and method in OPTIONAL:
            return None
        if self._lost is not None and self._renewable(method):
            self._renew()
        try:
            return self._ask("call", method, args, kwargs)
        except EnvironmentLostError as error:
            if self._died() and self._renewable(method):
                self._renew()  # its episode has not begun, so nothing is lost with the old one
                return self._ask("call", method, args, kwargs)
            return self._without(method, error)

    async def _call_later(self, method: str, args: Any, kwargs: Any) -> Any:
        if self._lost is not None and method in OPTIONAL:
            return None
        if self._lost is not None and self._renewable(method):
            await asyncio.to_thread(self._renew)
        try:
            return await self._ask_later(method, args, kwargs)
        except EnvironmentLostError as error:
            if self._died() and self._renewable(method):
                await asyncio.to_thread(self._renew)
                return await self._ask_later(method, args, kwargs)
            return self._without(method, error)

    def _ask(self, verb: str, method: str, *details: Any) -> Any:
        self._refuse_lost()
        reference = getattr(self._handle.actor, verb).remote(self._handle.key, method, *details)
        try:
            return self._handle.answer(method, reference)
        except EnvironmentLostError as error:
            self._give_up(error, reference)
            raise

    async def _ask_later(self, method: str, args: Any, kwargs: Any) -> Any:
        self._refuse_lost()
        reference = self._handle.actor.call.remote(self._handle.key, method, args, kwargs, self._turn)
        if self._turn is not None:
            self._turn += 1
        try:
            return await self._handle.answer_later(method, reference)
        except EnvironmentLostError as error:
            self._give_up(error, reference)
            raise

    def _refuse_lost(self) -> None:
        if self._lost is not None:
            raise EnvironmentLostError(self._lost)

    def _give_up(self, error: EnvironmentLostError, call: Any) -> None:
        """After a death, and after a call that may still run, nothing more can be asked of this environment."""
        if error.__cause__ is None:
            return  # it returned what cannot be sent, and is well
        self._lost = str(error)
        if self._maker is not None and self._worker is not None:
            died = not isinstance(error.__cause__, TimeoutError)
            self._maker.lose(self._worker, self._handle.key, call, died=died)

    def _died(self) -> bool:
        return self._worker is not None and self._worker.dead

    def _renewable(self, method: str) -> bool:
        return method == "reset" and self._maker is not None

    def _renew(self) -> None:
        """Another environment in the place of one that is lost."""
        self._finalizer()
        self._make()

    def _without(self, method: str, error: EnvironmentLostError) -> None:
        """What an environment answers that turns out to be lost when its episode is over: None, said aloud.

        Raises:
            EnvironmentLostError: it is well, and returned what cannot be sent; or its episode is not over.
        """
        if self._lost is None or method not in OPTIONAL:
            raise error
        logger.warning("The episode of an environment is over, and cannot be scored by it: %s", error)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if self._lost is not None:
            return None
        try:
            return self._ask("read", name)
        except EnvironmentLostError as error:
            return self._without(OPTIONAL[0], error)

    def __reduce__(self) -> Any:
        return _visiting, (type(self), self._handle, self._lost)

    def __repr__(self) -> str:
        return f"<remote environment {self._handle.name!r} in {self._handle.where}>"


def _visiting(kind: type[RemoteEnvironment], handle: EnvironmentHandle, lost: str | None) -> RemoteEnvironment:
    """The same environment, seen from another process: a reward function's worker."""
    found = object.__new__(kind)
    found._maker, found._worker, found._handle, found._lost, found._turn = None, None, handle, lost, None
    return found


@functools.cache  # TRL tells environments apart by their class, so one class has one proxy
def proxy_class(environment: type[Any]) -> type[RemoteEnvironment]:
    """The class that stands for an environment class: with its name, methods, docstrings and signatures, for TRL."""
    methods = {
        name: _method(environment, name, function)
        for name, function in inspect.getmembers(environment, predicate=inspect.isfunction)
        if not name.startswith("_")
    }
    about = {"__slots__": (), "__doc__": environment.__doc__, "__module__": __name__}
    return type(environment.__name__, (RemoteEnvironment,), about | methods)


def _method(environment: type, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    method: Any
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def method(self: RemoteEnvironment, *args: Any, **kwargs: Any) -> Any:
            return await self._call_later(name, args, kwargs)

    else:

        @functools.wraps(function)
        def method(self: RemoteEnvironment, *args: Any, **kwargs: Any) -> Any:
            return self._call(name, args, kwargs)

    if isinstance(inspect.getattr_static(environment, name), staticmethod):  # it has no `self` that could be left out
        signature = inspect.signature(function)
        own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        method.__signature__ = signature.replace(parameters=[own, *signature.parameters.values()])
    return method  # type: ignore[no-any-return]


# --- in the actor ---------------------------------------------------------------------------------------------------


class EnvironmentActor(PoolActor):
    """Makes environments and calls them, each in the thread that its call came in."""

    def load(self, loaded: Callable[[], Any]) -> None:
        """Take what makes environments."""
        self._make = loaded
        self._environments: dict[int, Any] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._starting = threading.Lock()
        self._turns: dict[int, int] = {}
        self._turning = threading.Condition()

    def make(self, key: int) -> bytes:
        """A new environment, by this number."""

        def made() -> None:
            self._environments[key] = self._make()

        return reply_of(made)

    def call(
        self, key: int, method: str, args: Sequence[Any], kwargs: Mapping[str, Any], turn: int | None = None
    ) -> bytes:
        """Call a method of an environment. Coroutines run on one event loop for all, where clients may be shared.

        Args:
            turn: which of the calls it is that have to start in their order: a trainer's own event loop starts the
                coroutines of one turn in that order, and what an environment answers can depend on it.
        """

        def called() -> Any:
            with self._in_turn(key, turn):
                answer = getattr(self._environments[key], method)(*args, **kwargs)
                coroutine = inspect.iscoroutine(answer)
                if coroutine:
                    answer = asyncio.run_coroutine_threadsafe(answer, self._event_loop())
            return answer.result() if coroutine else answer

        return reply_of(called)

    def read(self, key: int, attribute: str) -> bytes:
        """What an environment has in an attribute."""
        return reply_of(lambda: getattr(self._environments[key], attribute))

    def drop(self, keys: Iterable[int]) -> None:
        """Forget environments."""
        for key in keys:
            self._environments.pop(key, None)
            self._turns.pop(key, None)

    @contextmanager
    def _in_turn(self, key: int, turn: int | None) -> Iterator[None]:
        if turn is None:
            yield
            return
        with self._turning:
            self._turning.wait_for(lambda: self._turns.get(key, 0) >= turn, ORDER_SECONDS)
        try:
            yield
        finally:
            with self._turning:
                self._turns[key] = turn + 1
                self._turning.notify_all()

    def _event_loop(self) -> asyncio.AbstractEventLoop:
        with self._starting:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, name="environments", daemon=True).start()
            return self._loop
