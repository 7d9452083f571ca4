"""A group of Ray actors called as one object."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from .group import Group
from .hosted import hosted
from .member import Member
from .pool import Pool
from .sending import once

if TYPE_CHECKING:
    from .ray_crew import RayCrew

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

    _crew: RayCrew

    def _hired(self, worker: type[W], pool: Pool, args: Sequence[Any], kwargs: Mapping[str, Any]) -> RayCrew:
        import ray  # only here: worker classes are imported where no Ray is wanted

        from .ray_crew import RayCrew

        actors: Any = ray.remote(hosted(worker))
        args = [once(value, len(pool)) for value in args]
        kwargs = {name: once(value, len(pool)) for name, value in kwargs.items()}
        handles = [
            actors.options(**pool.options(rank)).remote(Member(rank, self.grid, pool.gpus(rank)), *args, **kwargs)
            for rank in range(len(pool))
        ]
        return RayCrew(worker.__name__, handles)

    @property
    def handles(self) -> Sequence[Any]:
        """The actors, by rank; none once the group is closed."""
        return self._crew.handles
