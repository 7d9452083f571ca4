"""Placement of workers on the nodes of a Ray cluster. A request is reserved as a whole before a deadline, as a Ray
placement group, or is refused with a table of who holds the resources."""

from __future__ import annotations

import functools
import getpass
import json
import math
import os
import secrets
import socket
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal, get_args

from trlx_hybrid.errors import ConfigError, listed
from trlx_hybrid.interprocess.deadline import in_thread

from .cluster import answer, ask
from .errors import PlacementError
from .internals import free_resources
from .waiting import replies

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

Strategy = Literal["pack", "strict_pack", "spread", "strict_spread"]
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)
NODE_LABEL = "ray.io/node-id"
REFUSE_SECONDS, HOLDERS_SECONDS = 7.0, 3.0
"""`REFUSE_SECONDS`: the seconds that a request waits for resources that others hold before it is refused.
`HOLDERS_SECONDS`: the seconds that Ray then has to name the holders. They are ten in all."""
GPU_SECONDS = 120.0
"""The seconds that a node may take to start the process that tells which GPUs a bundle of a placement group has. The
first one on a busy node imports Ray; each further bundle takes milliseconds."""
POLL = 0.1
TOLERANCE = 1e-4
"""The tolerance when amounts of resources are compared: Ray counts them in ten-thousandths."""
SET_ASIDE = "TRLX_HYBRID_RAY_SET_ASIDE"
"""The name of the environment variable in which ranks of `trlx-hybrid launch --placement` find, as JSON, the resources
that the launcher has reserved for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A node of the Ray cluster, with its total and its free CPUs and GPUs.

    Attributes:
        id: Ray's id, hexadecimal.
        address: the IP address. Nodes that a test simulates on one machine share an address, real ones do not.
    """

    id: str
    address: str
    cpus: float
    gpus: float
    free_cpus: float
    free_gpus: float

    @property
    def name(self) -> str:
        """The node's name in messages: the address, and enough of the id to tell simulated nodes apart."""
        return f"{self.address} ({self.id[:6]})"

    @property
    def order(self) -> tuple[tuple[int, ...], str, str]:
        """The key by which nodes are sorted: the address as numbers, then as text, then the id."""
        parts = self.address.split(".")
        return tuple(int(p) for p in parts) if all(p.isdecimal() for p in parts) else (), self.address, self.id


