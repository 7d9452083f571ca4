"""The workers that environments live in: started together, filled evenly, replaced when they die."""

from __future__ import annotations

import gc
import itertools
import threading
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from trlx_hybrid.errors import ConfigError, listed

from .. import debugging
from ..worker_group import DeadlineError, WorkerDiedError
from ..worker_group.group import timeout
from .environment_host import EnvironmentHost
from .lost import EnvironmentLostError
from .quarters import Quarters
from .seat import Seat, answered
from .shipment import Shipment

SPARE = 4  # threads of a worker beside one for each environment: to make them and to let them go
STUCK = 2  # of these, for calls that hang: so many environments more than it has places for


@dataclass(slots=True, eq=False)
class Worker:
    """One actor.

    Attributes:
        number: among the workers; a replacement takes the number of the one it replaces.
        where: node and process.
        keys: of the environments in it.
        stuck: calls that were given up and may still run, by the environment that they hold a thread of.
        dead: it cannot be called any more.
    """

    number: int
    handle: Any
    where: str = ""
    keys: set[int] = field(default_factory=set)
    stuck: dict[int, Any] = field(default_factory=dict)
    dead: bool = False

    @property
    def taken(self) -> int:
        """Places."""
        return len(self.keys) - min(len(self.stuck), STUCK)


