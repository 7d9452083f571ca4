"""`trlx-hybrid launch --placement FILE`: where everything of a run goes, in one YAML block.

The launcher reserves all of it before anything starts, shows the map, and tells the ranks what is set aside for them.
What a rank then asks for, `reserve` takes from there.

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
"""What rank 0 asks for, for all ranks. Everything else each rank has of its own."""


def read(path: str) -> dict[str, PlacementRequest]:
    """The requests in a file, by name.

    Raises:
        ConfigError: it is no mapping of names to settings of `PlacementRequest`, or says too little of the trainer.
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
        """Refuses a key that is there twice, of which YAML's would keep the last."""

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
"""Of a part, with the types that they have in YAML."""


def of_all_ranks(requests: Mapping[str, PlacementRequest], world: int) -> list[PlacementRequest]:
    """What is reserved beside the ranks: once for the engine, for each of `world` ranks for everything else."""
    return [
        replace(request, replicas=request.replicas * _shares(name, world))
        for name, request in requests.items()
        if name != TRAINER
    ]


def in_order(requests: Sequence[PlacementRequest]) -> list[PlacementRequest]:
    """As they are reserved: what may only be on some nodes before what finds room on any, and large bundles before
    small ones, which find room between them."""
    return sorted(requests, key=lambda r: (not (r.nodes or r.labels), -r.gpus * r.size, -r.cpus * r.size))


def told(placements: Sequence[Placement], world: int, ranks: range, path: str) -> str:
    """What the ranks of a node find in their environment, as JSON: what is set aside for them. That of all ranks could
    be more than a variable can hold, which is 128 KiB."""
    nodes: dict[str, Any] = {}
    sets: dict[str, Any] = {}
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
