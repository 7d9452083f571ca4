"""What would make the syncs of a running job shorter, in words."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from trlx_hybrid.errors import ConfigError

from .advice import sample, shard_dims, total
from .architecture import describe
from .layout import Layout
from .parameter import Model
from .plan import Placement, plan
from .sharding import Sharding

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
