"""Checks of the layouts (numbers of replicas, shards, and tensor and pipeline parallel ranks) that a training loop
passes to `HybridEngine`: whether engines of such a layout fit the ranks, and whether the model is sharded as stated."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..config import HybridConfig, check_keys
from ..contract.types import Layout
from ..errors import ConfigError
from ..policy.policy import class_name, unit_settings, unwrapped

if TYPE_CHECKING:
    from torch import nn

FSDP = "train_config['fsdp_config']"
HELD = (
    *("version", "dp_shard_size", "dp_replicate_size", "reshard_after_forward", "sharding_strategy", "cpu_offload"),
    *("activation_checkpointing", "transformer_layer_cls_to_wrap"),
)
"""The FSDP settings of accelerate that can be read from a prepared model, named as in its YAML and in transformers'
`TrainingArguments.fsdp_config`, with the prefix `fsdp_` or without; the two sizes as in its `ParallelismConfig`."""
ALIASES = {"transformer_cls_names_to_wrap": "transformer_layer_cls_to_wrap", "offload_params": "cpu_offload"}
STRATEGIES = (("SHARD_GRAD_OP", "FULL_SHARD"), ("HYBRID_SHARD_ZERO2", "HYBRID_SHARD"))


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutConfig:
    """The value of `HybridEngine(rollout_config=...)`: how each engine is split.

    Attributes:
        tp_size: tensor-parallel ranks of one engine.
        pp_size: pipeline stages of one engine.
        dp_type: how many engines there are. None, the default: as many as fit into the processes. The text "none": a
            single engine, which takes all processes. Any other value raises ConfigError.
    """

    tp_size: int = 1
    pp_size: int = 1
    dp_type: str | None = None

    def __post_init__(self) -> None:
        if self.dp_type not in (None, "none"):
            raise ConfigError(
                f"rollout_config: dp_type={self.dp_type!r}. Engines share no work: 'none' is one engine over all "
                "processes, and without dp_type there are as many as the processes hold."
            )

    @property
    def layout(self) -> Layout:
        """The sizes as a `Layout`, which is what `HybridEngine(rollout=...)` takes."""
        return Layout(tp=self.tp_size, pp=self.pp_size)


def with_rollout(config: HybridConfig, rollout: Layout) -> HybridConfig:
    """Return the config with the tensor and pipeline parallel sizes of an engine's layout added to the engine's
    options.

    Raises:
        ConfigError: an engine cannot have this layout, or the options contradict it.
    """
    if rollout.fsdp > 1:
        raise ConfigError(f"rollout={rollout}: engines are not sharded by FSDP. Give tp, the ranks of one engine.")
    options = config.options("engine")
    for name, size in (("tensor_parallel_size", rollout.tp), ("pipeline_parallel_size", rollout.pp)):
        given = options.get(name, size)
        if given != size:
            raise ConfigError(f"rollout={rollout}, and the engine's options say {name}={given}. Give one.")
        if size > 1:
            options[name] = size
    return dataclasses.replace(config, engine_options=options)


def check_rollout(rollout: Layout, world: int, alone: bool = False) -> None:
    """Check that engines fit into the processes of a run without a remainder.

    Args:
        rollout: the layout of one engine: its tensor and pipeline parallel sizes.
        world: number of processes.
        alone: whether one engine must take all processes.

    Raises:
        ConfigError: the engines do not fit.
    """
    size = rollout.tp * rollout.pp
    if world % size:
        raise ConfigError(f"rollout={rollout} takes {size} ranks per engine, which do not divide {world}.")
    engines = world // size
    if rollout.dp not in (1, engines):
        raise ConfigError(f"rollout={rollout} takes {rollout.world} ranks, and there are {world}: leave dp out.")
    if alone and engines > 1:
        raise ConfigError(
            f"rollout_config: dp_type='none' is one engine, and {world} processes hold {engines} of "
            f"tp_size={rollout.tp}, pp_size={rollout.pp}. Leave dp_type out, or take sizes whose product is {world}."
        )


def check_train(train: Layout, model: nn.Module, world: int) -> None:
    """Check that a model is sharded as the `train` argument of `HybridEngine` says.

    Args:
        train: the layout that the user passed: numbers of replicas (dp), FSDP shards and tensor-parallel ranks.
        world: number of processes.

    Raises:
        ConfigError: the model is sharded otherwise; the message says how.
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
    """Return the number of ranks that the model's largest parameter is sharded over; 1 where every rank has it in
    full."""
    largest: Any = max(model.parameters(), key=lambda p: p.numel())
    if not hasattr(largest, "placements"):
        return 1
    sizes = zip(largest.placements, largest.device_mesh.shape, strict=True)
    return math.prod(int(size) for placement, size in sizes if not placement.is_replicate())


