"""Tensor parallelism one step at a time, until it breaks: where, and on whose account."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from trlx_hybrid.environment import Finding
from trlx_hybrid.errors import ConfigError, listed

from .errors import PlacementError, brief
from .placement import Placement, Request, alive_nodes, reserve

START_SECONDS = 120.0
"""For processes that import torch."""
GROUP_SECONDS = 60.0
MEBIBYTES = 8
ROLE = "tp"


def steps(largest: int) -> list[int]:
    """2, 4, 8, … and the largest itself.

    Raises:
        ConfigError: there is nothing to climb.
    """
    if largest < 2:
        raise ConfigError(f"--tp {largest}: tensor parallelism begins at 2.")
    powers = [1 << exponent for exponent in range(1, largest.bit_length()) if 1 << exponent < largest]
    return [*powers, largest]


class Member:
    """One rank of a process group, in a process of its own."""

    def ready(self) -> str:
        """The backend that its device takes. Imports torch."""
        import torch

        return "nccl" if torch.cuda.is_available() else "gloo"

    def host(self, address: str, world: int) -> int:
        """Hold the group's meeting place; returns its port."""
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        self._store = TCPStore(address, 0, world, is_master=True, wait_for_workers=False)
        return int(self._store.port)

    def join(self, address: str, port: int, rank: int, world: int, backend: str) -> None:
        """Enter the process group."""
        import torch.distributed as dist

        patience = datetime.timedelta(seconds=GROUP_SECONDS)
        store = self._store if rank == 0 else dist.TCPStore(address, port, world, timeout=patience)  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=patience)

    def reduce(self) -> float:
        """Seconds that an all-reduce takes, after one to warm up.

        Raises:
            RuntimeError: the sum is wrong.
        """
        import torch
        import torch.distributed as dist

        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        value = torch.ones(MEBIBYTES << 18, device=device)
        dist.all_reduce(value)
        started = time.perf_counter()
        dist.all_reduce(value)
        right = bool((value == dist.get_world_size() ** 2).all())  # brings the result to the host: it is there now
        taken = time.perf_counter() - started
        if not right:
            raise RuntimeError("the all-reduce gave a wrong sum")
        return taken


class _BrokenError(Exception):
    """Where a step broke, and why."""

    def __init__(self, where: str, why: str) -> None:
        super().__init__(f"breaks at {where}: {why}")


def climb(largest: int, *, backend: str | None = None) -> Iterator[Finding]:
    """One finding per step, up to the first that fails.

    Each step reserves a GPU per rank (a CPU where the cluster has no GPUs), starts a process for each, forms a process
    group over them and sums a tensor. A replica goes over several nodes only where none has room for it.

    Args:
        backend: of the process group; by default NCCL on GPUs and gloo on CPUs.
    """
    for size in steps(largest):
        try:
            yield Finding("tp", f"{size:<3} {_step(size, backend)}")
        except _BrokenError as broken:
            yield Finding("tp", f"tp={size} {broken}", problem=True)
            return


def _step(size: int, backend: str | None) -> str:
    gpus = 1 if any(node.gpus for node in alive_nodes()) else 0
    request = Request(name=ROLE, replicas=size, gpus=gpus)
    try:
        with reserve(request) as placed:
            return _formed(placed, size, backend)
    except PlacementError as error:
        raise _BrokenError("placement", str(error)) from error


def _formed(placed: Placement, size: int, backend: str | None) -> str:
    import ray

    ranks = range(size)
    kind = ray.remote(Member)
    members = [kind.options(**placed.options(rank)).remote() for rank in ranks]
    backends = _all("the start of its processes", placed, ranks, members, lambda m, s: m.ready.remote(), START_SECONDS)
    chosen = backend or ("nccl" if set(backends.values()) == {"nccl"} else "gloo")
    first = placed.bundles[0].node.address
    port = _all(
        "the meeting place", placed, ranks[:1], members, lambda m, s: m.host.remote(first, size), GROUP_SECONDS
    )[0]
    where = f"the process group ({chosen}, meeting at {first}:{port})"
    _all(where, placed, ranks, members, lambda m, r: m.join.remote(first, port, r, size, chosen), 2 * GROUP_SECONDS)
    taken = _all("the all-reduce", placed, ranks, members, lambda m, s: m.reduce.remote(), 2 * GROUP_SECONDS)
    nodes = len({bundle.node for bundle in placed.bundles})
    over = f" over {nodes} nodes" if nodes > 1 else ""
    return f"works{over}: {chosen}, {MEBIBYTES} MiB summed in {max(taken.values()) * 1e3:.1f} ms"


def _all(
    where: str,
    placed: Placement,
    ranks: Sequence[int],
    members: Sequence[Any],
    call: Callable[[Any, int], Any],
    seconds: float,
) -> Mapping[int, Any]:
    """Every member's answer by rank, or who failed first."""
    import ray

    references = {call(members[rank], rank): rank for rank in ranks}
    waiting, answers = list(references), {}
    until = time.monotonic() + seconds
    while waiting:
        done, waiting = ray.wait(waiting, timeout=max(0.0, until - time.monotonic()))
        if not done:
            names = listed([_name(placed, references[reference]) for reference in waiting])
            raise _BrokenError(where, f"no answer within {seconds:g} s of {names}")
        try:
            answers[references[done[0]]] = ray.get(done[0])
        except ray.exceptions.RayError as error:
            raise _BrokenError(where, f"{_name(placed, references[done[0]])}: {brief(error)}") from error
    return answers


def _name(placed: Placement, rank: int) -> str:
    gpu = f", GPU {','.join(placed.gpus(rank))}" if placed.gpus(rank) else ""
    node = placed.bundle(rank).node
    return f"rank {rank} on {node.address} ({node.id[:6]}{gpu})"
