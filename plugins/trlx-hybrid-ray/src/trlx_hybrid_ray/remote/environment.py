"""Environments that live in Ray actors: `remote_environment`."""

from __future__ import annotations

import functools
import inspect
from types import TracebackType
from typing import Any

from trlx_hybrid.errors import ConfigError

from ..worker_group.group import DEADLINE, START_SECONDS
from .connection import connected
from .environment_proxy import RemoteEnvironment, proxy_class
from .fleet import Fleet
from .shipment import packed

REMEDY = "Let its constructor make what cannot be sent: constructors run in the workers."


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
    reward functions do, each time with a call.

    Args:
        environment: a class, or `functools.partial` of one with its constructor's arguments.
        workers: how many actors. They start at once.
        per_worker: environments in each, side by side in threads: what these share must be thread-safe, and they die
            together. 1 gives each environment a process of its own.
        cpus, gpus: of each worker. A fraction of a GPU shares it.
        deadline: seconds that a call may take; `math.inf` waits for ever.
        start_deadline: seconds for all workers to start, imports included.

    Raises:
        ConfigError: it is no class, or cannot be pickled or loaded.
        ClusterError: no cluster answers at `RAY_ADDRESS`, or none can be started here.
        PlacementError: the cluster has no such room.
        DeadlineError, WorkerDiedError: a worker did not start.
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
    connected()
    fleet = Fleet(
        packed(environment, f"Environment {kind.__name__!r}", REMEDY),
        kind.__name__,
        workers=workers,
        per_worker=per_worker,
        cpus=cpus,
        gpus=gpus,
        deadline=deadline,
        start_deadline=start_deadline,
    )
    return RemoteEnvironments(fleet, proxy_class(kind))  # type: ignore[arg-type]  # classes are hashable


class RemoteEnvironments:
    """What `remote_environment` returns: makes environments when called.

    Every training process that makes one has workers of its own. They end with the process, or when `close` is called
    or a `with` block is left.
    """

    def __init__(self, fleet: Fleet, kind: type[RemoteEnvironment]) -> None:
        self.__name__ = fleet.name
        self._fleet, self._kind = fleet, kind

    def __call__(self) -> RemoteEnvironment:
        """A new environment.

        Raises:
            ConfigError: all places are taken.
            EnvironmentLostError: its worker died while it was made.
            what its constructor raises.
        """
        return self._kind(self._fleet)

    def close(self) -> None:
        """End the workers, with the environments in them, and give their places back."""
        self._fleet.close()

    def __enter__(self) -> RemoteEnvironments:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<remote environments {self.__name__!r}>"
