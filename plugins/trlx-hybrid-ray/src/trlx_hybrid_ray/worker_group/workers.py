"""The workers of a group, which are actors or threads: how they are constructed, called, waited for and ended."""

from __future__ import annotations

import contextlib
import itertools
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, Generic, Literal, NamedTuple, TypeVar
from weakref import WeakSet

from trlx_hybrid.errors import ConfigError, listed

from ..errors import DeadlineError, WorkerDiedError, WorkerError, brief
from ..internals import free_resources
from ..waiting import Handle, Reference
from .batch import fields_of
from .worker import Location

R_co = TypeVar("R_co", covariant=True)

CLOSE_SECONDS = 5.0
"""Seconds that workers have to finish their current calls when the group is closed."""
GRACE = 2.0
"""Seconds to wait for the other workers' errors once one worker has failed. A worker's death is often noticed after the
errors that it causes in the workers that communicated with it, and the message has to name the death."""
DIRECT = 32
"""The largest number of workers that this process calls itself; each call costs about 0.1 ms per worker. More workers
are called through a relay, an actor on each node that passes calls on."""
RELAY_SECONDS = 60.0
"""Seconds that a relay may take to pass a call on. It does not wait for the workers."""
LARGE = 96 << 10
"""The size in bytes from which one copy in Ray's object store is cheaper than one copy in each call. Ray itself puts
arguments of 100 KiB or more there, once for every call."""
WORD = 8
"""The bytes that an item of a nested value, such as a number, counts for when its size is estimated."""


class Future(Generic[R_co]):
    """The result of a group's call that may still be running. Call `result`, or pass the future to another group's
    method as its batch.

    If both groups have the same number of replicas, and this call's batch was split as well, the data then goes from
    worker to worker and never through this process.
    """

    def __init__(
        self,
        workers: Workers,
        call: str,
        answers: list[Reference],
        collect: Callable[[list[object]], R_co],
        *,
        seconds: float,
        splits: bool,
        upstream: Future[object] | None,
    ) -> None:
        """Make the future of a call.

        Args:
            workers: the workers that were called.
            call: class and method of the call, for messages.
            answers: Ray's references to the answers, by rank.
            collect: the function that makes one result from the answers' values.
            seconds: the call's deadline in seconds.
            splits: whether the call's first argument was a batch that was split.
            upstream: the future that was the call's batch, if there was one.
        """
        self.answers = answers  # a reference for each called worker
        self._workers, self._call, self._collect, self._seconds = workers, call, collect, seconds
        self._splits, self._upstream = splits, upstream
        self._value: list[R_co] = []

    def result(self, timeout: float | None = None) -> R_co:
        """Wait for the result and return it.

        Args:
            timeout: seconds; by default the call's deadline. `math.inf` waits for ever.

        Raises:
            WorkerError: a worker raised an exception, or died (`WorkerDiedError`): has its rank, method, node and
                traceback.
            DeadlineError: not all workers answered in time. The call goes on, and `result` can be called again.
            DispatchError: the results of the parts of a batch cannot be joined.
        """
        if not self._value:
            seconds = self._seconds if timeout is None else timeout
            results = self._workers.results(self._call, self.answers, seconds, self._upstream)
            self._value.append(self._collect(results))
        return self._value[0]

    def done(self) -> bool:
        """Return whether `result` would return without waiting."""
        return bool(self._value) or len(self._workers.wait(self.answers, 0.0)) == len(self.answers)

    def chunks_for(self, workers: Workers) -> list[Reference] | None:
        """Return references to the parts of this result, one for each replica of another group, to be passed to that
        group's workers directly. Returns None if the groups differ in their number of replicas, one group has Ray
        actors and the other has threads, or this is not the result of a split batch.

        Args:
            workers: the workers of the other group.
        """
        own = self._workers
        alike = self._splits and workers.ray is own.ray and workers.replicas == own.replicas
        return self.answers[:: own.tensor_parallel] if alike else None

    def error(self) -> WorkerError | None:
        """Return the error with which the call has failed; None if it has not failed so far."""
        try:
            self._workers.results(self._call, self.answers, 0.0, self._upstream)
        except WorkerError as error:
            return None if isinstance(error, TimeoutError) else error
        return None

    def cancel(self) -> None:
        """Cancel this call on the workers that have not begun it; a call that has begun goes on."""
        from ray.exceptions import RayError

        for answer in self.answers:
            with contextlib.suppress(RayError, ValueError, TypeError):
                self._workers.ray.cancel(answer)

    def __repr__(self) -> str:
        return f"<Future of {self._call}, {'done' if self.done() else 'at work'}>"


