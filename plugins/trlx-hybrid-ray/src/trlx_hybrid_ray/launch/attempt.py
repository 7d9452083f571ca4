"""One start of all ranks: places, a rendezvous, actors, and the watch over them."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from trlx_hybrid.errors import listed

from ..asking import ask
from ..placement import Placement, alive_nodes, reserve
from .course import Limits
from .errors import LaunchError
from .job import Job
from .leftovers import SEAT_VARIABLE
from .logs import Printer
from .rank import Order, Rank
from .rank_environment import at_start, rank_variables
from .rank_place import RankPlace, drawn, places, request_of
from .rendezvous import Rendezvous
from .switchboard import Switchboard, reachable_host
from .verdict import Verdict
from .watch import Say, Watch


def attempt(job: Job, shared: Mapping[str, str], folder: str | None, *, run_id: str, start: int, say: Say) -> Verdict:
    """Start all ranks and follow them to their end.

    Args:
        job: what to run.
        shared: variables of all ranks.
        folder: working folder of the ranks; None leaves them in the one that Ray unpacked the job's files in.
        run_id: the same for all starts of a run.
        start: 0 the first time.
        say: for lines of the launcher's own.

    Raises:
        PlacementError: the places cannot be had.
        LaunchError: the actors do not start, or the script cannot be run where they are.
    """
    with reserve(request_of(job)) as placed:
        ranks = places(placed)
        say(drawn(ranks))
        host = reachable_host([place.address for place in ranks])
        board = Switchboard(host, len(ranks))
        try:
            with Rendezvous(host, len(ranks)) as rendezvous, _actors(job, shared, ranks, placed, board) as actors:
                pids = _started(job, ranks, actors)
                runs = {}
                for place, actor in zip(ranks, actors, strict=True):
                    told = rank_variables(
                        place, rendezvous.host, rendezvous.port, run_id=run_id, start=start, restarts=job.restarts
                    )
                    order = Order(
                        rank=place.rank,
                        environment={**shared, **told},
                        folder=folder,
                        script=job.script,
                        arguments=job.arguments,
                        host=board.host,
                        port=board.port,
                        secret=board.secret,
                    )
                    runs[place.rank] = actor.run.remote(order)
                watch = Watch(
                    ranks,
                    pids,
                    board,
                    runs,
                    lambda rank: _kill(actors[rank]),
                    Limits.lifted() if job.debug else Limits(),
                    Printer(len(ranks), sys.stdout.buffer, sys.stderr.buffer),
                    say,
                )
                return watch.until_over()
        finally:
            board.close()


@contextmanager
def _actors(
    job: Job, shared: Mapping[str, str], ranks: tuple[RankPlace, ...], placed: Placement, board: Switchboard
) -> Iterator[list[Any]]:
    """One actor per rank, in its place; none is left afterwards."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    told = at_start(shared, job)
    kind = ray.remote(Rank)
    actors = [
        kind.options(
            num_cpus=job.cpus_per_process,
            num_gpus=1 if job.gpus else 0,
            max_restarts=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                placed.group,
                placement_group_bundle_index=place.bundle,
                # What the script asks Ray for must not wait for room in a group that its ranks fill.
                placement_group_capture_child_tasks=False,
            ),
            runtime_env={"env_vars": {**told, SEAT_VARIABLE: seat}},
        ).remote()
        for place, seat in zip(ranks, board.seats, strict=True)
    ]
    try:
        yield actors
    finally:
        for actor in actors:
            _kill(actor)


def _started(job: Job, ranks: tuple[RankPlace, ...], actors: list[Any]) -> dict[int, int]:
    """Processes by rank.

    Raises:
        LaunchError: names the ranks that are not there in time, or whose process ended.
    """
    import ray

    asked = {actor.pid.remote(): place for place, actor in zip(ranks, actors, strict=True)}
    limit = None if job.debug else job.start_timeout
    done, late = ray.wait(list(asked), num_returns=len(asked), timeout=limit)
    pids = {}
    for reference in done:
        place = asked[reference]
        try:
            pids[place.rank] = ray.get(reference)
        except ray.exceptions.RayError as error:
            raise LaunchError(f"rank {place.rank} did not start ({place.where}): {error}") from error
    if late:
        names = listed([f"{asked[reference].rank} ({asked[reference].where})" for reference in late])
        gone = {place.node for place in ranks} - {node.id for node in alive_nodes()}
        why = "Their nodes have left the cluster." if gone else "Raise --start-timeout if the machines are that slow."
        raise LaunchError(f"Ray has not started the processes of rank {names} within {limit:g} s. {why}")
    return pids


def _kill(actor: Any) -> None:
    import ray

    with suppress(ray.exceptions.RayError):  # it is gone, which is what was wanted
        ask(lambda: ray.kill(actor))
