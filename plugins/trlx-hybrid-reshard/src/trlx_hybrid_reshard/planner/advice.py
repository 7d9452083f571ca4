"""The training layout one would rather have: FSDP shards that lie inside the rank's rollout slice.

The means is `fully_shard(shard_placement_fn=...)`, which shards a weight along another dimension than the first, where
it divides. A permuted device mesh would bring a rank's rows into its TP slice as well, and is not advised: torch sorts
the ranks of process groups, so the run refuses such a mesh (`live.from_dtensor`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from trlx_hybrid.errors import ConfigError

from ..layouts import Layout, Model, Parameter
from ..plan import Placement, plan
from ..sharding import Ints, Sharding
from .architectures import describe


@dataclass(frozen=True, slots=True)
class Better:
    """A training layout, and what the worst rank moves with it.

    Attributes:
        name: what is done, for people.
        receives_bytes, sends_bytes: of the rank that receives, or sends, the most.
    """

    name: str
    layout: Layout
    receives_bytes: int
    sends_bytes: int


def alternatives(
    model: Model, train: Layout, rollout: Layout, *, ranks_per_node: int = 0, back: bool = False
) -> list[Better]:
    """The training layout as it is, and after it one that moves less and that a run takes, if there is one.

    Only a layout with FSDP and without pipeline stages of its own has anything to choose. Of many ranks a sample is
    planned, see `sample`.

    Args:
        back: measure the way from the rollout to the training layout.
    """

    def measured(name: str, layout: Layout) -> Better:
        ends = (rollout, layout) if back else (layout, rollout)
        moved = [_moved(model, *ends, rank, ranks_per_node) for rank in sample(train.world)]
        return Better(name, layout, max(received for received, _ in moved), max(sent for _, sent in moved))

    found = [measured("as is", train)]
    if train.fsdp == 1 or train.tp > 1 or train.pp > 1 or train.mesh is not None or train.shard_dims:
        return found
    candidate = measured("shard dimensions", replace(train, shard_dims=shard_dims(model, train, rollout)))
    if max(candidate.receives_bytes, candidate.sends_bytes) < max(found[0].receives_bytes, found[0].sends_bytes):
        found.append(candidate)
    return found


def shard_dims(model: Model, train: Layout, rollout: Layout) -> tuple[tuple[str, int], ...]:
    """For each parameter class the dimension whose shards leave the least to receive and send on the worst rank.

    FSDP2 shards dimensions other than the first only where they divide.
    """
    chosen: dict[object, int] = {}
    for p in model.parameters:
        if p.cut not in chosen:
            even = [d for d, size in enumerate(p.shape) if d == 0 or size % train.fsdp == 0]
            chosen[p.cut] = min(even, key=lambda d, p=p: _busiest(p, model, train, rollout, d))  # type: ignore[misc]
    return tuple((p.name, chosen[p.cut]) for p in model.parameters if chosen[p.cut])


def _busiest(parameter: Parameter, model: Model, train: Layout, rollout: Layout, dim: int) -> int:
    alone = replace(model, parameters=(parameter,))
    layout = replace(train, shard_dims=((parameter.name, dim),))
    return max(max(_moved(alone, layout, rollout, rank, 0)) for rank in sample(train.world))


def _moved(model: Model, source: Layout, target: Layout, rank: int, ranks_per_node: int) -> tuple[int, int]:
    made = plan(model, source, target, rank, ranks_per_node=ranks_per_node)
    return total(made.receives), total(made.sends)


def total(vector: Ints) -> int:
    """Bytes over all peers."""
    return int(vector.sum())


def sample(world: int, most: int = 64) -> Sequence[int]:
    """All ranks, or of many evenly spread ones with the first and the last."""
    return range(world) if world <= most else [int(r) for r in np.linspace(0, world - 1, most)]


# --- was remedies
"""What would make the syncs of a running job shorter, in words."""

HELPS = 0.8
"""Of the bytes as they are: what moves more than this of them is no remedy."""

ALWAYS = "More training per rollout makes it a smaller part; `trlx-hybrid reshard-plan` compares layouts."


def remedies(config: Any, train: Sharding, rollout: Sharding, itemsize: int) -> str:
    """Sentences for a user: what changes of the layouts would save, on the rank that receives the most.

    A permuted mesh is not among them, see `live.from_dtensor`.

    Args:
        config: of the transformers model.
        train, rollout: where one large parameter lies.
        itemsize: bytes per element on the wire.
    """
    shards, slices = _pieces(train), _pieces(rollout)
    try:
        model = describe(config, itemsize=itemsize)
        have = Layout(dp=train.world // shards, fsdp=shards)
        now = worst(model, have, _engines(slices, train.world))
        found = [(moved, what) for moved, what in _changes(model, have, slices) if moved < HELPS * now]
    except ConfigError:  # an architecture without a description, or a layout that none of ours is
        return ALWAYS
    said = [
        f"{what} would leave {moved / 1e9:.3g} GB to receive on the worst rank, instead of {now / 1e9:.3g} GB."
        for moved, what in sorted(found)[:2]
    ]
    return " ".join([*said, ALWAYS])


def worst(model: Model, train: Placement, rollout: Placement) -> int:
    """Bytes that the busiest rank receives; of many ranks a sample is planned."""
    return max(total(plan(model, train, rollout, rank).receives) for rank in sample(train.world))


def _changes(model: Model, train: Layout, tp: int) -> Iterator[tuple[int, str]]:
    world = train.world
    dims = shard_dims(model, train, _engines(tp, world))
    if dims:
        names = ", ".join(sorted({name.split(".")[-2] for name, _ in dims}))
        what = f"Sharding {names} along the dimension that the engine slices (`fully_shard`'s `shard_placement_fn`)"
        yield worst(model, replace(train, shard_dims=dims), _engines(tp, world)), what
    for wider in range(2 * tp, world + 1, tp):
        if world % wider == 0:
            try:
                yield worst(model, train, _engines(wider, world)), f"An engine of tp={wider}"
            except ConfigError:  # which does not divide the model
                continue


def _engines(tp: int, world: int) -> Layout:
    return Layout(tp=tp).over(world).served()


def _pieces(sharding: Sharding) -> int:
    """How many different ones there are."""
    found = sharding.pieces()
    return len(np.unique(found[found >= 0]))
