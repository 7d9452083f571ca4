"""The file of `trlx-hybrid launch --placement FILE`: a YAML mapping that says on which nodes and with which resources
ranks, engines, rewards and environments run.

The launcher reserves all resources before anything starts, prints where they are, and tells the ranks in an environment
variable which resources are reserved for engines, rewards and environments. `placement.reserve` in a rank then returns
one of these reservations instead of making its own.

```yaml
trainer: {replicas: 2, size: 8, gpus: 1}                 # two nodes of eight ranks
engine: {replicas: 4, gpus: 2, cpus: 2, nodes: [10.0.0.3]}
reward judge: {gpus: 0.5, nodes: [10.0.0.3]}             # of each rank
environment Sandbox: {replicas: 8, strategy: spread}
```
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from trlx_hybrid.config import check_keys
from trlx_hybrid.errors import ConfigError

from .placement import Placement, PlacementRequest

TRAINER = "trainer"
ENGINE = "engine"
"""The key of the engines' entry in the file. Rank 0 requests the engines' resources once for all ranks; every other
entry is requested by each rank for itself."""


def read(path: str) -> dict[str, PlacementRequest]:
    """Read a placement file, and return a request for resources for each of its entries, by the entry's name: "trainer"
    for the ranks, "engine", "reward NAME" or "environment NAME".

    Raises:
        ConfigError: the file is no mapping of names to settings of `PlacementRequest`, or the trainer's entry is
            incomplete.
    """
    entries = _parsed(path)
    if not isinstance(entries, dict) or not all(isinstance(entry, dict) for entry in entries.values()):
        raise ConfigError(f"--placement {path}: write a line for each part of the run, as `engine: {{gpus: 2}}`.")
    if TRAINER not in entries or "gpus" not in entries[TRAINER]:
        raise ConfigError(
            f"--placement {path}: say how many ranks a node has, and whether they have GPUs, as `trainer: {{size: 8, "
            "gpus: 1}`."
        )
    found = {str(name): _request(str(name), entry, path) for name, entry in entries.items()}
    trainer = found[TRAINER]
    if "rank" in found:
        raise ConfigError(f"--placement {path}: the ranks are called {TRAINER} here. Leave `rank` out.")
    for wrong, why in (
        (trainer.gpus not in (0, 1), f"gpus={trainer.gpus:g}: a rank has one GPU, or none"),
        (trainer.cpus == 0, "cpus=0: a rank takes some"),
        ("strategy" in entries[TRAINER], "no strategy: each of its replicas is a node"),
    ):
        if wrong:
            raise ConfigError(f"--placement {path}: trainer: {why}.")
    return found


def _parsed(path: str) -> Any:
    import yaml  # type: ignore[import-untyped]

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        """A YAML loader that refuses duplicate keys, of which YAML's own loader would keep the last."""

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            keys = [key.value for key, _ in node.value]
            for key in keys:
                if keys.count(key) > 1:
                    raise ConfigError(f"--placement {path}: {key} is there twice.")
            return super().construct_mapping(node, deep)

    try:
        return yaml.load(Path(path).read_text(), Loader)
    except OSError as error:
        raise ConfigError(f"--placement {path}: {error.strerror}.") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"--placement {path}: {error}") from error


def _request(name: str, entry: dict[str, Any], path: str) -> PlacementRequest:
    where = f"--placement {path}: {name}"
    check_keys(entry, list(SETTINGS), where)
    for key, value in entry.items():
        kinds, what = SETTINGS[key]
        if not isinstance(value, kinds) or isinstance(value, bool):
            raise ConfigError(f"{where}: {key}={value!r} is not {what}.")
    nodes = entry.get("nodes", [])
    named = [nodes] if isinstance(nodes, str) else [str(node) for node in nodes]
    return PlacementRequest(**{**entry, "name": name, "nodes": named})


SETTINGS: dict[str, tuple[tuple[type, ...], str]] = {
    **dict.fromkeys(("replicas", "size"), ((int,), "a number of them")),
    **dict.fromkeys(("gpus", "cpus"), ((int, float), "a number of them")),
    "strategy": ((str,), "one of Ray's strategies"),
    "nodes": ((str, list), "a node, or a list of nodes"),
    "labels": ((dict,), "a mapping of labels"),
}
"""The settings that an entry of the file may have, by name: for each, the types that its value may have, and a
description of the value for error messages."""


def of_all_ranks(requests: Mapping[str, PlacementRequest], world: int) -> list[PlacementRequest]:
    """Return the requests that the launcher has to reserve in addition to the ranks' own resources. The engines'
    request is returned as it is; every other request is multiplied by the number of ranks, since each rank makes its
    own rewards and environments.

    Args:
        requests: the requests in the placement file, by name, from `read`.
        world: the number of ranks.
    """
    return [
        replace(request, replicas=request.replicas * _shares(name, world))
        for name, request in requests.items()
        if name != TRAINER
    ]


def in_order(requests: Sequence[PlacementRequest]) -> list[PlacementRequest]:
    """Sort requests into the order in which they should be reserved, so that all find room. Requests that name nodes or
    labels come before those that may use any node, and large bundles before small ones, which fit into what is left."""
    return sorted(requests, key=lambda r: (not (r.nodes or r.labels), -r.gpus * r.size, -r.cpus * r.size))


def told(placements: Sequence[Placement], world: int, ranks: range, path: str) -> str:
    """Return, as JSON for an environment variable, the reservations of engines, rewards and environments that the ranks
    of one node may use. In a rank, `placement.reserve` reads the variable, and returns one of these reservations
    instead of making its own. There is one text per node, because the reservations for all ranks could exceed the 128
    KiB that a variable can hold.

    Args:
        placements: what the launcher has reserved for engines, rewards and environments.
        world: the number of ranks of the run.
        ranks: the ranks on this node.
        path: the placement file, for messages.
    """
    nodes: dict[str, object] = {}
    sets: dict[str, object] = {}
    for placement in placements:
        request = placement.request
        shares = _shares(request.name, world)
        each = request.replicas // shares
        own = placement.bundles if shares == 1 else placement.bundles[each * ranks.start : each * ranks.stop]
        nodes |= {bundle.node.id: asdict(bundle.node) for bundle in own}
        sets[request.name] = {
            "group": placement.group.id.hex(),
            "for_each_rank": shares > 1,
            "replicas": each,
            "bundle": request.bundle,
            "bundles": [[bundle.index, bundle.node.id, bundle.gpus] for bundle in own],
        }
    return json.dumps({"file": path, "first_rank": ranks.start, "nodes": nodes, "sets": sets})


def _shares(name: str, world: int) -> int:
    return 1 if name == ENGINE else world
