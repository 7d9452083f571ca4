"""Tensor parallelism one step at a time, until it breaks: where, and on whose account."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from trlx_hybrid.doctor import Finding
from trlx_hybrid.errors import ConfigError, listed

from .errors import PlacementError, brief
from .node import alive
from .placement import Slot
from .placing import Placed, reserved
from .role import Role

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
    gpus = 1 if any(node.gpus for node in alive()) else 0
    role = Role(name=ROLE, size=size, gpus=gpus, may_span_nodes=True)
    try:
        with reserved([role], run="doctor", show=None) as placed:
            return _formed(placed, size, backend)
    except PlacementError as error:
        raise _BrokenError("placement", str(error)) from error


def _formed(placed: Placed, size: int, backend: str | None) -> str:
    import ray

    slots = placed.placement.of(ROLE)
    kind = ray.remote(Member)
    members = [kind.options(**placed.options(slot, reachable=False)).remote() for slot in slots]
    backends = _all("the start of its processes", slots, members, lambda m, s: m.ready.remote(), START_SECONDS)
    chosen = backend or ("nccl" if set(backends.values()) == {"nccl"} else "gloo")
    first = slots[0].address
    port = _all("the meeting place", slots[:1], members, lambda m, s: m.host.remote(first, size), GROUP_SECONDS)[0]
    where = f"the process group ({chosen}, meeting at {first}:{port})"
    _all(where, slots, members, lambda m, s: m.join.remote(first, port, s.rank, size, chosen), 2 * GROUP_SECONDS)
    taken = _all("the all-reduce", slots, members, lambda m, s: m.reduce.remote(), 2 * GROUP_SECONDS)
    nodes = len({slot.node for slot in slots})
    over = f" over {nodes} nodes" if nodes > 1 else ""
    return f"works{over}: {chosen}, {MEBIBYTES} MiB summed in {max(taken.values()) * 1e3:.1f} ms"


def _all(
    where: str, slots: Sequence[Slot], members: Sequence[Any], call: Callable[[Any, Slot], Any], seconds: float
) -> Mapping[int, Any]:
    """Every member's answer by rank, or who failed first."""
    import ray

    references = {call(member, slot): slot for member, slot in zip(members, slots)}
    waiting, answers = list(references), {}
    until = time.monotonic() + seconds
    while waiting:
        done, waiting = ray.wait(waiting, timeout=max(0.0, until - time.monotonic()))
        if not done:
            names = listed([_name(references[reference]) for reference in waiting])
            raise _BrokenError(where, f"no answer within {seconds:g} s of {names}")
        try:
            answers[references[done[0]].rank] = ray.get(done[0])
        except ray.exceptions.RayError as error:
            raise _BrokenError(where, f"{_name(references[done[0]])}: {brief(error)}") from error
    return answers


def _name(slot: Slot) -> str:
    gpu = f", GPU {','.join(slot.gpu_ids)}" if slot.gpu_ids else ""
    return f"rank {slot.rank} on {slot.address} ({slot.node[:6]}{gpu})"
