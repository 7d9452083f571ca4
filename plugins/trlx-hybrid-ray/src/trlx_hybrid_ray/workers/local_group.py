"""The same group in this process: one thread per worker, and copies where Ray would make copies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from .failure import Call
from .grid import Grid
from .group import DEADLINE, START_SECONDS, Group
from .hosted import answering
from .local_answers import LocalAnswers
from .local_crew import LocalCrew
from .member import Member, become
from .parcel import Parcel
from .pool import Pool, pool_of
from .register import rules

W = TypeVar("W")


class LocalWorkerGroup(Group[W]):
    """Workers in threads of this process, for a single GPU, tests and debuggers. Takes what `WorkerGroup` takes.

    What a worker is given and what it returns is copied as Ray would copy it: nothing that one side changes shows on
    the other, and arrays arrive read-only. Resources that the pool claims are not: there is nobody to claim them from.
    The threads share this process's random generators, environment and devices.

    Raises:
        ConfigError: as from `WorkerGroup`.
        WorkerError: a constructor raised.
        DeadlineError: a constructor did not return in time.
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
        methods = {name: answering(rule, getattr(worker, name)) for name, rule in rules(worker).items()}
        pool = pool_of(pool)
        grid = Grid(len(pool), tensor_parallel)
        crew = LocalCrew(worker.__name__, methods, len(pool))
        packed = Parcel.of((list(args), dict(kwargs or {})))

        def construct(rank: int) -> Callable[[], Any]:
            def build() -> Any:
                become(Member(rank, grid, pool.gpus(rank)), whole_process=False)
                own_args, own_kwargs = packed.copy()
                return worker(*own_args, **own_kwargs)

            return build

        call = Call(worker.__name__, "__init__", range(len(pool)), crew.homes)
        try:
            promises = [crew.enqueue(rank, construct(rank)) for rank in range(len(pool))]
            crew.workers = LocalAnswers(crew, call, promises, None).all(start_deadline)
            self._open(worker, grid, crew, deadline)
        except BaseException:
            crew.close(at_once=True)
            raise
