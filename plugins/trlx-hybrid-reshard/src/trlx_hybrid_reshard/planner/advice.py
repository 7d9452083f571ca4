"""Advice on layouts with which a weight sync would move fewer bytes, with the number of bytes that each layout would
save. A layout says which part of each parameter each rank holds.

In the best training layout, a rank's FSDP shards lie inside its engine's slice. `fully_shard(shard_placement_fn=...)`
can make such a layout: it shards a weight along another dimension than the first, if `fsdp` divides that dimension. A
permuted device mesh would bring a rank's rows into its TP slice as well. It is not advised: torch sorts the ranks of
process groups, so a run refuses such a mesh (`layouts.from_dtensor`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from trlx_hybrid.errors import ConfigError

from ..layouts import MeshLayout, Model, Parameter
from ..plan import plan
from ..sharding import Sharding
from .architectures import describe

if TYPE_CHECKING:
    from transformers import PretrainedConfig

SAMPLE = 64
"""The largest number of ranks for which a plan is made. If there are more ranks, a sample of this size stands for
all."""
HELPS = 0.8
"""The largest fraction of the bytes of a sync now that a sync with another layout may move, for a run to advise that
layout."""
ALWAYS = "More training per rollout makes it a smaller part; `trlx-hybrid reshard-plan` compares layouts."
"""The last sentence of the advice that a run prints, which holds for every layout."""


@dataclass(frozen=True, slots=True)
class Better:
    """A training layout, and the bytes that a weight sync moves with it on the rank that moves the most.

    Attributes:
        name: what is changed in the layout, for output.
        shard_dims: pairs of a parameter's name and the dimension along which FSDP shards it, as in `MeshLayout`.
        receives_bytes, sends_bytes: the bytes of the rank that receives, or sends, the most.
    """

    name: str
    shard_dims: tuple[tuple[str, int], ...]
    receives_bytes: int
    sends_bytes: int


def alternatives(
    model: Model, train: MeshLayout, rollout: MeshLayout, *, ranks_per_node: int = 0, back: bool = False
) -> list[Better]:
    """Return the training layout as it is, followed by a layout with which a sync moves fewer bytes and that a run
    accepts, if there is one.

    Another layout is looked for only if the training layout has FSDP, and neither tensor nor pipeline parallelism.

    Args:
        model: the parameters to move.
        train: the training layout.
        rollout: the layout of the engines.
        ranks_per_node: the number of consecutive ranks that share a node; 0 for a single node.
        back: whether to count the bytes that move in the other direction, from the rollout layout to the training
            layout.
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
    """Choose for each parameter the dimension along which FSDP should shard it, so that the worst rank receives and
    sends least.

    FSDP2 shards dimensions other than the first only if `fsdp` divides them.

    Returns:
        Pairs of a parameter's name and its dimension; parameters that stay on dimension 0 are left out.
    """

    def worst(parameter: Parameter, dim: int) -> int:
        layout = replace(train, shard_dims=((parameter.name, dim),))
        return max(_worst(replace(model, parameters=(parameter,)), layout, rollout))

    chosen: dict[object, int] = {}
    for p in model.parameters:
        if p.cut not in chosen:
            even = [d for d, size in enumerate(p.shape) if d == 0 or size % train.fsdp == 0]
            chosen[p.cut] = min(even, key=functools.partial(worst, p))
    return tuple((p.name, chosen[p.cut]) for p in model.parameters if chosen[p.cut])


def advice_for_run(config: PretrainedConfig, train: Sharding, rollout: Sharding, itemsize: int) -> str:
    """Return sentences for the user on how many bytes other layouts would save in a weight sync, on the rank that
    receives the most.

    Args:
        config: the transformers config of the model.
        train, rollout: the sharding of the model's largest parameter in the trainer and in the engines. All other
            parameters are assumed to be sharded alike.
        itemsize: bytes per element as it is sent.
    """
    try:
        model = describe(config, itemsize=itemsize)
        shards, slices = _pieces(train), _pieces(rollout)
        have = MeshLayout(dp=train.world // shards, fsdp=shards)
        now, *others = alternatives(model, have, _engines(slices, train.world))
        found = [(better.receives_bytes, _sharding(better)) for better in others]
        found += [(moved, f"An engine of tp={tp}") for moved, tp in _wider(model, have, slices)]
    except ConfigError:  # an unknown architecture, or a layout that no MeshLayout describes
        return ALWAYS
    said = [
        f"{what} would leave the rank that receives the most {moved / 1e9:.3g} GB, instead of "
        f"{now.receives_bytes / 1e9:.3g} GB."
        for moved, what in sorted(found)[:2]
        if moved < HELPS * now.receives_bytes
    ]
    return " ".join([*said, ALWAYS])


def _sharding(better: Better) -> str:
    """Return the beginning of a sentence of advice, such as "Sharding down_proj, o_proj along the dimension that the
    engine slices", to which the caller adds what that would save.

    Args:
        better: a training layout that shards some parameters along other dimensions; their modules are named.
    """
    names = ", ".join(sorted({name.split(".")[-2] for name, _ in better.shard_dims}))
    return f"Sharding {names} along the dimension that the engine slices (`fully_shard`'s `shard_placement_fn`)"


def _wider(model: Model, train: MeshLayout, tp: int) -> Iterator[tuple[int, int]]:
    """Yield a pair for each larger tensor-parallel size of the engines that divides the ranks and the model: the bytes
    that a sync would send to the rank which receives the most, and the size. The caller suggests a size with less
    traffic.

    Args:
        model: the parameters to move.
        train: the training layout.
        tp: the engines' tensor-parallel size now.
    """
    for wider in range(2 * tp, train.world + 1, tp):
        if train.world % wider == 0:
            with suppress(ConfigError):  # a size that does not divide the model
                yield _worst(model, train, _engines(wider, train.world))[0], wider


def _worst(model: Model, source: MeshLayout, target: MeshLayout, ranks_per_node: int = 0) -> tuple[int, int]:
    """Return the bytes of the rank that receives the most, and the bytes of the rank that sends the most, in a sync
    from one layout to another. If there are many ranks, only a sample of `SAMPLE` ranks is planned.

    Args:
        model: the parameters to move.
        source, target: the layouts before and after.
        ranks_per_node: the number of consecutive ranks that share a node; 0 for a single node.
    """
    world = source.world
    ranks: Sequence[int] = range(world)
    if world > SAMPLE:
        ranks = [int(r) for r in np.linspace(0, world - 1, SAMPLE)]  # the first and the last among them
    made = [plan(model, source, target, rank, ranks_per_node=ranks_per_node) for rank in ranks]
    return max(int(one.receives.sum()) for one in made), max(int(one.sends.sum()) for one in made)


def _engines(tp: int, world: int) -> MeshLayout:
    """Return the layout of engines with this tensor-parallel size, with as many engines as `world` ranks have room
    for."""
    return MeshLayout(tp=tp).over(world).served()


def _pieces(sharding: Sharding) -> int:
    """Return the number of different parts into which a parameter is cut; ranks that hold the same part count once."""
    found = sharding.pieces()
    return len(np.unique(found[found >= 0]))
