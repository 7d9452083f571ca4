"""The layouts one would rather have, and what they would save.

The training layout: FSDP shards that lie inside the rank's rollout slice. The means is
`fully_shard(shard_placement_fn=...)`, which shards a weight along another dimension than the first, where it divides. A
permuted device mesh would bring a rank's rows into its TP slice as well, and is not advised: torch sorts the ranks of
process groups, so the run refuses such a mesh (`live.from_dtensor`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from trlx_hybrid.errors import ConfigError

from ..layouts import MeshLayout, Model, Parameter
from ..plan import plan
from ..sharding import Sharding
from .architectures import describe

SAMPLE = 64
"""Of many ranks, so many are planned."""
HELPS = 0.8
"""Of the bytes as they are: a running job is not told of what moves more than this of them."""
ALWAYS = "More training per rollout makes it a smaller part; `trlx-hybrid reshard-plan` compares layouts."


@dataclass(frozen=True, slots=True)
class Better:
    """A training layout, and what the worst rank moves with it.

    Attributes:
        name: what is done, for people.
        receives_bytes, sends_bytes: of the rank that receives, or sends, the most.
    """

    name: str
    layout: MeshLayout
    receives_bytes: int
    sends_bytes: int


def alternatives(
    model: Model, train: MeshLayout, rollout: MeshLayout, *, ranks_per_node: int = 0, back: bool = False
) -> list[Better]:
    """The training layout as it is, and after it one that moves less and that a run takes, if there is one.

    Only a layout with FSDP and without pipeline stages of its own has anything to choose.

    Args:
        back: measure the way from the rollout to the training layout.
    """

    def measured(name: str, layout: MeshLayout) -> Better:
        ends = (rollout, layout) if back else (layout, rollout)
        return Better(name, layout, *_worst(model, *ends, ranks_per_node))

    found = [measured("as is", train)]
    if train.fsdp == 1 or train.tp > 1 or train.pp > 1 or train.mesh is not None or train.shard_dims:
        return found
    candidate = measured("shard dimensions", replace(train, shard_dims=shard_dims(model, train, rollout)))
    if max(candidate.receives_bytes, candidate.sends_bytes) < max(found[0].receives_bytes, found[0].sends_bytes):
        found.append(candidate)
    return found


def shard_dims(model: Model, train: MeshLayout, rollout: MeshLayout) -> tuple[tuple[str, int], ...]:
    """For each parameter class the dimension whose shards leave the least to receive and send on the worst rank.

    FSDP2 shards dimensions other than the first only where they divide.
    """

    def worst(parameter: Parameter, dim: int) -> int:
        layout = replace(train, shard_dims=((parameter.name, dim),))
        return max(_worst(replace(model, parameters=(parameter,)), layout, rollout))

    chosen: dict[object, int] = {}
    for p in model.parameters:
        if p.cut not in chosen:
            even = [d for d, size in enumerate(p.shape) if d == 0 or size % train.fsdp == 0]
            chosen[p.cut] = min(even, key=lambda d, p=p: worst(p, d))  # type: ignore[misc]
    return tuple((p.name, chosen[p.cut]) for p in model.parameters if chosen[p.cut])


def advice_for_run(config: Any, train: Sharding, rollout: Sharding, itemsize: int) -> str:
    """Sentences for a user: what changes of the layouts would save, on the rank that receives the most.

    Args:
        config: of the transformers model.
        train, rollout: where one large parameter lies.
        itemsize: bytes per element on the wire.
    """
    try:
        model = describe(config, itemsize=itemsize)
        shards, slices = _pieces(train), _pieces(rollout)
        have = MeshLayout(dp=train.world // shards, fsdp=shards)
        now, _ = _worst(model, have, _engines(slices, train.world))
        found = [(moved, what) for moved, what in _changes(model, have, slices) if moved < HELPS * now]
    except ConfigError:  # an architecture without a description, or a layout that none of ours is
        return ALWAYS
    said = [
        f"{what} would leave {moved / 1e9:.3g} GB to receive on the worst rank, instead of {now / 1e9:.3g} GB."
        for moved, what in sorted(found)[:2]
    ]
    return " ".join([*said, ALWAYS])


def _changes(model: Model, train: MeshLayout, tp: int) -> Iterator[tuple[int, str]]:
    """What each change leaves to receive on the worst rank."""
    world = train.world
    dims = shard_dims(model, train, _engines(tp, world))
    if dims:
        names = ", ".join(sorted({name.split(".")[-2] for name, _ in dims}))
        what = f"Sharding {names} along the dimension that the engine slices (`fully_shard`'s `shard_placement_fn`)"
        yield _worst(model, replace(train, shard_dims=dims), _engines(tp, world))[0], what
    for wider in range(2 * tp, world + 1, tp):
        if world % wider == 0:
            try:
                yield _worst(model, train, _engines(wider, world))[0], f"An engine of tp={wider}"
            except ConfigError:  # which does not divide the model
                continue


def _worst(model: Model, source: MeshLayout, target: MeshLayout, ranks_per_node: int = 0) -> tuple[int, int]:
    """Bytes of the rank that receives the most, and of the one that sends the most; of many ranks, of a sample."""
    world = source.world
    ranks: Sequence[int] = range(world)
    if world > SAMPLE:
        ranks = [int(r) for r in np.linspace(0, world - 1, SAMPLE)]  # the first and the last among them
    made = [plan(model, source, target, rank, ranks_per_node=ranks_per_node) for rank in ranks]
    return max(int(one.receives.sum()) for one in made), max(int(one.sends.sum()) for one in made)


def _engines(tp: int, world: int) -> MeshLayout:
    return MeshLayout(tp=tp).over(world).served()


def _pieces(sharding: Sharding) -> int:
    """How many different ones there are."""
    found = sharding.pieces()
    return len(np.unique(found[found >= 0]))