class Workers:
    """The workers of one group. Each worker carries out one call at a time, in the order of the calls.

    Args:
        worker: the class of the actors, made by `worker_class` from the user's class.
        options: for each worker, the arguments of Ray's `.options()`.
        tensor_parallel: the number of workers per replica; they get the same data.
        args, kwargs: the arguments of the workers' constructors.
        local: whether the workers are threads of this process.

    Attributes:
        ray: the module `ray`, or `local_ray` in its place.
        name: the name of the workers' class.
        world, replicas: the number of workers and of replicas.
        handles: the actors' handles, by rank, which keep the actors alive.
        locations: node, process and GPUs of each worker, by rank; empty until they are known.
        lost: the error of the first worker that died; None while none has.
        closed: whether the group was closed.
        futures: the futures of calls that somebody still holds.
    """

    def __init__(
        self,
        worker: type,
        options: Sequence[Mapping[str, object]],
        tensor_parallel: int,
        args: Sequence[object],
        kwargs: Mapping[str, object],
        *,
        local: bool = False,
    ) -> None:
        world = len(options)
        if world < 1 or tensor_parallel < 1 or world % tensor_parallel:
            raise ConfigError(
                f"{world} workers cannot be replicas of tensor_parallel={tensor_parallel}: it must divide their "
                "number, and both must be 1 or more."
            )
        import ray  # only here: worker classes are imported where no Ray is wanted

        from . import local_ray

        self.ray: ModuleType = local_ray if local else ray
        self.name, self.world, self.tensor_parallel = worker.__name__, world, tensor_parallel
        self.replicas = world // tensor_parallel
        self._args, self._kwargs, self._local = args, kwargs, local
        self.locations: Sequence[Location] = ()
        self.lost: WorkerDiedError | None = None
        self.closed = False
        self.futures: WeakSet[Future[object]] = WeakSet()
        self._methods: dict[str, list[Callable[..., Reference]]] = {}
        self._relays: list[tuple[Handle, Sequence[int]]] = []
        actors = self.ray.remote(worker)
        self.handles: list[Handle] = [actors.options(**each).remote(rank) for rank, each in enumerate(options)]

    def start(self, seconds: float) -> None:
        """Construct every worker. The workers report their nodes and processes before any constructor is called, so
        that each constructor knows them all.

        Args:
            seconds: the time within which all workers must be constructed.

        Raises:
            WorkerError: a constructor raised; the message names the rank.
            DeadlineError: not all workers are constructed in time.
        """
        until, call = time.monotonic() + seconds, f"{self.name}.__init__"
        located = [handle.__trlx_locate__.remote() for handle in self.handles]
        try:
            self.locations = self.results(call, located, seconds)
        except DeadlineError as error:
            if not self._local:
                error.add_note(
                    f"Free in the cluster: {_free()}. Workers wait where their options ask for more than that."
                )
            raise
        args, kwargs = self._shared(self._args, self._kwargs)
        about = (self._once(tuple(self.locations), self.world), self.tensor_parallel)
        made = [handle.__trlx_construct__.remote(*about, *args, **kwargs) for handle in self.handles]
        self.results(call, made, _left(until))
        self._args, self._kwargs = (), {}  # may be large, and are not needed again
        if self.world > DIRECT and not self._local:
            self.relay(_left(until))

    def relay(self, seconds: float, *, pinned: bool = True) -> None:
        """Start relays, and call the workers through them from now on. A relay is an actor that passes calls on to the
        workers of one node; there is one for each node.

        Args:
            seconds: the time within which the relays must start.
            pinned: whether a relay must run on the node of its workers; False lets Ray choose a node, which tests do.
        """
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        actors = self.ray.remote(Relay)
        nodes = sorted({location.node for location in self.locations})
        for node in nodes:
            ranks = [rank for rank, location in enumerate(self.locations) if location.node == node]
            where: NodeAffinitySchedulingStrategy | str = (
                NodeAffinitySchedulingStrategy(node, soft=False) if pinned else "DEFAULT"
            )
            handles = {rank: self.handles[rank] for rank in ranks}
            self._relays.append((actors.options(num_cpus=0, scheduling_strategy=where).remote(handles), ranks))
        started, firsts = zip(*((relay.__ray_ready__.remote(), ranks[0]) for relay, ranks in self._relays))
        self.results(f"the relay of {self.name}.__init__", started, seconds, ranks=firsts)

    def submit(
        self,
        entry: str,
        ranks: Sequence[int],
        chunks: Sequence[object] | None,
        args: Sequence[object],
        kwargs: Mapping[str, object],
    ) -> list[Reference]:
        """Call a method of some workers and return at once, with a reference to each worker's answer. A large value
        that several workers get is put into Ray's object store once.

        Args:
            entry: the name of the workers' method, `Registered.entry`.
            ranks: the ranks of the workers to call.
            chunks: the first argument for each replica, a value or a reference; None if all workers get the same
                arguments.
            args, kwargs: the arguments that all workers get.
        """
        if len(ranks) > 1:
            args, kwargs = self._shared(args, kwargs)
        if chunks is not None and self.tensor_parallel > 1:
            shared = [self._once(chunk, self.tensor_parallel) for chunk in chunks]
            chunks = [shared[rank // self.tensor_parallel] for rank in ranks]
        if self._relays:
            return self._relayed(entry, ranks, chunks, args, kwargs)
        methods = self._methods.get(entry)
        if methods is None:  # cached, since Ray makes them anew each time
            methods = self._methods[entry] = [getattr(handle, entry).remote for handle in self.handles]
        return call_each(methods[: len(ranks)], chunks, args, kwargs)

    def _relayed(
        self, entry: str, ranks: Sequence[int], chunks: Sequence[object] | None, *whole: Any
    ) -> list[Reference]:
        """Call a method of some workers through the relays, with one call for each relay. Returns a reference to each
        worker's answer, in the order of `ranks`. A relay answers at once, with the references of its workers' answers.

        Args:
            entry: the name of the workers' method.
            ranks: the ranks of the workers to call.
            chunks: the first argument for each of these workers; None if all get the same arguments.
            whole: the positional and the keyword arguments that all workers get, as a sequence and a mapping.
        """
        asked, called = [], []
        for relay, own in self._relays:
            here = [rank for rank in own if rank in ranks]
            if here:
                given = None if chunks is None else [chunks[rank] for rank in here]
                asked.append(relay.call.remote(entry, here, given, *whole))
                called.append(here)
        firsts, call = [here[0] for here in called], f"the relay of {self.name}.{entry}"
        answers: dict[int, Reference] = {}
        for here, found in zip(called, self.results(call, asked, RELAY_SECONDS, ranks=firsts), strict=True):
            for rank, answer in zip(here, found, strict=True):
                answers[rank] = answer
        return [answers[rank] for rank in ranks]

    def _shared(self, args: Sequence[object], kwargs: Mapping[str, object]) -> tuple[list[object], dict[str, object]]:
        """Return the arguments, with large ones replaced by references to one copy that all workers share."""
        return [self._once(value, self.world) for value in args], {
            name: self._once(value, self.world) for name, value in kwargs.items()
        }

    def _once(self, value: object, receivers: int) -> object:
        """Return the value itself; or, if it is large and has several receivers, a reference to one copy of it in Ray's
        object store."""
        return self.ray.put(value) if receivers > 1 and _is_large(value) else value

    def wait(self, answers: Sequence[Reference], seconds: float) -> set[Reference]:
        """Wait until all answers are ready, at most for `seconds`, and return the answers that are ready."""
        timeout = None if seconds == math.inf else seconds
        return set(self.ray.wait(list(answers), num_returns=len(answers), timeout=timeout, fetch_local=False)[0])

    def close(self, at_once: bool) -> None:
        """End the workers.

        Args:
            at_once: whether to end them during their calls; otherwise they may finish their calls first, within
                `CLOSE_SECONDS`.
        """
        from ray.exceptions import RayError

        closed, self.closed = self.closed, True
        if closed or not self.ray.is_initialized():
            return
        if not at_once and self.lost is None:
            ends = [handle.__ray_terminate__.remote() for handle in self.handles]
            self.ray.wait(ends, num_returns=len(ends), timeout=CLOSE_SECONDS)
        for actor in [*self.handles, *(relay for relay, _ in self._relays)]:
            with contextlib.suppress(RayError, ValueError):
                self.ray.kill(actor)
        self.handles, self._methods, self._relays = [], {}, []

    def check(self) -> None:
        """Raise an error if the group cannot be called any more.

        Raises:
            WorkerDiedError: a worker died earlier.
            ConfigError: the group was closed.
        """
        if self.lost is not None:
            raise self.lost
        if self.closed:
            raise ConfigError(f"This group of {self.name} was closed. Make a new one.")

    def results(
        self,
        call: str,
        answers: Sequence[Reference],
        seconds: float,
        upstream: Future[object] | None = None,
        ranks: Sequence[int] = (),
    ) -> list[Any]:
        """Wait for answers, and return their values.

        Args:
            call: class and method of the call, for messages.
            answers: Ray's references to the answers.
            seconds: the time to wait; `math.inf` waits for ever.
            upstream: the future whose answers were the workers' arguments, if there was one; its errors come first.
            ranks: the ranks of the answers; by default from 0 on.

        Raises:
            WorkerError: a worker raised an exception or died (`WorkerDiedError`); the error names the worker that
                caused the failure.
            DeadlineError: not all answers came in time.
        """
        from ray.exceptions import RayError

        try:
            return list(self.ray.get(list(answers), timeout=None if seconds == math.inf else seconds))
        except RayError as error:
            earlier = upstream.error() if upstream is not None else None
            by_rank = dict(zip(ranks or range(self.world), answers))
            reason = earlier or self._explained(call, by_rank, error, seconds)
            raise reason from reason.__cause__

    def _explained(
        self, call: str, answers: Mapping[int, Reference], error: BaseException, seconds: float
    ) -> WorkerError:
        """Return the error to raise if Ray could not get all answers. It names the worker that caused the failure.

        Args:
            answers: references to the answers, by rank.
            error: the error that Ray raised.
            seconds: the time that was waited.
        """
        failures = self._failures(answers, 0.0)
        if not failures and isinstance(error, TimeoutError):
            return self._overdue(call, answers, seconds)
        if self.lost is None:
            failures = self._failures(answers, GRACE)
        if all(failure.kind != "raised" for failure in failures):
            if self.lost is not None:
                return self.lost
            if self.closed:
                done = f"was closed before {call} was done on all {len(answers)} workers"
                told = f"The group of {self.name} {done}. Ask for the result before the group's block is left."
                return self._error(WorkerError, call, 0, told)
        reason = self._failed(call, failures or [Failure(next(iter(answers)), "raised", error)])
        if isinstance(reason, WorkerDiedError):
            self.lost = reason
            for future in list(self.futures):  # they may wait for the dead worker for ever
                future.cancel()
        return reason

    def _failed(self, call: str, failures: Sequence[Failure]) -> WorkerError:
        """Return the error to raise for the failures of one call. It is about the worker that made the others fail, and
        also lists the other failures. A worker that died makes the workers that communicated with it fail, so a death
        counts as the cause before an exception.

        Args:
            call: class and method of the call.
            failures: the workers that returned no result, and why; at least one.
        """
        first = min(failures, key=lambda f: (f.kind != "died", f.kind != "raised", f.rank))
        others = [f"{f.rank} ({brief(f.error).rstrip('.: ')})" for f in failures if f is not first]
        also = f"\nFailed as well: ranks {listed(others)}." if others else ""
        who, why = self._who(first.rank), brief(first.error).rstrip(".: ")
        if first.kind == "died":
            error = self._error(
                WorkerDiedError,
                call,
                first.rank,
                f"{self.name} {who} died while {call} was called: {why}. Its log and the node's say why; out of memory "
                f"is the usual cause. Close the group, make a new one.{also}",
            )
        else:
            trace = f"\n{first.traceback.rstrip()}" if first.traceback else ""
            error = self._error(WorkerError, call, first.rank, f"{call} failed on {who}: {why}.{also}{trace}")
        error.traceback, error.__cause__ = first.traceback, first.error
        return error

    def _overdue(self, call: str, answers: Mapping[int, Reference], seconds: float) -> WorkerError:
        """Return the error for answers that did not come in time; its message names the workers that have not
        answered."""
        there = self.wait(list(answers.values()), 0.0)
        missing = [rank for rank, answer in answers.items() if answer not in there] or [max(answers)]
        return self._error(
            DeadlineError,
            call,
            missing[0],
            f"No answer to {call} within {seconds:g} s from {listed([self._who(rank) for rank in missing], limit=3)}; "
            f"{len(answers) - len(missing)} of {len(answers)} workers answered. They may still be at work, and later "
            "calls wait behind this one: ask the future again, set a longer `deadline`, or close the group.",
        )

    def _who(self, rank: int) -> str:
        """Return rank, node and process of a worker as text."""
        return f"rank {rank} ({self.locations[rank]})" if self.locations else f"rank {rank}"

    def _error(self, kind: type[WorkerError], call: str, rank: int, text: str) -> WorkerError:
        """Make an error of the class `kind` about one worker.

        Args:
            kind: the class of the error.
            call: class and method of the call that failed.
            rank: the worker's rank.
            text: the message.
        """
        node = str(self.locations[rank]) if self.locations else ""
        return kind(text, rank=rank, method=call.rpartition(".")[2], node=node)

    def _failures(self, answers: Mapping[int, Reference], seconds: float) -> list[Failure]:
        """Wait until all answers are ready, at most for `seconds`, and return the failures among the ready answers.

        Args:
            answers: Ray's references to the answers, by rank.
            seconds: the time to wait.
        """
        there = self.wait(list(answers.values()), seconds)
        found = [self._failure(rank, answer) for rank, answer in answers.items() if answer in there]
        return [failure for failure in found if failure is not None]

    def _failure(self, rank: int, answer: Reference) -> Failure | None:
        """Return the failure that an answer contains, or None if it contains a result."""
        from ray.exceptions import OwnerDiedError, RayActorError, RayError, RayTaskError, TaskCancelledError

        try:
            self.ray.get(answer, timeout=GRACE)
        except RayTaskError as error:
            cause = error.cause if isinstance(error.cause, BaseException) else error
            return Failure(rank, "raised", cause, _traceback_of(error))
        except RayActorError as error:
            return Failure(rank, "raised" if error.actor_init_failed else "died", error)
        except OwnerDiedError as error:  # the relay died, and most likely its node
            return Failure(rank, "died", error)
        except RayError as error:
            return Failure(rank, "dropped" if isinstance(error, TaskCancelledError) else "raised", error)
        return None


class Failure(NamedTuple):
    """The reason why a worker returned no result.

    Attributes:
        rank: the worker's rank.
        kind: "raised" if its method raised an exception, "died" if its process or node is gone, "dropped" if the call
            was cancelled before it began.
        error: the worker's exception or Ray's error.
        traceback: the traceback in the worker's process, as text.
    """

    rank: int
    kind: Literal["raised", "died", "dropped"]
    error: BaseException
    traceback: str = ""


class Relay:
    """An actor on each node that passes calls of a group on to the node's workers, and does not wait for their results.
    With relays, the group's process makes one call for each node rather than one for each worker.

    Args:
        workers: the handles of the node's workers, by rank.
    """

    def __init__(self, workers: Mapping[int, Handle]) -> None:
        self._workers = workers

    def call(self, entry: str, ranks: Sequence[int], chunks: Sequence[object] | None, *whole: Any) -> list[Reference]:
        """Call a method of some of the node's workers, and return references to their answers at once.

        Args:
            entry: the name of the method.
            ranks: the ranks of the workers to call.
            chunks: the first argument for each of these workers; None if all get the same arguments.
            whole: the positional and the keyword arguments that all workers get, as a sequence and a mapping.
        """
        return call_each([getattr(self._workers[rank], entry).remote for rank in ranks], chunks, *whole)


def call_each(
    methods: Sequence[Callable[..., Reference]],
    chunks: Sequence[object] | None,
    args: Sequence[object],
    kwargs: Mapping[str, object],
) -> list[Reference]:
    """Call the method of each worker with the same arguments, and return references to the answers.

    Args:
        methods: the `remote` function of the method, for each worker.
        chunks: the part of a batch for each worker, which becomes its first argument; None if there is no batch.
        args, kwargs: the arguments that all workers get.
    """
    if chunks is None:
        return [method(*args, **kwargs) for method in methods]
    return [method(chunk, *args, **kwargs) for method, chunk in zip(methods, chunks, strict=True)]


def _is_large(value: object) -> bool:
    """Return whether a value takes roughly `LARGE` bytes or more. It stops looking at the value's contents as soon as
    it knows."""
    pending, found = [value], 0
    while pending and found < LARGE:
        item = pending.pop()
        found += WORD
        if isinstance(size := getattr(item, "nbytes", None), int):
            found += size
        elif isinstance(item, (str, bytes, bytearray)):
            found += len(item)
        elif not isinstance(item, type):
            fields = fields_of(item) or getattr(item, "__dict__", {})
            inside = item if isinstance(item, (list, set, frozenset)) else fields.values()
            found += WORD * len(inside)
            pending += itertools.islice(inside, LARGE // WORD)
    return found >= LARGE


def _free() -> dict[str, float]:
    """Return the number of free CPUs and GPUs in the cluster, by name."""
    nodes = free_resources().values()
    return {name: sum(node.get(name, 0.0) for node in nodes) for name in ("CPU", "GPU")}


def _left(until: float) -> float:
    """Return the seconds left until a time of `time.monotonic`; 0 if it has passed."""
    return max(0.0, until - time.monotonic())


def _traceback_of(error: BaseException) -> str:
    """Return a worker's traceback as text. Ray keeps it only in the error's message, with colour codes and frames of
    its own."""
    lines = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).splitlines()
    start = next((number for number, line in enumerate(lines) if line.startswith('  File "')), 0)
    return "\n".join(["Traceback (most recent call last):", *lines[start:]])
