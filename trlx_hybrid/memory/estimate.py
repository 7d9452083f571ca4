"""What a run is going to need in memory, before its first step. Pure: from sizes and settings to bytes."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ..errors import ConfigError, MemoryPlanError

OWNERS = ("policy", "gradients", "optimizer", "engine weights", "KV cache", "other")
LEAVING = ("optimizer", "gradients", "policy")  # who leaves during ROLLOUT, cheapest to miss first
GIB = 1 << 30
PAGED = "paged_"

REMEDIES = {
    "policy": "train adapters (`peft_config`), load the model in bf16, or shard it over more ranks with FSDP",
    "gradients": "train adapters (`peft_config`), or shard them over more ranks with FSDP",
    "optimizer": "take a smaller `optim`, for example 'adamw_8bit' or 'adafactor', or shard it with FSDP",
    "engine weights": "let the engine share the policy's memory (`weights='alias'`; `bf16` makes the dtypes agree), or "
    "raise `vllm_tensor_parallel_size`",
    "KV cache": "lower `vllm_gpu_memory_utilization`, or `kv_cache_memory_bytes` of `engine_options`",
    "other": "lower `per_device_train_batch_size` or `max_completion_length`, or set `gradient_checkpointing=True`",
}

# State tensors per parameter, and bytes of each per element; None: the parameter's dtype. 8-bit: a scale per 256.
_ADAMW: tuple[int, float | None] = (2, None)
_EIGHT = 1 + 4 / 256
_STATES: Mapping[str, tuple[int, float | None]] = {
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_torch_xla", "adamw_torch_npu_fused"), _ADAMW),
    **dict.fromkeys(("stable_adamw", "schedule_free_adamw", "schedule_free_radam"), _ADAMW),
    **dict.fromkeys(("sgd", "lomo"), (0, None)),
    **dict.fromkeys(("adagrad", "rmsprop", "schedule_free_sgd"), (1, None)),
    "grokadamw": (3, None),
    **dict.fromkeys(("lion_32bit", "rmsprop_bnb", "rmsprop_bnb_32bit"), (1, 4)),
    "adamw_anyprecision": (2, 4),
    "adamw_32bit": (2, 4),
    **dict.fromkeys(("ademamix", "ademamix_32bit"), (3, 4)),
    **dict.fromkeys(("adamw_bnb_8bit", "adamw_8bit", "adamw_torch_8bit"), (2, _EIGHT)),
    "adamw_torch_4bit": (2, 0.5 + 4 / 128),
    **dict.fromkeys(("lion_8bit", "rmsprop_bnb_8bit"), (1, _EIGHT)),
    "ademamix_8bit": (3, _EIGHT),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSize:
    """One tensor of the policy, as this rank holds it: `shape`, bytes per element, and whether it is trained."""

    shape: tuple[int, ...]
    itemsize: int
    trainable: bool = True

    @property
    def elements(self) -> int:
        """How many."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """On this rank."""
        return self.elements * self.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What a run's memory depends on; all bytes are those of one rank.

    Attributes:
        parameters: the policy, this rank's shards.
        optimizer: `args.optim`.
        shared: the engine's weights are the policy's memory.
        engine_itemsize: bytes per element of an engine's own weights.
        engine_weight_bytes: their size where the engine knows better (tensor parallel, quantised); None: one per
            element of `parameters`.
        asleep: owners that the engine gives back during TRAIN; the KV cache, where it is one of them, also during the
            weight sync.
        kv_cache_bytes: size of the KV cache.
        activation_bytes: reserve for activations and the like in TRAIN.
        engine_reserve_bytes: the same of the engine, in ROLLOUT.
        gradients_held: gradients outlive TRAIN, as when a rollout falls within gradient accumulation.
        offloaded: owners that leave during ROLLOUT.
    """

    parameters: Sequence[ParameterSize]
    optimizer: str = "adamw_torch_fused"
    shared: bool = False
    engine_itemsize: int = 2
    engine_weight_bytes: int | None = None
    asleep: Collection[str] = ("engine weights", "KV cache")
    kv_cache_bytes: int = 0
    activation_bytes: int = 0
    engine_reserve_bytes: int = 0
    gradients_held: bool = True
    offloaded: Collection[str] = ()


@dataclass(frozen=True, slots=True)
class Prediction:
    """Bytes per owner in each phase.

    Attributes:
        phases: "edge" (between the phases: the weight sync, with all of the trainer's state and all weights, but no
            KV cache where the engine sleeps), "rollout" and "train", each with bytes for every one of `OWNERS`.
        away: owners that have memory, but not in that phase.
        notes: what was assumed.
    """

    phases: Mapping[str, Mapping[str, int]]
    away: Mapping[str, tuple[str, ...]]
    notes: tuple[str, ...] = ()

    @property
    def peak(self) -> tuple[str, int]:
        """The phase that needs most, and its bytes."""
        return max(((phase, sum(held.values())) for phase, held in self.phases.items()), key=lambda item: item[1])

    def check(self, capacity: int) -> None:
        """Refuse what cannot fit.

        Raises:
            MemoryPlanError: a phase needs more than `capacity` bytes.
        """
        phase, needed = self.peak
        if needed > capacity:
            raise _too_much(phase, self.phases[phase], capacity, self.away[phase])


