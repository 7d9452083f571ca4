"""`trlx-hybrid doctor --ray`: whether a cluster is fit for a run, node by node, before one is started on it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from trlx_hybrid.environment import Finding
from trlx_hybrid.errors import listed

from .cluster import Cluster
from .errors import brief
from .examiner import Examiner, Facts
from .internals import authenticated
from .placement import Node, alive_nodes

ANSWER_SECONDS = 60.0
REACH_SECONDS = 5.0
LEAST_SHARED_MEMORY = 1 << 30
LEAST_FILES = 4096
SAME = ("python", "ray", "trlx-hybrid", "trlx-hybrid-ray", "torch", "trl", "transformers", "accelerate", "vllm")
"""Packages that must be the same everywhere. Python down to its minor version: Ray pickles code objects."""


def examine(cluster: Cluster) -> Iterator[Finding]:
    """Findings on a cluster that this process is connected to, as they come."""
    nodes = alive_nodes()
    yield from addresses(cluster, nodes)
    yield from namespaces(cluster.namespace)
    examiners = _examiners(nodes)
    facts, silent = _asked({node: examiners[node.id].facts.remote() for node in nodes})
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
    versions = ", ".join(f"{name} {facts.versions[name]}" for name in SAME if name in facts.versions)
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
    for package in SAME:
        by_version: defaultdict[str, list[str]] = defaultdict(list)
        for node, own in facts.items():
            release = own.versions.get(package, "not installed")
            by_version[release.rpartition(".")[0] if package == "python" else release].append(node.name)
        if len(by_version) > 1:
            told = "; ".join(f"{release} on {listed(names)}" for release, names in sorted(by_version.items()))
            yield Finding("versions", f"{package} differs: {told}. Install the same everywhere", problem=True)


def _examiners(nodes: Sequence[Node]) -> dict[str, Any]:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    kind = ray.remote(num_cpus=0)(Examiner)
    return {
        node.id: kind.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False)).remote()
        for node in nodes
    }


def _asked(calls: Mapping[Any, Any]) -> tuple[dict[Any, Any], dict[Any, str]]:
    """Answers, and why there is none."""
    import ray

    ray.wait(list(calls.values()), num_returns=len(calls), timeout=ANSWER_SECONDS)
    answers, silent = {}, {}
    for asked, reference in calls.items():
        try:
            answers[asked] = ray.get(reference, timeout=0)
        except ray.exceptions.GetTimeoutError:
            silent[asked] = f"no answer within {ANSWER_SECONDS:g} s. See the logs of its raylet"
        except ray.exceptions.RayError as error:
            silent[asked] = brief(error)
    return answers, silent


def _unreachable(nodes: Sequence[Node], examiners: Mapping[str, Any]) -> Iterator[Finding]:
    """Each node calls the next on a port of the kind that process groups open, the last one the first."""
    ports, silent = _asked({node: examiners[node.id].listen.remote(node.address) for node in nodes})
    for node, why in silent.items():
        yield Finding("ports", f"{node.name} cannot open a port on its own address: {why}", problem=True)
    ring = [(node, nodes[i - 1]) for i, node in enumerate(nodes) if nodes[i - 1] in ports]
    calls = {
        (node, other): examiners[node.id].reach.remote(other.address, ports[other], REACH_SECONDS)
        for node, other in ring
    }
    answers, silent = _asked(calls)
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