class Fleet:
    """Workers for the environments of one kind.

    Args:
        shipment: of what makes an environment.
        name: of the environment.
        workers, per_worker, cpus, gpus, deadline, start_deadline: see `remote_environment`.
    """

    def __init__(
        self,
        shipment: Shipment,
        name: str,
        *,
        workers: int,
        per_worker: int,
        cpus: float,
        gpus: float,
        deadline: float,
        start_deadline: float,
    ) -> None:
        self.name, self._shipment, self._per_worker = name, shipment, per_worker
        self._deadline, self._starting = debugging.patience(deadline), debugging.patience(start_deadline)
        self._lock = threading.RLock()
        self._numbers = itertools.count()
        self._freed: deque[tuple[Worker, int]] = deque()
        self._quarters = Quarters(f"environment {name}", workers, cpus, gpus)
        self._workers: list[Worker] = []
        try:
            self._workers = [self._launched(number) for number in range(workers)]
            self._await(self._workers)
        except BaseException:
            self.close()
            raise

    def seat(self) -> tuple[Worker, Seat]:
        """A new environment, in the emptiest worker. Workers that died are replaced first, or when this finds them so.

        Raises:
            ConfigError: there is no place left, or the fleet is closed.
            EnvironmentLostError: the worker died in the constructor, and so did the next.
            what the environment's constructor raises.
        """
        try:
            return self._seated()
        except EnvironmentLostError:
            return self._seated()

    def _seated(self) -> tuple[Worker, Seat]:
        with self._lock:
            self._let_go()
            if not self._workers:
                raise ConfigError(f"The remote environments {self.name!r} were closed. Make new ones.")
            self._replace_dead()
            if all(worker.taken >= self._per_worker for worker in self._workers):
                gc.collect()  # an error's traceback can hold an environment that nobody uses
                self._let_go()
            worker = min(self._workers, key=lambda worker: (worker.taken, worker.number))
            if worker.taken >= self._per_worker:
                raise ConfigError(self._full())
            key = next(self._numbers)
            worker.keys.add(key)
        seat = Seat(worker.handle, key, f"worker {worker.number} ({worker.where})", self._deadline)
        made = worker.handle.make.remote(key)
        try:
            answered(self.name, "__init__", seat, made)
        except EnvironmentLostError as error:
            self.lost(worker, key, made, died=not isinstance(error.__cause__, TimeoutError))
            raise
        except BaseException:
            self.free(worker, key)
            raise
        return worker, seat

    def _full(self) -> str:
        stuck = sum(len(worker.stuck) for worker in self._workers)
        hanging = f" {stuck} of them hang in a call that was given up, and keep a thread each." if stuck else ""
        return (
            f"{sum(len(worker.keys) for worker in self._workers)} environments {self.name!r} are in use, all that "
            f"workers={len(self._workers)} with per_worker={self._per_worker} have places for: each completion of a "
            f"batch takes one.{hanging} Raise either."
        )

    def lost(self, worker: Worker, key: int, call: Any, *, died: bool) -> None:
        """Note what a call found out: a dead worker is replaced when the next environment is made.

        A call that hangs may still run, and a thread cannot be ended: only a worker with one environment can. Beside
        others it is stuck, until it returns.

        Args:
            call: reference to its answer.
        """
        if not died and self._per_worker == 1 and not worker.dead:
            import ray

            ray.kill(worker.handle)
            died = True
        worker.dead = worker.dead or died
        if not worker.dead:
            worker.stuck[key] = call

    def free(self, worker: Worker, key: int) -> None:
        """Nobody uses this environment any more. May be called by the garbage collector, so it only takes a note."""
        self._freed.append((worker, key))

    def close(self) -> None:
        """End all workers, with the environments in them."""
        import ray

        with self._lock:
            workers, self._workers = self._workers, []
        if ray.is_initialized():
            for worker in workers:
                ray.kill(worker.handle)
            self._quarters.close()

    def _let_go(self) -> None:
        import ray

        for worker in self._workers:
            stuck = dict(worker.stuck)  # calls are given up in other threads
            if stuck:
                late = set(ray.wait(list(stuck.values()), num_returns=len(stuck), timeout=0)[1])
                for key in [key for key, call in stuck.items() if call not in late]:
                    del worker.stuck[key]
                    self.free(worker, key)
        gone: dict[Worker, list[int]] = {}
        while self._freed:
            worker, key = self._freed.popleft()
            if key in worker.stuck:  # freed when it returns
                continue
            worker.keys.discard(key)
            gone.setdefault(worker, []).append(key)
        for worker, keys in gone.items():
            if not worker.dead:
                worker.handle.drop.remote(keys)

    def _replace_dead(self) -> None:
        dead = [worker for worker in self._workers if worker.dead]
        for worker in dead:
            self._workers[worker.number] = self._launched(worker.number)
        if dead:
            self._await([self._workers[worker.number] for worker in dead])

    def _launched(self, number: int) -> Worker:
        import ray

        options = dict(self._quarters.options(number))
        actors: Any = ray.remote(type(self.name, (EnvironmentHost,), {"__module__": EnvironmentHost.__module__}))
        threads = self._per_worker + SPARE
        handle = actors.options(**options, max_concurrency=threads).remote(self._shipment, self._quarters.gpus(number))
        return Worker(number, handle)

    def _await(self, workers: list[Worker]) -> None:
        """Wait until they run, and know what they have to make.

        Raises:
            DeadlineError, WorkerDiedError: names the worker.
            ConfigError: the environment cannot be loaded there.
        """
        import ray

        asked = {worker.handle.ready.remote(): worker for worker in workers}
        _, late = ray.wait(list(asked), num_returns=len(asked), timeout=timeout(self._starting))
        about = {"method": "__init__", "node": ""}
        if late:
            names = listed([str(asked[reference].number) for reference in late])
            raise DeadlineError(
                f"Worker {names} of the environments {self.name!r} did not start within {self._starting:g} s. Raise "
                "start_deadline= if its imports are that slow.",
                rank=asked[late[0]].number,
                **about,
            )
        for reference, worker in asked.items():
            try:
                reply, worker.where = ray.get(reference)
            except ray.exceptions.RayActorError as error:
                raise WorkerDiedError(
                    f"Worker {worker.number} of the environments {self.name!r} died while it started: {error}",
                    rank=worker.number,
                    **about,
                ) from error
            if reply.text:
                reply.result()