def check_train_config(config: Mapping[str, Any], model: nn.Module, world: int) -> None:
    """Check that FSDP2 has sharded a model with the settings that the user passed to `HybridEngine`.

    Args:
        config: the value of `HybridEngine(train_config=...)`.
        world: number of processes.

    Raises:
        ConfigError: a setting differs from the model's, or cannot be read from a model; the message names it.
    """
    from accelerate import FullyShardedDataParallelPlugin

    check_keys(config, ["fsdp_config"], "train_config")
    given = config.get("fsdp_config")
    if given is None:
        return
    if not isinstance(given, Mapping):
        raise ConfigError(f"{FSDP} must be a mapping of settings, got {given!r:.60}.")
    plain = {key.removeprefix("fsdp_"): value for key, value in given.items()}
    settings = {ALIASES.get(name, name): value for name, value in plain.items()}
    hidden = {field.name for field in dataclasses.fields(FullyShardedDataParallelPlugin)} - set(HELD)
    for name in sorted(settings.keys() & hidden):
        raise ConfigError(
            f"{FSDP} has {name!r}, which does not show in a model that is prepared: it cannot be held against it. "
            "accelerate takes it when it prepares the model; leave it out here."
        )
    check_keys(settings, HELD, FSDP)
    found = _fsdp_of(model, world)
    for name, value in settings.items():
        if name == "transformer_layer_cls_to_wrap":
            names = value.split(",") if isinstance(value, str) else value  # as in accelerate's YAML file
            fits = set(map(str.strip, names)) <= found[name]
        else:
            value = value.upper() if isinstance(value, str) else value  # as accelerate reads it
            fits = type(value) is type(found[name]) and value == found[name]
        if not fits:
            raise ConfigError(
                f"{FSDP} has {name}={value!r}, and the model {found[name]!r}. It changes nothing, and is held against "
                "the model: shard that accordingly (`accelerator.prepare`, `fully_shard`), or correct the setting."
            )


def _fsdp_of(model: nn.Module, world: int) -> dict[str, Any]:
    """Return the FSDP settings that can be read from a sharded model, by the names in `HELD`, to be compared with those
    that the user has given.

    Args:
        model: a model that FSDP2 has sharded.
        world: number of processes.

    Raises:
        ConfigError: FSDP2 has not sharded the model.
    """
    from torch.distributed.fsdp import FSDPModule

    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not units:
        raise ConfigError(
            f"{FSDP} is given, and the model is not sharded by FSDP2. Shard it first (`accelerator.prepare` with "
            "`fsdp_version: 2`, `fully_shard`) and pass what comes back, or leave train_config out."
        )
    # The root, and accelerate's unit of norm and head, stay whole between forward and backward pass in any case.
    inner = [unit for unit in units if unit is not unwrapped(model)] or units
    reshards, offloads = (any(values) for values in zip(*map(unit_settings, inner), strict=True))
    shards = shards_of(model)
    plain = {class_name(module) for module in model.modules() if not isinstance(module, FSDPModule)}
    return {
        "version": 2,
        "dp_shard_size": shards,
        "dp_replicate_size": world // shards,
        "reshard_after_forward": reshards,
        "sharding_strategy": STRATEGIES[world > shards][reshards],
        "cpu_offload": offloads,
        "activation_checkpointing": any("_checkpoint_wrapped_module" in name for name, _ in model.named_modules()),
        "transformer_layer_cls_to_wrap": set(map(class_name, inner)) - plain,
    }
