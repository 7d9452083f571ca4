"""The same group in this process: one thread per worker, and copies where Ray would make copies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from .group import Group
from .hosted import answering
from .local_crew import LocalCrew
from .member import Member, become
from .parcel import Parcel
from .pool import Pool
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

    def _hired(self, worker: type[W], pool: Pool, args: Sequence[Any], kwargs: Mapping[str, Any]) -> LocalCrew:
        packed = Parcel.of((list(args), dict(kwargs)))

        def construct(rank: int) -> Callable[[], Any]:
            def build() -> Any:
                become(Member(rank, self.grid, pool.gpus(rank)), whole_process=False)
                own_args, own_kwargs = packed.copy()
                return worker(*own_args, **own_kwargs)

            return build

        methods = {name: answering(rule, getattr(worker, name)) for name, rule in rules(worker).items()}
        return LocalCrew(worker.__name__, methods, [construct(rank) for rank in range(len(pool))])
