"""A group of Ray actors called as one object."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from .grid import Grid
from .group import DEADLINE, START_SECONDS, Group
from .hosted import hosted
from .member import Member
from .pool import Pool, pool_of
from .register import rules
from .sending import once

W = TypeVar("W")


class WorkerGroup(Group[W]):
    """Ray actors of one class, one per rank of a pool.

    ```python
    with WorkerGroup(Scorer, 4) as scorers:
        scores = scorers.score(prompts)
    ```

    The group holds its workers' handles; nobody looks them up by name. When the block is left by an error the workers
    end at once, else when they are done with what they were given.

    Args:
        worker: a class with methods marked with `@register`.
        pool: a place for each rank, or a number of ranks to be put wherever there is room.
        args, kwargs: what each worker's constructor gets. `this_worker()` tells a worker which one it is.
        tensor_parallel: ranks of a replica: they get the same chunks of what is split.
        deadline: seconds that a call may take; `math.inf` waits for ever.
        start_deadline: seconds for all workers to be constructed.

    Raises:
        ConfigError: the class has no registered method, or the sizes do not divide.
        WorkerError: a constructor raised; names the rank.
        DeadlineError: Ray did not start all workers in time.
    """

    def __init__(
        self,
        worker: type[W],
        pool: Pool | int,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        tensor_parallel: int = 1,
        deadline: float = DEADLINE,
        start_deadline: float = START_SECONDS,
    ) -> None:
        import ray  # only here: worker classes are imported where no Ray is wanted

        from .ray_crew import RayCrew

        rules(worker)
        pool = pool_of(pool)
        grid = Grid(len(pool), tensor_parallel)
        actors: Any = ray.remote(hosted(worker))
        args = [once(value, len(pool)) for value in args]
        kwargs = {name: once(value, len(pool)) for name, value in (kwargs or {}).items()}
        handles = [
            actors.options(**pool.options(rank)).remote(Member(rank, grid, pool.gpus(rank)), *args, **kwargs)
            for rank in range(len(pool))
        ]
        crew = RayCrew(worker.__name__, handles)
        try:
            crew.start(start_deadline)
            self._open(worker, grid, crew, deadline)
        except BaseException:
            crew.close(at_once=True)
            raise
        self._actors = crew

    @property
    def handles(self) -> Sequence[Any]:
        """The actors, by rank; none once the group is closed."""
        return self._actors.handles
