"""Where bundles really are: on which node, and with which GPUs. Ray is asked, not trusted."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING

from .errors import PlacementError
from .placement import Placement

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

TELL_SECONDS = 120.0
"""For the first process on a busy node, which imports Ray; each bundle after it takes milliseconds."""


def check_nodes(placement: Placement, groups: Sequence[PlacementGroup]) -> None:
    """Refuse groups whose bundles are not where they were planned.

    Raises:
        PlacementError: names the bundle.
    """
    from ray.util import placement_group_table

    for number, (group, bundles) in enumerate(zip(groups, placement.groups)):
        landed = placement_group_table(group)["bundles_to_node_id"]
        for index, bundle in enumerate(bundles):
            if landed[index] != bundle.node:
                raise PlacementError(
                    f"Ray put bundle {index} of placement group {number} on node {landed[index][:6]} instead of "
                    f"{bundle.node[:6]}. Check that all nodes run the same Ray: `trlx-hybrid doctor --ray`."
                )


def gpu_ids(placement: Placement, groups: Sequence[PlacementGroup]) -> list[list[list[str]]]:
    """The GPUs of each bundle, by group and bundle. Only a task that runs in a bundle can tell.

    One after another within a group: asked all at once, Ray starts a process for every bundle.

    Raises:
        PlacementError: a node starts no process.
    """
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    tell = ray.remote(num_cpus=0, max_calls=0)(_own_gpus)
    found: list[list[list[str]]] = [[[] for _ in bundles] for bundles in placement.groups]
    queues = [
        [(number, index, bundle) for index, bundle in enumerate(bundles) if bundle.gpus]
        for number, bundles in enumerate(placement.groups)
    ]
    for asked in zip_longest(*queues):
        now = [entry for entry in asked if entry is not None]
        where = [PlacementGroupSchedulingStrategy(groups[number], index) for number, index, _ in now]
        answers = [
            tell.options(num_gpus=bundle.gpus, scheduling_strategy=there).remote()
            for (_, _, bundle), there in zip(now, where)
        ]
        _, late = ray.wait(answers, num_returns=len(answers), timeout=TELL_SECONDS)
        if late:
            slow = sorted({now[answers.index(reference)][2].node[:6] for reference in late})
            raise PlacementError(
                f"Node {', '.join(slow)} started no process within {TELL_SECONDS:g} s to say which GPUs it gave. Check "
                "it with `trlx-hybrid doctor --ray`."
            )
        for (number, index, _), ids in zip(now, ray.get(answers)):
            found[number][index] = ids
    return found


def _own_gpus() -> list[str]:
    import ray

    return [str(gpu) for gpu in ray.get_gpu_ids()]
