"""A forecast of a run's memory on one rank before its first step: pure functions from sizes and settings to the bytes
of each owner, which is one use of memory (policy, gradients, optimizer, engine weights, KV cache, other)."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import MemoryPlanError

OWNERS = ("policy", "gradients", "optimizer", "engine weights", "KV cache", "other")
LEAVING = ("optimizer", "gradients", "policy")  # owners that leave during ROLLOUT, cheapest first
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

# State tensors per parameter, bytes of each per element (None: the parameter's dtype). 8-bit: one scale per 256.
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

# Options of torch's optimizers that add one tensor per parameter each.
_OPTIONS: Mapping[str, tuple[str, ...]] = {
    "torch.optim.sgd.SGD": ("momentum",),
    "torch.optim.rmsprop.RMSprop": ("momentum", "centered"),
    "torch.optim.adam.Adam": ("amsgrad",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSize:
    """The size of one tensor of the policy on this rank.

    Attributes:
        shape: the shape of this rank's part.
        itemsize: bytes per element.
        trainable: whether the tensor is trained, and so needs a gradient and optimizer state.
    """

    shape: tuple[int, ...]
    itemsize: int
    trainable: bool = True

    @property
    def elements(self) -> int:
        """The number of elements on this rank."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """The size in bytes on this rank."""
        return self.elements * self.itemsize


@dataclass(frozen=True, slots=True)
class Prediction:
    """The predicted bytes per owner (policy, gradients, optimizer, engine weights, KV cache, other) in each phase of a
    step.

    Attributes:
        phases: for each phase, the bytes of every owner. The phases are "rollout", "train" and "edge". The last one is
            the weight sync between the other two, with all of the trainer's state and all weights, but no KV cache
            where the engine sleeps.
        away: for each phase, the owners that hold no memory in it but do in other phases.
        notes: the assumptions made, as texts that are printed when the run starts.
    """

    phases: Mapping[str, Mapping[str, int]]
    away: Mapping[str, tuple[str, ...]]
    notes: tuple[str, ...] = ()

    @property
    def peak(self) -> tuple[str, int]:
        """The name of the phase that needs most memory, and the bytes that it needs."""
        return max(((phase, sum(held.values())) for phase, held in self.phases.items()), key=lambda item: item[1])

    def check(self, capacity: int) -> None:
        """Raise if a phase needs more memory than there is.

        Args:
            capacity: the bytes that may be used.

        Raises:
            MemoryPlanError: a phase needs more than `capacity` bytes; names the phase, the largest owner and what to
                change.
        """
        phase, needed = self.peak
        if needed <= capacity:
            return
        held, away = self.phases[phase], self.away[phase]
        owner = max(held, key=lambda o: held[o])
        name = {"edge": "The weight sync"}.get(phase, f"Phase {phase.upper()}")
        gone = f" even with {', '.join(away)} away" if away else ""
        raise MemoryPlanError(
            f"{name} needs {needed / GIB:.2f} GiB{gone}, and {capacity / GIB:.2f} GiB may be used. The largest owner "
            f"is {owner} with {held[owner] / GIB:.2f} GiB: {REMEDIES[owner]}.",
            owner=owner,
        )


def predict(
    parameters: Sequence[ParameterSize],
    *,
    optimizer: str = "adamw_torch_fused",
    optional_state: int = 0,
    engine_weight_bytes: int,
    kv_cache_bytes: int,
    shared: bool = False,
    asleep: Collection[str] = ("engine weights", "KV cache"),
    offloaded: Collection[str] = (),
) -> Prediction:
    """Predict the bytes per owner and phase on one rank, as they are once the optimizer has made its state. Gradients
    count only in TRAIN.

    Args:
        parameters: sizes of the policy's tensors, this rank's shards.
        optimizer: `args.optim`.
        optional_state: bytes of optimizer state that the optimizer's options add, see `optional_state_bytes`.
        engine_weight_bytes: size of the engine's own weights.
        kv_cache_bytes: size of the KV cache.
        shared: whether the engine's weights are the policy's memory.
        asleep: the owners ("engine weights", "KV cache") whose memory the engine gives back during TRAIN; a KV cache
            that it gives back is also away during the weight sync.
        offloaded: the owners (some of "optimizer", "gradients" and "policy") whose memory is offloaded to the host
            during ROLLOUT.
    """
    trainable = [p for p in parameters if p.trainable]
    optimizer_state, notes = optimizer_bytes(optimizer, trainable)
    state = {
        "policy": sum(p.bytes for p in parameters),
        "gradients": sum(p.bytes for p in trainable),
        "optimizer": optimizer_state + optional_state,
        "engine weights": 0 if shared else engine_weight_bytes,
        "KV cache": kv_cache_bytes,
        "other": 0,
    }
    leaving = {owner for owner in offloaded if owner != "optimizer" or not _paged(optimizer)}
    edge = {"gradients"} | ({"KV cache"} & set(asleep))
    absent = {"edge": edge, "rollout": leaving | {"gradients"}, "train": set(asleep)}
    return Prediction(
        phases={phase: {o: 0 if o in gone else n for o, n in state.items()} for phase, gone in absent.items()},
        away={phase: tuple(o for o in OWNERS if o in gone and state[o]) for phase, gone in absent.items()},
        notes=notes,
    )


def predict_fitting(capacity: int, leaving: Sequence[str], least: int = 0, **given: Any) -> Prediction:
    """Return the result of `predict` with as few owners offloaded during ROLLOUT as are needed to fit into `capacity`
    bytes. If the memory does not fit even with all of them offloaded, the result has all of them offloaded.

    Args:
        capacity: the bytes that may be used.
        leaving: the owners that may be offloaded, in the order in which they are offloaded.
        least: number of owners that are offloaded in any case.
        given: arguments of `predict`.
    """
    for away in range(least, len(leaving) + 1):
        prediction = predict(offloaded=leaving[:away], **given)
        if sum(prediction.phases["rollout"].values()) <= capacity:
            break
    return prediction


def optimizer_bytes(optim: str, trainable: Sequence[ParameterSize]) -> tuple[int, tuple[str, ...]]:
    """Return the bytes of an optimizer's state, and texts on the assumptions made. Step counters are not counted.

    Args:
        optim: the optimizer's name, as in `args.optim`.
        trainable: the sizes of the trained tensors.
    """
    name = optim.removeprefix(PAGED)
    notes = [f"{optim} pages its state by itself: it does not leave with the others"] if _paged(optim) else []
    if name in ("adafactor", "adalomo"):
        return sum(_factored(p) for p in trainable), tuple(notes)
    if name not in _STATES:
        notes.append(f"the state of {optim} is not known: taken for AdamW's, two tensors per parameter")
    states, itemsize = _STATES.get(name, _ADAMW)
    size = sum(states * p.elements * (p.itemsize if itemsize is None else itemsize) for p in trainable)
    return math.ceil(size), tuple(notes)


def optional_state_bytes(optimizer: Any) -> int:
    """Return the bytes of state on this rank that an optimizer's options add to `optimizer_bytes`: momentum, the
    largest second moment (amsgrad), the mean gradient (centered).

    Args:
        optimizer: an optimizer of torch, before or after its first step, which makes its state. For optimizers of other
            classes, the result is 0.
    """
    options = {
        name for kind in type(optimizer).__mro__ for name in _OPTIONS.get(f"{kind.__module__}.{kind.__name__}", ())
    }
    return sum(
        sum(bool(group.get(name)) for name in options) * getattr(p, "_local_tensor", p).nbytes
        for group in optimizer.param_groups
        for p in group["params"]
        if p.requires_grad
    )


def _paged(optim: str) -> bool:
    return optim.startswith(PAGED)


def _factored(p: ParameterSize) -> int:
    """Return the bytes of Adafactor's state for one tensor: float32 sums of rows and columns; for vectors one value per
    element."""
    if len(p.shape) < 2:
        return 4 * p.elements
    return 4 * (math.prod(p.shape[:-1]) + math.prod(p.shape[:-2]) * p.shape[-1])


def plan_offload(held: Mapping[str, int], missing: int) -> list[str]:
    """Return the owners that must be offloaded during ROLLOUT to free `missing` bytes: optimizer, then gradients, then
    policy, and no more than required.

    Args:
        held: bytes that each owner holds on the device at the end of TRAIN.
        missing: bytes to be freed. All owners are returned where they do not suffice.
    """
    leaving: list[str] = []
    for owner in LEAVING:
        if held.get(owner) and missing > 0:
            missing -= held[owner]
            leaving.append(owner)
    return leaving