def predict(workload: Workload) -> Prediction:
    """Bytes per owner and phase, once the optimizer has made its state.

    Raises:
        ConfigError: `offloaded` names what cannot leave.
    """
    for owner in workload.offloaded:
        if owner not in LEAVING or (owner == "policy" and workload.shared):
            why = "the engine generates from the policy's memory" if owner == "policy" else f"of {', '.join(LEAVING)}"
            raise ConfigError(f"{owner!r} cannot leave during ROLLOUT: {why}. Take it out of what is offloaded.")
    trainable = [p for p in workload.parameters if p.trainable]
    optimizer, notes = optimizer_bytes(workload.optimizer, trainable)
    engine = workload.engine_weight_bytes
    if engine is None:
        engine = sum(p.elements for p in workload.parameters) * workload.engine_itemsize
    state = {
        "policy": sum(p.bytes for p in workload.parameters),
        "gradients": sum(p.bytes for p in trainable),
        "optimizer": optimizer,
        "engine weights": 0 if workload.shared else engine,
        "KV cache": workload.kv_cache_bytes,
    }
    leaving = {owner for owner in workload.offloaded if owner != "optimizer" or not _paged(workload.optimizer)}
    asleep = set(workload.asleep)
    unmade = set() if workload.gradients_held else {"gradients"}
    absent = {"edge": (asleep & {"KV cache"}) | unmade, "rollout": leaving | unmade, "train": asleep}
    other = {"edge": 0, "rollout": workload.engine_reserve_bytes, "train": workload.activation_bytes}
    return Prediction(
        phases={
            phase: {owner: 0 if owner in gone else n for owner, n in state.items()} | {"other": other[phase]}
            for phase, gone in absent.items()
        },
        away={phase: tuple(o for o in OWNERS if o in gone and state.get(o)) for phase, gone in absent.items()},
        notes=notes,
    )


def optimizer_bytes(optim: str, trainable: Sequence[ParameterSize]) -> tuple[int, tuple[str, ...]]:
    """Bytes of an optimizer's state, by its name in `args.optim`, and what was assumed. Step counters are left out."""
    name = optim.removeprefix(PAGED)
    notes = [f"{optim} pages its state by itself: it does not leave with the others"] if _paged(optim) else []
    if name in ("adafactor", "adalomo"):
        return sum(_factored(p) for p in trainable), tuple(notes)
    if name not in _STATES:
        notes.append(f"the state of {optim} is not known: taken for AdamW's, two tensors per parameter")
    states, itemsize = _STATES.get(name, _ADAMW)
    size = sum(states * p.elements * (p.itemsize if itemsize is None else itemsize) for p in trainable)
    return math.ceil(size), tuple(notes)


def _paged(optim: str) -> bool:
    return optim.startswith(PAGED)


def _factored(p: ParameterSize) -> int:
    """Adafactor: float32 sums of rows and columns; vectors in full."""
    if len(p.shape) < 2:
        return 4 * p.elements
    return 4 * (math.prod(p.shape[:-1]) + math.prod(p.shape[:-2]) * p.shape[-1])


def plan_offload(
    resident: Mapping[str, int], capacity: int, wanted: Mapping[str, int] | int, *, shared: bool = False
) -> list[str]:
    """Who must leave during ROLLOUT: optimizer, then gradients, then policy, and no more than the budget requires.

    Args:
        resident: bytes that each owner holds on the device at the end of TRAIN.
        capacity: bytes of the device that may be used.
        wanted: bytes to come for ROLLOUT, per owner; a number alone is the KV cache.
        shared: the engine's weights are the policy's memory, which therefore stays.

    Raises:
        MemoryPlanError: it does not fit even with all of them away.
    """
    wanted = {"KV cache": wanted} if isinstance(wanted, int) else wanted
    needed = {owner: resident.get(owner, 0) + wanted.get(owner, 0) for owner in (*resident, *wanted)}
    leaving: list[str] = []
    for owner in LEAVING:
        if sum(needed.values()) <= capacity:
            break
        if resident.get(owner) and not (owner == "policy" and shared):
            needed[owner] -= resident[owner]
            leaving.append(owner)
    if sum(needed.values()) > capacity:
        raise _too_much("rollout", needed, capacity, leaving)
    return leaving


def _too_much(phase: str, needed: Mapping[str, int], capacity: int, away: Collection[str]) -> MemoryPlanError:
    owner = max(needed, key=lambda o: needed[o])
    name = {"edge": "The weight sync"}.get(phase, f"Phase {phase.upper()}")
    gone = f" even with {', '.join(away)} away" if away else ""
    return MemoryPlanError(
        f"{name} needs {sum(needed.values()) / GIB:.2f} GiB{gone}, and {capacity / GIB:.2f} GiB may be used. The "
        f"largest owner is {owner} with {needed[owner] / GIB:.2f} GiB: {REMEDIES.get(owner, 'make it smaller')}.",
        owner=owner,
    )
