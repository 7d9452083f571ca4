"""The layouts that a loop names, held against the model, the processes and the config."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

from .config import HybridConfig
from .errors import ConfigError
from .types import Layout

if TYPE_CHECKING:
    from torch import nn


def with_rollout(config: HybridConfig, rollout: Layout) -> HybridConfig:
    """The config with the engine's parallelism in its options.

    Raises:
        ConfigError: an engine cannot have this layout, or the options say something else.
    """
    if rollout.fsdp > 1:
        raise ConfigError(f"rollout={rollout}: engines are not sharded by FSDP. Give tp, the ranks of one engine.")
    if rollout.pp > 1:
        raise ConfigError(
            f"rollout={rollout}: pipeline stages can be planned (`trlx-hybrid reshard-plan`), not run yet: the ranks "
            "of an engine share its requests over tp alone. Use tp."
        )
    options = config.options("engine")
    given = options.setdefault("tensor_parallel_size", rollout.tp)
    if given != rollout.tp:
        raise ConfigError(f"rollout={rollout}, and the engine's options say tensor_parallel_size={given}. Give one.")
    return dataclasses.replace(config, engine_options=options)


def check_rollout(rollout: Layout, world: int) -> None:
    """That the processes can hold such engines.

    Raises:
        ConfigError: they cannot.
    """
    if world % rollout.tp:
        raise ConfigError(f"rollout={rollout} takes {rollout.tp} ranks per engine, which do not divide {world}.")
    engines = world // rollout.tp
    if rollout.dp not in (1, engines):
        raise ConfigError(f"rollout={rollout} takes {rollout.world} ranks, and there are {world}: leave dp out.")


def check_train(train: Layout, model: nn.Module, world: int) -> None:
    """That the model lies as the loop says.

    Raises:
        ConfigError: it does not; names both.
    """
    if train.pp > 1:
        raise ConfigError(f"train={train}: a model under FSDP or DDP has no pipeline stages. Leave pp out.")
    shards, wanted = shards_of(model), train.fsdp * train.tp
    if shards != wanted:
        lies = f"is sharded over {shards} ranks" if shards > 1 else "is whole on every rank"
        raise ConfigError(
            f"The model {lies}, train={train}. Shard it first (`accelerator.prepare`, `fully_shard`) and pass what "
            "comes back, or correct train=."
        )
    replicas = world // shards
    if train.dp not in (1, replicas):
        raise ConfigError(f"train={train} takes {train.world} ranks; the model has {replicas} replicas on {world}.")


def shards_of(model: nn.Module) -> int:
    """Over how many ranks the model's largest parameter is sharded; 1 for one that every rank has in full."""
    largest: Any = max(model.parameters(), key=lambda p: p.numel())
    if not hasattr(largest, "placements"):
        return 1
    sizes = zip(largest.placements, largest.device_mesh.shape, strict=True)
    return math.prod(int(size) for placement, size in sizes if not placement.is_replicate())
