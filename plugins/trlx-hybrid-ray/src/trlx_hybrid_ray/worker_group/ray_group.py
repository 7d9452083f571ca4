"""A group of Ray actors called as one object."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from .batch import fields_of
from .errors import Call, DeadlineError, Failure
from .group import CLOSE_SECONDS, GRACE, Group, Workers, answering, left, timeout
from .registration import Registered, registered
from .worker import Location, WorkerInfo, become, listen

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.actor import ActorHandle

W = TypeVar("W")

DIRECT = 32
"""Workers that the driver calls itself; a call costs it about 0.1 ms for each. More are called through a relay on each
node."""
LARGE = 96 << 10
"""Bytes from which one copy in the object store is cheaper than one in each call. Ray itself puts arguments there from
100 KiB, once for every call."""
WORD = 8
"""Bytes a number counts for."""
RELAY_SECONDS = 60.0
"""That a relay may take to pass a call on; it waits for no worker."""


class WorkerGroup(Group[W]):
    """Ray actors of one class, called as one object.

    ```python
    with WorkerGroup(Scorer, 4) as scorers:
        scores = scorers.score(prompts)
    ```

    The group holds its workers' handles; nobody looks them up by name. When the block is left by an error the workers
    end at once, else when they are done with what they were given.

    Args:
        worker: a class with methods marked with `@register`.
        workers: a number of workers to be put wherever there is room, with one CPU each; or a `Placement`; or for each
            rank what Ray's `.options()` takes: its resources, and where it is scheduled.
        args, kwargs: what each worker's constructor gets. `this_worker()` tells a worker which one it is.
        tensor_parallel: ranks of a replica: they get the same chunks of what is split.
        deadline: seconds that a call may take; `math.inf` waits for ever.
        start_deadline: seconds for all workers to be constructed.

    Raises:
        ConfigError: the class has no registered method, or the sizes do not divide.
        WorkerError: a constructor raised; names the rank.
        DeadlineError: Ray did not start all workers in time.
    """

    _workers: Actors

    def _made(self, *arguments: Any) -> Actors:
        return Actors(*arguments)

    @property
    def handles(self) -> Sequence[ActorHandle[Any]]:
        """The actors, by rank; none once the group is closed."""
        return self._workers.handles


class Actors(Workers):
    """Actors, called directly, or through a relay on each node where they are many.

    Attributes:
        handles: by rank; they are kept, and with them the actors.
    """

    def __init__(self, *arguments: Any) -> None:
        import ray  # only here: worker classes are imported where no Ray is wanted
        from ray.exceptions import RayError

        super().__init__(*arguments)
        self.errors = (RayError,)
        actors: Any = ray.remote(actor_class(self._worker))
        self.handles: list[Any] = [actors.options(**each).remote(rank) for rank, each in enumerate(self._options)]
        self._methods: dict[str, list[Callable[..., Any]]] = {}
        self._relays: list[tuple[Any, Sequence[int]]] = []

    def start(self, seconds: float) -> None:
        """See `Workers`. The actors say where they run before any constructor is called, so that all know of all."""
        until, ranks = time.monotonic() + seconds, range(self.world)
        located = [handle.__trlx_locate__.remote() for handle in self.handles]
        try:
            self.locations = self.results(Call(self.name, "__init__", ranks, ()), located, seconds)
        except DeadlineError as error:
            error.add_note(f"Free in the cluster: {_free()}. Workers wait where their options ask for more than that.")
            raise
        args = [_once(value, self.world) for value in self._args]
        kwargs = {name: _once(value, self.world) for name, value in self._kwargs.items()}
        about = (_once(tuple(self.locations), self.world), self.tensor_parallel)
        made = [handle.__trlx_construct__.remote(*about, *args, **kwargs) for handle in self.handles]
        self.results(Call(self.name, "__init__", ranks, self.locations), made, left(until))
        self._args, self._kwargs = (), {}  # may be large, and are not needed again
        if self.world > DIRECT:
            self.relay(left(until))

    def relay(self, seconds: float, *, pinned: bool = True) -> None:
        """From now on, call workers through a relay for each node; `pinned` to it."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        actors = ray.remote(Relay)
        nodes = sorted({location.node for location in self.locations})
        for node in nodes:
            ranks = [rank for rank, location in enumerate(self.locations) if location.node == node]
            where: Any = NodeAffinitySchedulingStrategy(node, soft=False) if pinned else "DEFAULT"
            handles = {rank: self.handles[rank] for rank in ranks}
            self._relays.append((actors.options(num_cpus=0, scheduling_strategy=where).remote(handles), ranks))
        call = Call(f"Relay to {self.name}", "__init__", [ranks[0] for _, ranks in self._relays], self.locations)
        self.results(call, [relay.__ray_ready__.remote() for relay, _ in self._relays], seconds)

    def submit(
        self, method: Registered, chunks: Sequence[Any] | None, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> list[ObjectRef[Any]]:
        """See `Workers`. What several workers get is put into the object store once, where it is large."""
        ranks = range(1 if method.dispatch == "rank_zero" else self.world)
        if len(ranks) > 1:
            args = [_once(value, self.world) for value in args]
            kwargs = {name: _once(value, self.world) for name, value in kwargs.items()} if kwargs else kwargs
        if chunks is not None and self.tensor_parallel > 1:
            shared = [_once(chunk, self.tensor_parallel) for chunk in chunks]
            chunks = [shared[rank // self.tensor_parallel] for rank in ranks]
        if self._relays:
            return self._relayed(method, ranks, chunks, args, kwargs)
        methods = self._methods.get(method.name)
        if methods is None:
            methods = self._methods[method.name] = [getattr(handle, method.entry).remote for handle in self.handles]
        return _called(methods[: len(ranks)], chunks, args, kwargs)

    def _relayed(
        self,
        method: Registered,
        ranks: Sequence[int],
        chunks: Sequence[Any] | None,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> list[ObjectRef[Any]]:
        """One call per relay, which answers at once with the references to its workers' answers."""
        asked, called = [], []
        for relay, own in self._relays:
            here = [rank for rank in own if rank in ranks]
            if here:
                given = None if chunks is None else [chunks[rank] for rank in here]
                asked.append(relay.call.remote(method.entry, here, given, args, kwargs))
                called.append(here)
        call = Call(f"Relay to {self.name}", method.name, [here[0] for here in called], self.locations)
        answers: list[Any] = [None] * len(ranks)
        for here, found in zip(called, self.results(call, asked, RELAY_SECONDS), strict=True):
            for rank, answer in zip(here, found, strict=True):
                answers[rank] = answer
        return answers

    def wait(self, answers: Sequence[Any], seconds: float) -> set[Any]:
        """See `Workers`."""
        import ray

        return set(ray.wait(list(answers), num_returns=len(answers), timeout=timeout(seconds), fetch_local=False)[0])

    def get(self, answers: Sequence[Any], seconds: float) -> list[Any]:
        """See `Workers`."""
        import ray

        return list(ray.get(list(answers), timeout=timeout(seconds)))

    def failure(self, position: int, answer: Any) -> Failure | None:
        """See `Workers`."""
        import ray
        from ray.exceptions import OwnerDiedError, RayActorError, RayError, RayTaskError, TaskCancelledError

        try:
            ray.get(answer, timeout=GRACE)
        except RayTaskError as error:
            cause = error.cause if isinstance(error.cause, BaseException) else error
            return Failure(position, "raised", cause, _traceback_of(error))
        except RayActorError as error:
            return Failure(position, "raised" if error.actor_init_failed else "died", error)
        except OwnerDiedError as error:  # of the relay, and most likely its node
            return Failure(position, "died", error)
        except RayError as error:
            return Failure(position, "dropped" if isinstance(error, TaskCancelledError) else "raised", error)
        return None

    def cancel(self, answers: Sequence[Any]) -> None:
        """See `Workers`."""
        import ray
        from ray.exceptions import RayError

        for answer in answers:
            with contextlib.suppress(RayError, ValueError, TypeError):
                ray.cancel(answer)

    def close(self, at_once: bool) -> None:
        """See `Workers`."""
        import ray
        from ray.exceptions import RayError

        closed, self.closed = self.closed, True
        if closed or not ray.is_initialized():
            return
        if not at_once and self.lost is None:
            ends = [handle.__ray_terminate__.remote() for handle in self.handles]
            ray.wait(ends, num_returns=len(ends), timeout=CLOSE_SECONDS)
        for actor in [*self.handles, *(relay for relay, _ in self._relays)]:
            with contextlib.suppress(RayError, ValueError):
                ray.kill(actor)
        self.handles, self._methods, self._relays = [], {}, []


class Relay:
    """An actor on each node, which calls the node's workers on the driver's behalf and waits for none of them.

    Args:
        workers: handles, by rank.
    """

    def __init__(self, workers: Mapping[int, Any]) -> None:
        self._workers = workers

    def call(
        self,
        entry: str,
        ranks: Sequence[int],
        chunks: Sequence[Any] | None,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> list[ObjectRef[Any]]:
        """Call the workers of these ranks; the references to their answers."""
        return _called([getattr(self._workers[rank], entry).remote for rank in ranks], chunks, args, kwargs)


def _called(
    methods: Sequence[Callable[..., ObjectRef[Any]]],
    chunks: Sequence[Any] | None,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> list[ObjectRef[Any]]:
    """Call `handle.method.remote` of each worker, with its chunk of the batch where there is one."""
    if chunks is None:
        return [method(*args, **kwargs) for method in methods]
    return [method(chunk, *args, **kwargs) for method, chunk in zip(methods, chunks, strict=True)]


# --- in the actor ---------------------------------------------------------------------------------------------------


def actor_class(worker: Any) -> type:
    """A subclass of `worker` with its name, and with the methods that a group calls: `Registered.entry` of each."""

    def start(self: Any, rank: int) -> None:
        self.__trlx_rank__ = rank  # the constructor is called when it is known where all workers run

    names: dict[str, Any] = {"__init__": start, "__module__": worker.__module__}
    names |= {"__trlx_locate__": _locate, "__trlx_construct__": functools.partialmethod(_construct, worker)}
    names |= {method.entry: answering(method, getattr(worker, name)) for name, method in registered(worker).items()}
    return type(worker.__name__, (worker,), names)


def _locate(self: Any) -> Location:
    import ray

    context = ray.get_runtime_context()
    address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    gpus = tuple(context.get_accelerator_ids().get("GPU", ()))
    return Location(context.get_node_id(), address, os.getpid(), gpus, 0 if self.__trlx_rank__ else listen(address))


def _construct(
    self: Any, worker: Any, locations: tuple[Location, ...], tensor_parallel: int, /, *args: Any, **kwargs: Any
) -> None:
    become(WorkerInfo(self.__trlx_rank__, tensor_parallel, locations), whole_process=True)
    worker.__init__(self, *args, **kwargs)


# --- what travels ---------------------------------------------------------------------------------------------------


def _once(value: Any, receivers: int) -> Any:
    """The value, or a reference to the one copy of it that all receivers share."""
    if receivers < 2 or not _is_large(value):
        return value
    import ray

    return ray.put(value)


def _is_large(value: Any) -> bool:
    """Whether a value takes `LARGE` bytes or more, roughly. Looks at no more of it than it must."""
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
    import ray

    resources = ray.available_resources()  # type: ignore[no-untyped-call]
    return {name: resources.get(name, 0.0) for name in ("CPU", "GPU")}


def _traceback_of(error: Any) -> str:
    """The worker's traceback. Ray keeps it in the error's text only, behind colours and remains of its own frames."""
    lines = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).splitlines()
    start = next((number for number, line in enumerate(lines) if line.startswith('  File "')), 0)
    return "\n".join(["Traceback (most recent call last):", *lines[start:]])
