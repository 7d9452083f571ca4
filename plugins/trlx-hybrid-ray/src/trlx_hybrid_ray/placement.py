"""Where every worker of a run goes: role and rank to node, placement group, bundle and GPU. Plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from trlx_hybrid.errors import ConfigError

from .errors import PlacementError
from .node import Node
from .role import Role


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """What is reserved on one node, for one worker or for those that share it.

    Attributes:
        node: its id.
        gpu_ids: as `CUDA_VISIBLE_DEVICES` on that node has them; empty until Ray gave them, and without GPUs.
    """

    node: str
    cpus: float
    gpus: float
    gpu_ids: tuple[str, ...] = ()

    @property
    def resources(self) -> dict[str, float]:
        """As Ray takes them."""
        return {name: amount for name, amount in (("CPU", self.cpus), ("GPU", self.gpus)) if amount}


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """One worker's place.

    Attributes:
        rank: among the role's workers.
        replica, local: rank = replica * size + local.
        group, bundle: indices into `Placement.groups` and its bundles.
        cpus, gpus: what Ray is told that it takes: of a GPU with several tenants, a share.
        gpu_ids: the bundle's; shared with the bundle's other tenants.
    """

    role: str
    rank: int
    replica: int
    local: int
    node: str
    address: str
    group: int
    bundle: int
    cpus: float
    gpus: float
    gpu_ids: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlace:
    """What vLLM's Ray executor needs to run one replica where it was placed.

    Attributes:
        group: index into `Placement.groups`.
        bundles: of its workers, in rank order. The actor that builds the engine goes into the first of them, or vLLM
            finds no GPU on its driver's node.
        environment: for that actor.
    """

    group: int
    bundles: tuple[int, ...]
    environment: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """A place for every worker.

    Attributes:
        nodes: the cluster's, in order.
        groups: bundles by placement group: one group per node, and one for each replica that spans nodes.
        slots: by role, in the order asked for, then by rank.
    """

    nodes: tuple[Node, ...]
    roles: tuple[Role, ...]
    groups: tuple[tuple[Bundle, ...], ...]
    slots: tuple[Slot, ...]

    def of(self, role: str) -> tuple[Slot, ...]:
        """A role's slots by rank.

        Raises:
            ConfigError: there is no such role.
        """
        found = tuple(slot for slot in self.slots if slot.role == role)
        if not found:
            raise ConfigError(f"No role {role!r} was placed. Roles: {', '.join(r.name for r in self.roles)}.")
        return found

    def engine(self, role: str, replica: int) -> EnginePlace:
        """One replica's bundles, for vLLM's Ray executor.

        Raises:
            ConfigError: there is no such replica.
            PlacementError: its bundles are in several placement groups, and vLLM takes one.
        """
        workers = [slot for slot in self.of(role) if slot.replica == replica]
        if not workers:
            raise ConfigError(f"Role {role!r} has no replica {replica}.")
        if len({slot.group for slot in workers}) > 1:
            raise PlacementError(
                f"Replica {replica} of {role!r} shares bundles of several nodes' placement groups, and vLLM's Ray "
                "executor takes a single one. Leave out colocate_with or may_span_nodes, or build it with vLLM's "
                "external_launcher."
            )
        bundles = tuple(slot.bundle for slot in workers)
        return EnginePlace(
            group=workers[0].group,
            bundles=bundles,
            environment={
                "VLLM_RAY_BUNDLE_INDICES": ",".join(map(str, bundles)),
                "VLLM_RAY_PER_WORKER_GPUS": f"{workers[0].gpus:g}",
            },
        )

    def settled(self, gpu_ids: Sequence[Sequence[Sequence[str]]]) -> Placement:
        """The same with the GPUs that Ray gave each bundle, ranks in the order of GPU ids within a node.

        Ray chooses GPUs when it commits a bundle, in no promised order. Bundles that reserve the same on the same node
        are interchangeable until somebody lives in them, so here they are dealt out again, smallest GPU id first.

        Args:
            gpu_ids: by group and bundle.

        Raises:
            PlacementError: a bundle was given another number of GPUs than it reserves, or two the same one.
        """
        groups = tuple(
            tuple(replace(bundle, gpu_ids=tuple(sorted(ids, key=gpu_order))) for bundle, ids in zip(group, given))
            for group, given in zip(self.groups, gpu_ids, strict=True)
        )
        _check_gpus(groups)
        moved: dict[tuple[int, int], int] = {}
        for number, group in enumerate(groups):
            order = [[gpu_order(gpu_id) for gpu_id in bundle.gpu_ids] for bundle in group]
            alike: dict[tuple[str, float, float], list[int]] = {}
            for index, bundle in enumerate(group):
                alike.setdefault((bundle.node, bundle.cpus, bundle.gpus), []).append(index)
            for indices in alike.values():
                moved |= {(number, planned): i for planned, i in zip(indices, sorted(indices, key=order.__getitem__))}
        slots = tuple(
            replace(slot, bundle=index, gpu_ids=groups[slot.group][index].gpu_ids)
            for slot in self.slots
            for index in [moved[slot.group, slot.bundle]]
        )
        return replace(self, groups=groups, slots=slots)


def gpu_order(gpu_id: str) -> tuple[int, str]:
    """What GPU ids are sorted by: numbers as numbers; UUIDs after them, by their letters."""
    return (int(gpu_id), "") if gpu_id.isdecimal() else (1 << 62, gpu_id)


def _check_gpus(groups: Sequence[Sequence[Bundle]]) -> None:
    held: set[tuple[str, str]] = set()
    for number, group in enumerate(groups):
        for index, bundle in enumerate(group):
            wanted = -int(-bundle.gpus // 1)
            if len(bundle.gpu_ids) != wanted:
                raise PlacementError(
                    f"Bundle {index} of placement group {number} reserves {bundle.gpus:g} GPUs, and Ray gave it "
                    f"{list(bundle.gpu_ids)}. Check that every node was started with the GPUs it has."
                )
            whole = {(bundle.node, gpu_id) for gpu_id in bundle.gpu_ids if bundle.gpus >= 1}
            if held & whole:
                node, gpu_id = min(held & whole)
                raise PlacementError(f"Ray gave GPU {gpu_id} of node {node[:6]} to two bundles. Restart the cluster.")
            held |= whole
