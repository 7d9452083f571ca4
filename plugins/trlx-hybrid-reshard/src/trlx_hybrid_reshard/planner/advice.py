"""The layouts one would rather have, and what they would save.

The training layout: FSDP shards that lie inside the rank's rollout slice. The means is
`fully_shard(shard_placement_fn=...)`, which shards a weight along another dimension than the first, where it divides. A
permuted device mesh would bring a rank's rows into its TP slice as well, and is not advised: torch sorts the ranks of
process groups, so the run refuses such a mesh (`live.from_dtensor`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
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
        shard_dims: as in `MeshLayout`.
        receives_bytes, sends_bytes: of the rank that receives, or sends, the most.
    """

    name: str
    shard_dims: tuple[tuple[str, int], ...]
    receives_bytes: int
    sends_bytes: int


def alternatives(
    model: Model, train: MeshLayout, rollout: MeshLayout, *, ranks_per_node: int = 0, back: bool = False
) -> list[Better]:
    """The training layout as it is, and after it one that moves less and that a run takes, if there is one.

    Only a layout with FSDP and without other parallelism of its own has anything to choose.

    Args:
        back: measure the way from the rollout to the training layout.
    """

    def measured(name: str, dims: tuple[tuple[str, int], ...]) -> Better:
        layout = replace(train, shard_dims=dims)
        ends = (rollout, layout) if back else (layout, rollout)
        return Better(name, dims, *_worst(model, *ends, ranks_per_node))

    now = measured("as is", ())
    if train.fsdp == 1 or train.tp > 1 or train.pp > 1:
        return [now]
    other = measured("shard dimensions", shard_dims(model, train, rollout))
    less = max(other.receives_bytes, other.sends_bytes) < max(now.receives_bytes, now.sends_bytes)
    return [now, other] if less else [now]


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
        now, *others = alternatives(model, have, _engines(slices, train.world))
        found = [(better.receives_bytes, _sharding(better)) for better in others]
        found += [(moved, f"An engine of tp={tp}") for moved, tp in _wider(model, have, slices)]
    except ConfigError:  # an architecture without a description, or a layout that none of ours is
        return ALWAYS
    said = [
        f"{what} would leave the rank that receives the most {moved / 1e9:.3g} GB, instead of "
        f"{now.receives_bytes / 1e9:.3g} GB."
        for moved, what in sorted(found)[:2]
        if moved < HELPS * now.receives_bytes
    ]
    return " ".join([*said, ALWAYS])


def _sharding(better: Better) -> str:
    names = ", ".join(sorted({name.split(".")[-2] for name, _ in better.shard_dims}))
    return f"Sharding {names} along the dimension that the engine slices (`fully_shard`'s `shard_placement_fn`)"


def _wider(model: Model, train: MeshLayout, tp: int) -> Iterator[tuple[int, int]]:
    """Engines with more tensor parallelism: what the worst rank would receive, and the size."""
    for wider in range(2 * tp, train.world + 1, tp):
        if train.world % wider == 0:
            with suppress(ConfigError):  # which does not divide the model
                yield _worst(model, train, _engines(wider, train.world))[0], wider


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