def alive_nodes() -> list[Node]:
    """Return the nodes of the cluster that are alive, sorted by address, with their free resources as of now."""
    import ray

    free = free_resources()
    found = []
    nodes: Callable[[], Sequence[Mapping[str, Any]]] = ray.nodes
    for entry in nodes():
        if entry["Alive"]:
            has, left = entry["Resources"], free.get(entry["NodeID"], {})
            found.append(
                Node(
                    id=entry["NodeID"],
                    address=entry["NodeManagerAddress"],
                    cpus=has.get("CPU", 0.0),
                    gpus=has.get("GPU", 0.0),
                    free_cpus=left.get("CPU", 0.0),
                    free_gpus=left.get("GPU", 0.0),
                )
            )
    return sorted(found, key=lambda node: node.order)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementRequest:
    """A request for the resources of workers, in `replicas` groups of `size` workers each. The workers of a replica
    share a node.

    Attributes:
        name: the name of the workers in messages, and in lists of who holds which resources.
        gpus, cpus: the resources of each worker. With a fraction of a GPU, workers may share a GPU.
        strategy: how replicas are placed on nodes, in Ray's terms: "pack" uses few nodes and "spread" many,
            "strict_pack" requires a single node and "strict_spread" a node of its own for each replica.
        nodes: ids, their beginnings (six characters or more) or addresses of the only nodes to use; empty for any.
        labels: Ray's label selector, for nodes with these labels only.
    """

    name: str
    replicas: int = 1
    size: int = 1
    gpus: float = 0
    cpus: float = 1
    strategy: Strategy = "pack"
    nodes: Sequence[str] = ()
    labels: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        if self.replicas < 1 or self.size < 1:
            raise ConfigError(f"{self.name}: {self.replicas} replicas of {self.size} are no workers.")
        if self.gpus < 0 or self.cpus < 0 or not (self.gpus or self.cpus):
            raise ConfigError(f"{self.name}: gpus={self.gpus:g} and cpus={self.cpus:g}: ask for some of either.")
        if self.gpus * self.size > 1 and self.gpus != int(self.gpus):
            raise ConfigError(f"{self.name}: gpus={self.gpus:g}: above 1, Ray gives whole GPUs only.")
        if self.strategy not in STRATEGIES:
            raise ConfigError(f"{self.name}: strategy={self.strategy!r}; choose one of {', '.join(STRATEGIES)}.")

    @property
    def bundle(self) -> dict[str, float]:
        """The resources of one replica as amounts by Ray's names, "CPU" and "GPU": the content of a bundle of Ray's
        placement group."""
        amounts = {"CPU": self.cpus * self.size, "GPU": self.gpus * self.size}
        return {name: amount for name, amount in amounts.items() if amount}

    def fits(self, nodes: Sequence[Node], *, empty: bool) -> bool:
        """Return whether all replicas fit on these nodes.

        Args:
            nodes: the nodes that the request may use.
            empty: whether to count all resources of the nodes, as if nothing ran there, rather than the free ones.
        """
        room = []
        for node in nodes:
            cpus, gpus = (node.cpus, node.gpus) if empty else (node.free_cpus, node.free_gpus)
            amounts = {"CPU": cpus, "GPU": gpus}
            room.append(min(int((amounts[name] + TOLERANCE) / asked) for name, asked in self.bundle.items()))
        if self.strategy == "strict_pack":
            return max(room, default=0) >= self.replicas
        if self.strategy == "strict_spread":
            return sum(count > 0 for count in room) >= self.replicas
        return sum(room) >= self.replicas


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """The reserved resources of one replica: a bundle of Ray's placement group, on one node.

    Attributes:
        index: the bundle's index in Ray's placement group.
        node: the node on which Ray has reserved the bundle.
        gpus: the numbers or UUIDs of the GPUs, as `CUDA_VISIBLE_DEVICES` takes them on the node, in order; empty
            without GPUs.
    """

    index: int
    node: Node
    gpus: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Placement:
    """The reserved resources of all workers of a request: a Ray placement group with a bundle for each replica. Leaving
    its `with` block gives the resources back.

    A worker's rank is replica * size + its number in the replica. Replicas are numbered by node and GPU, which may
    differ from the order of Ray's bundles.

    Attributes:
        request: the request that was granted.
        group: Ray's placement group.
        bundles: the bundle of each replica, by the replica's number.
        lent: whether the launcher of this run has reserved the resources, and will give them back itself.
    """

    request: PlacementRequest
    group: PlacementGroup
    bundles: tuple[Bundle, ...]
    lent: bool = False

    def __len__(self) -> int:
        return self.request.replicas * self.request.size

    def options(self, rank: int) -> dict[str, Any]:
        """Return the arguments of Ray's `.options(**…)` with which an actor or task gets the resources of the worker
        with this rank."""
        return self._options(self.bundle(rank), 1)

    def replica_options(self, replica: int) -> dict[str, Any]:
        """Return the arguments of Ray's `.options(**…)` for one actor that gets all resources of a replica, and starts
        the replica's workers by itself."""
        return self._options(self.bundles[replica], self.request.size)

    def _options(self, bundle: Bundle, workers: int) -> dict[str, Any]:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        return {
            "num_cpus": self.request.cpus * workers,
            "num_gpus": self.request.gpus * workers,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self.group, bundle.index),
        }

    def bundle(self, rank: int) -> Bundle:
        """Return the bundle in which the worker with this rank runs."""
        return self.bundles[rank // self.request.size]

    def gpus(self, rank: int) -> tuple[str, ...]:
        """Return the GPUs for the worker with this rank, as `CUDA_VISIBLE_DEVICES` names them. Ray assigns a replica's
        GPUs to its workers as they start, perhaps in another order: let each worker use the GPUs of this method
        instead."""
        each, own = self.request.gpus, self.bundle(rank).gpus
        first = rank % self.request.size
        return own[first * int(each) : (first + 1) * int(each)] if each >= 1 else own

    def __str__(self) -> str:
        """Return a map of the placement: a line for each node, with its workers and their GPUs."""
        lines, size = [], self.request.size
        numbered = list(enumerate(self.bundles))
        for node, here in groupby(numbered, key=lambda pair: pair[1].node):
            members = list(here)
            first, last = members[0][0] * size, (members[-1][0] + 1) * size - 1
            gpus = [gpu for _, bundle in members for gpu in bundle.gpus]
            which = f"{first}-{last}" if last > first else str(first)
            on = f", GPU {', '.join(gpus)}" if gpus else ""
            lines.append(f"{self.request.name} {which} on node {node.name}{on}")
        return "\n".join(lines)

    def remove(self) -> None:
        """Give all resources back to Ray, which then kills the actors that run in the placement. If the launcher has
        reserved them (`lent`), nothing is given back to Ray; the next call of `reserve` in this process may then take
        them."""
        if self.lent:
            _taken.discard(self.request.name)
        else:
            _remove(self.group)

    def __enter__(self) -> Placement:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def reserve(
    request: PlacementRequest, *, deadline: float | None = REFUSE_SECONDS, show: Callable[[str], None] | None = None
) -> Placement:
    """Reserve the resources of a request, on the cluster that this process is connected to.

    A request that would not even fit on empty nodes is refused at once. For resources that others hold, it waits until
    the deadline. In a rank of `trlx-hybrid launch --placement`, it returns the resources that the launcher has reserved
    under the request's name.

    Args:
        request: the workers, and the resources of each.
        deadline: seconds until a refusal; None waits for ever.
        show: a function that gets the map of workers and nodes as text, before any worker starts.

    Raises:
        PlacementError: the resources are not available; the message has a table of free resources and the holders of
            the rest. Nothing stays reserved.
        ClusterError: the cluster's head does not answer.
    """
    if SET_ASIDE in os.environ:
        return _set_aside(request)
    until = None if deadline is None else time.monotonic() + deadline
    group: PlacementGroup | None = None
    asked: dict[str, str] = {}
    try:
        while True:
            nodes = answer(alive_nodes)
            allowed = _allowed(nodes, request)
            if not request.fits(allowed, empty=True):
                raise PlacementError(_refusal(request, nodes, allowed, None))
            selector = _selector(request, allowed)
            if group is not None and selector != asked:  # a node has joined or left
                _remove(group)
                group = None
            if group is None:
                group, asked = _created(request, selector), selector
            left = math.inf if until is None else until - time.monotonic()
            # Wait at least a moment: even after the deadline, free resources can be reserved.
            if group.wait(max(0.1, min(left, 1.0))):
                break
            if left <= 0:
                raise PlacementError(_refusal(request, answer(alive_nodes), allowed, deadline))
        placement = Placement(request=request, group=group, bundles=_bundles(request, group, nodes))
    except BaseException:
        if group is not None:
            _remove(group)
        raise
    if show is not None:
        show(str(placement))
    return placement


def _allowed(nodes: Sequence[Node], request: PlacementRequest) -> list[Node]:
    """Return the nodes among which a request may choose: those that it names, or all. Labels are not checked, because
    only Ray knows them.

    Raises:
        PlacementError: the cluster lacks a node that the request names.
    """
    for asked in request.nodes:
        if not any(_means(asked, node) for node in nodes):
            there = ", ".join(node.name for node in nodes)
            raise PlacementError(f"{request.name}: the cluster has no node {asked!r}. It has {there}.")
    return [node for node in nodes if not request.nodes or any(_means(asked, node) for asked in request.nodes)]


def _means(asked: str, node: Node) -> bool:
    return asked == node.address or (len(asked) >= 6 and node.id.startswith(asked))


def _selector(request: PlacementRequest, allowed: Sequence[Node]) -> dict[str, str]:
    """Return the label selector with which Ray chooses nodes for a request's bundles, made from the request's labels
    and the nodes that the request names.

    Args:
        request: the request.
        allowed: the nodes that the request may use.
    """
    nodes = {NODE_LABEL: f"in({','.join(node.id for node in allowed)})"} if request.nodes else {}
    return dict(request.labels or {}) | nodes


def _created(request: PlacementRequest, selector: dict[str, str]) -> PlacementGroup:
    """Create Ray's placement group for a request, and return it without waiting: Ray reserves the resources in the
    background. A group for which there is no room waits for ever.

    Args:
        request: the request.
        selector: Ray's label selector for each bundle; empty for none.
    """
    from ray.util.placement_group import placement_group

    group: PlacementGroup = placement_group(
        [request.bundle] * request.replicas,
        strategy=request.strategy.upper(),
        name=f"{request.name}, pid {os.getpid()} of {_user()}@{socket.gethostname()} ({secrets.token_hex(4)})",
        bundle_label_selector=[selector] * request.replicas if selector else None,
    )
    return group


def _bundles(request: PlacementRequest, group: PlacementGroup, nodes: Sequence[Node]) -> tuple[Bundle, ...]:
    """Return the bundles of a placement group that Ray has reserved, sorted by node and GPU. Ray chooses the GPUs of a
    bundle when it reserves the bundle, in no promised order. Only a task that runs in the bundle can find out which
    GPUs they are.

    Raises:
        PlacementError: a node starts no process, or it joined or left the cluster since `nodes` were listed.
    """
    from ray.util import placement_group_table

    by_id = {node.id: node for node in nodes}
    where = answer(functools.partial(placement_group_table, group))["bundles_to_node_id"]
    if gone := [node for node in where.values() if node not in by_id]:
        raise PlacementError(f"{request.name}: node {gone[0][:6]} joined the cluster or left it just now. Try again.")
    found = [Bundle(index=index, node=by_id[node]) for index, node in where.items()]
    if request.gpus:
        found = _with_gpus(request, group, found)
    return tuple(sorted(found, key=lambda b: (b.node.order, [_gpu_order(gpu) for gpu in b.gpus], b.index)))


def _with_gpus(request: PlacementRequest, group: PlacementGroup, bundles: Sequence[Bundle]) -> list[Bundle]:
    """Return the bundles with their field `gpus` filled in. A Ray task in each bundle finds out the GPUs. A node's
    tasks run one after another, because for tasks at the same time Ray would start a process for each.

    Raises:
        PlacementError: a node started no process in time, or was lost.
    """
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    tell = ray.remote(num_cpus=0, num_gpus=request.bundle["GPU"], max_calls=0)(
        lambda: [str(gpu) for gpu in ray.get_gpu_ids()]
    )
    waiting: dict[str, list[Bundle]] = {}
    for bundle in bundles:
        waiting.setdefault(bundle.node.id, []).append(bundle)
    found: list[Bundle] = []
    while asked := [queue.pop() for queue in waiting.values() if queue]:
        within = {bundle: PlacementGroupSchedulingStrategy(group, bundle.index) for bundle in asked}
        calls = {bundle: tell.options(scheduling_strategy=strategy).remote() for bundle, strategy in within.items()}
        for bundle, gpus in replies(calls, GPU_SECONDS):
            if isinstance(gpus, ray.exceptions.GetTimeoutError):
                raise PlacementError(
                    f"Node {bundle.node.name} started no process within {GPU_SECONDS:g} s to say which GPUs it gave. "
                    "Check it with `trlx-hybrid doctor --ray`."
                )
            if isinstance(gpus, ray.exceptions.RayError):
                told = f"{request.name}: node {bundle.node.name} was lost while it said which GPUs it gave: {gpus}"
                raise PlacementError(told) from gpus
            found.append(replace(bundle, gpus=tuple(sorted(gpus, key=_gpu_order))))
    return found


def _gpu_order(gpu: str) -> tuple[int, str]:
    """Return the key by which GPUs are sorted: numbers in numeric order, then UUIDs."""
    return (int(gpu), "") if gpu.isdecimal() else (1 << 62, gpu)


def _remove(group: PlacementGroup) -> None:
    from ray.util import remove_placement_group

    ask(functools.partial(remove_placement_group, group))


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user may have no name
        return str(os.getuid())


# --- what a launcher has reserved ------------------------------------------------------------------------------------

_taken: set[str] = set()  # names that this process has taken


def _set_aside(request: PlacementRequest) -> Placement:
    """Return the placement that the launcher of this run has reserved under the request's name. For the engines it is
    the whole reservation; for a reward or an environment, which every rank makes for itself, it is this rank's part.

    Raises:
        PlacementError: the launcher has reserved nothing or something else under this name, or another part of this
            process has taken the placement.
    """
    from ray import PlacementGroupID
    from ray.util.placement_group import PlacementGroup

    told = json.loads(os.environ[SET_ASIDE])
    where, entry = f"--placement {told['file']}", told["sets"].get(request.name)
    gpus, cpus = (f"{round(amount, 4):g}" for amount in (request.gpus, request.cpus))  # as Ray counts them
    size = f", size: {request.size}" if request.size > 1 else ""
    line = f"{request.name}: {{replicas: {request.replicas}{size}, gpus: {gpus}, cpus: {cpus}}}"
    if entry is None:
        names = listed([repr(name) for name in told["sets"]]) or "nothing"
        raise PlacementError(f"{where} sets aside {names}, and the run asks for {request.name!r}. Add `{line}`.")
    given, asked = entry["bundle"], request.bundle
    alike = all(abs(given.get(name, 0) - asked.get(name, 0)) < 2 * TOLERANCE for name in ("GPU", "CPU"))
    if entry["replicas"] != request.replicas or not alike:
        raise PlacementError(
            f"{where} sets aside {entry['replicas']} times {_of_bundle(given)} for {request.name!r}, and the run asks "
            f"for {request.replicas} times {_of_bundle(asked)}. Write `{line}`."
        )
    if request.name in _taken:
        raise PlacementError(
            f"Two parts of the run ask for what {where} sets aside for {request.name!r}. Give one of them another "
            "name=, or close() the first."
        )
    share = (int(os.environ.get("RANK", 0)) - told["first_rank"]) * request.replicas if entry["for_each_rank"] else 0
    bundles = tuple(
        Bundle(index=index, node=Node(**told["nodes"][node]), gpus=tuple(gpus))
        for index, node, gpus in entry["bundles"][share : share + request.replicas]
    )
    group = PlacementGroup(PlacementGroupID.from_hex(entry["group"]))
    _taken.add(request.name)
    return Placement(request=request, group=group, bundles=bundles, lent=True)


def _of_bundle(bundle: Mapping[str, float]) -> str:
    return _amounts(bundle.get("GPU", 0.0), bundle.get("CPU", 0.0))


# --- refusals -------------------------------------------------------------------------------------------------------


def _refusal(request: PlacementRequest, nodes: Sequence[Node], allowed: Sequence[Node], waited: float | None) -> str:
    """Return the message for a request that is refused: the reason, the way out, and a table of who holds which
    resources.

    Args:
        nodes: all nodes of the cluster, for the table.
        allowed: the nodes that the request may use.
        waited: the seconds that the request waited for the resources; None where it cannot fit even on empty nodes.
    """
    lines = [_reason(request, allowed, empty=waited is None)]
    holders = answer(_holders)
    table = [["node", "free GPUs", "free CPUs", "held by"]]
    for node in nodes:
        free = [f"{node.free_gpus:g} of {node.gpus:g}", f"{node.free_cpus:g} of {node.cpus:g}"]
        table.append([node.name, *free, "; ".join(_held(node, holders)) or "nobody"])
    widths = [max(len(row[column]) for row in table) for column in range(3)]
    lines += ["  " + "  ".join([*map(str.ljust, row[:3], widths), row[3]]) for row in table]
    if waited is not None:
        lines.append(f"Nothing changed within {waited:g} s.")
    return "\n".join(lines)


def _reason(request: PlacementRequest, nodes: Sequence[Node], *, empty: bool) -> str:
    if not nodes:
        return "The cluster has no nodes that are alive. Start one with `ray start`."
    asked = {name: amount * request.replicas for name, amount in request.bundle.items()}
    for name, total in asked.items():
        has = sum(node.gpus if name == "GPU" else node.cpus for node in nodes)
        free = sum(node.free_gpus if name == "GPU" else node.free_cpus for node in nodes)
        if total > has + TOLERANCE:
            return (
                f"{request.name}: {total:g} {name}s are asked for, the cluster has {has:g}. Ask for less, or add nodes."
            )
        if not empty and total > free + TOLERANCE:
            return (
                f"{request.name}: {total:g} {name}s are asked for, {free:g} of {has:g} are free. Ask for less, or end "
                "what holds the rest."
            )
    one = " and ".join(f"{amount:g} {name}s" for name, amount in request.bundle.items())
    how = f"strategy {request.strategy}" + (f", labels {dict(request.labels)}" if request.labels else "")
    return (
        f"{request.name}: {request.replicas} times {one}, each on one node ({how}): the cluster has enough in total, "
        "but its nodes do not. Make replicas smaller, relax the strategy, or end what shares the nodes."
    )


def _holders() -> Mapping[str, Mapping[str, Mapping[str, float]]]:
    """Return which resources are held, as amounts by node id, holder and resource (such as "GPU"). Holders are
    placement groups, and single actors if Ray's State API answers, which requires a dashboard."""
    from ray.util import placement_group_table
    from ray.util.state import list_actors

    held: defaultdict[str, defaultdict[str, Counter[str]]] = defaultdict(lambda: defaultdict(Counter))
    groups = placement_group_table()
    for group_id, group in groups.items():
        name = group["name"] or f"placement group {group_id[:8]} without a name"
        if group["state"] in ("CREATED", "RESCHEDULING"):
            for index, node in group["bundles_to_node_id"].items():
                held[node][name].update(group["bundles"][index])
    # It only improves a message, so its failure must not replace the message. Its timeout is per attempt.
    asked = in_thread(lambda: list_actors(filters=[("state", "=", "ALIVE")], detail=True, timeout=2), "asks for actors")
    wait([asked], HOLDERS_SECONDS)
    for actor in asked.result() if asked.done() and not asked.exception() else []:
        if actor.placement_group_id not in groups and actor.node_id:
            name = f"actor {actor.name or actor.class_name}, pid {actor.pid}"
            held[actor.node_id][name].update(actor.required_resources or {})
    return held


def _held(node: Node, holders: Mapping[str, Mapping[str, Mapping[str, float]]]) -> list[str]:
    """Return a text for each placement group or actor that holds GPUs or CPUs of a node, with the amounts. The texts
    are listed in the error message that says why workers could not be placed. If some amounts have no known holder, the
    last text gives these amounts.

    Args:
        node: the node.
        holders: the amounts that are held, by node id, name of the holder and resource, as `_holders` returns them.
    """
    lines = []
    gpus, cpus = node.gpus - node.free_gpus, node.cpus - node.free_cpus
    for name, held in sorted(holders.get(node.id, {}).items()):
        own = held.get("GPU", 0.0), held.get("CPU", 0.0)
        gpus, cpus = gpus - own[0], cpus - own[1]
        if any(own):
            lines.append(f"{name}: {_amounts(*own)}")
    if gpus > TOLERANCE or cpus > TOLERANCE:
        lines.append(f"unknown holder: {_amounts(gpus, cpus)}")
    return lines


def _amounts(gpus: float, cpus: float) -> str:
    named = ((gpus, "GPU"), (cpus, "CPU"))
    return ", ".join(f"{amount:g} {what}{'s' * (amount != 1)}" for amount, what in named if amount > TOLERANCE)
