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

import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from trlx_hybrid.config import build, check_keys
from trlx_hybrid.errors import ConfigError

from .cluster import answer
from .placement import Placement, PlacementRequest

TRAINER = "trainer"
ENGINE = "engine"
"""What rank 0 asks for, for all ranks. Everything else each rank has of its own."""


def read(path: str) -> dict[str, PlacementRequest]:
    """The requests in a file, by name.

    Raises:
        ConfigError: it is no mapping of names to settings of `PlacementRequest`, or says nothing of the trainer.
    """
    import yaml  # type: ignore[import-untyped]

    try:
        entries = yaml.safe_load(Path(path).read_text())
    except OSError as error:
        raise ConfigError(f"--placement {path}: {error.strerror}.") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"--placement {path}: {error}") from error
    if not isinstance(entries, dict) or not all(isinstance(entry, dict) for entry in entries.values()):
        raise ConfigError(f"--placement {path}: write a line for each part of the run, as `engine: {{gpus: 2}}`.")
    if TRAINER not in entries:
        raise ConfigError(f"--placement {path}: nothing is said of the ranks. Add `trainer: {{size: 8, gpus: 1}}`.")
    known = [field.name for field in dataclasses.fields(PlacementRequest) if field.name != "name"]
    for name, entry in entries.items():
        check_keys(entry, known, f"{path}: {name}")
    found = {str(name): build(PlacementRequest, {**entry, "name": str(name)}, path) for name, entry in entries.items()}
    if found[TRAINER].gpus not in (0, 1):
        raise ConfigError(f"{path}: trainer: gpus={found[TRAINER].gpus:g}: a rank has one GPU, or none.")
    return found


def of_all_ranks(requests: Mapping[str, PlacementRequest], world: int) -> list[PlacementRequest]:
    """What is reserved beside the ranks: once for the engine, for each of `world` ranks for everything else."""
    return [
        replace(request, replicas=request.replicas * _shares(name, world))
        for name, request in requests.items()
        if name != TRAINER
    ]


def told(placements: Sequence[Placement], world: int, path: str) -> str:
    """What ranks find in their environment, as JSON."""
    from ray.util import placement_group_table

    sets = {}
    for placement in placements:
        request = placement.request
        sets[request.name] = {
            "group": answer(functools.partial(placement_group_table, placement.group))["name"],
            "replicas": request.replicas // _shares(request.name, world),
            "bundle": request.bundle,
            "bundles": [asdict(bundle) for bundle in placement.bundles],
        }
    return json.dumps({"file": path, "sets": sets})


def _shares(name: str, world: int) -> int:
    return 1 if name == ENGINE else world
