"""The trainer's memory: offloads trainer state during rollouts, brings it back, and records how much memory policy,
gradients, optimizer and engine hold."""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from ..blame import asked, fault
from ..contract.types import Phase
from ..errors import ConfigError
from ..policy.quantised import elements
from . import host
from .arena import Arena
from .estimate import (
    LEAVING,
    Prediction,
    optimizer_bytes,
    optional_state_bytes,
    plan_offload,
    predict_fitting,
)
from .ledger import (
    Ledger,
    gradient_tensors,
    optimizer_tensors,
    parameter_sizes,
    policy_tensors,
    storages,
    table,
    torch_optimizer,
)
from .offload import Offload, guard

if TYPE_CHECKING:
    from transformers import TrainingArguments

    from ..contract.protocols import Engine
    from ..plugins.registry import Component
    from ..policy.policy import Policy

SLACK = 512 << 20  # bytes beyond what wakes: fragments, and what sampling allocates
ENGINES = ("engine weights", "KV cache")  # owners that a sleeping engine gives back, the latter always


class TrainerMemory:
    """Offloads the trainer's state (optimizer, gradients, policy) to host memory when a rollout begins, and brings it
    back when it ends. Also measures and predicts the memory of trainer and engine. The engine frees and restores its
    own memory by itself.

    Args:
        optimizer: returns the optimizer, or None while there is none.
        optimizer_name: TRL's `optim`, which predicts the optimizer's state before there is one.
        offload: `HybridConfig.offload`: "auto", "all" or "none".
        phase: returns the current phase.
        source: the component that offers the engine; errors name it.

    Attributes:
        engine: the engine of the run; None until it is built, and again when it was closed.
        ledger: bytes per owner, of trainer and engine.
        prediction: what the run will need; None until the engine is built.
    """

    def __init__(
        self,
        policy: Policy,
        optimizer: Callable[[], Any],
        *,
        optimizer_name: str,
        offload: str,
        phase: Callable[[], Phase],
        source: Component | None = None,
    ) -> None:
        self._policy, self._optimizer, self._phase = policy, optimizer, phase
        self._optimizer_name, self._mode = optimizer_name, offload
        self.engine: Engine | None = None
        self._source = source
        self.device: torch.device = policy.device
        self._arena = Arena(self.device)
        tensors: dict[str, Callable[[], Any]] = {
            "policy": lambda: policy_tensors(policy.modules),
            "gradients": lambda: gradient_tensors(policy.parameters),
            "optimizer": lambda: () if optimizer() is None else optimizer_tensors(optimizer()),
        }
        self._offloads = {owner: Offload(self._arena, tensors[owner]) for owner in LEAVING}
        engine: dict[str, Callable[[], Any]] = {
            "engine weights": lambda: self._resident("weights"),
            "KV cache": lambda: self._resident("kv_cache"),
        }
        allocated = self._allocated if self.device.type == "cuda" else None
        self.ledger = Ledger(tensors | engine, self._arena, allocated)
        self.prediction: Prediction | None = None
        self._guarded: Any = None
        self._guards: Callable[[], None] = lambda: None
        self._unused: int | None = None  # bytes in private pools; None: to be measured again

    def _resident(self, what: str) -> list[torch.Tensor]:
        if self.engine is None:
            return []
        found = asked(self._source, self.engine, "resident", what)
        if not isinstance(found, list) or not all(isinstance(tensor, torch.Tensor) for tensor in found):
            raise fault(self._source, "resident", f"{found!r:.80}", "a list of tensors")
        return found

    def _allocated(self) -> int:
        """Return the bytes that are allocated on the device. torch also counts the bytes that a sleeping vLLM engine
        has given back, so they are subtracted."""
        asleep = self.engine.asleep_bytes if self.engine is not None else 0
        return torch.cuda.memory_allocated(self.device) - asleep

    # --- phase edges ------------------------------------------------------------------------------------------------

    def make_room(self, owners: Collection[str] = ("optimizer", "gradients")) -> int:
        """Offload as much trainer state as is needed to wake the part of the engine's memory that is still asleep.
        Optimizer and gradients are offloaded before the weight sync, and their copies run during it; the policy is
        offloaded only after it.

        Args:
            owners: the owners that may be offloaded now, of "optimizer", "gradients" and "policy".

        Returns:
            The bytes that were offloaded.
        """
        return self._leave(self._leaving(owners))

    def _leave(self, owners: Iterable[str]) -> int:
        moved = 0
        for owner in owners:
            if owner == "optimizer":
                self._guard()
            moved += self._offloads[owner].leave()
        return moved

    def _leaving(self, owners: Collection[str]) -> list[str]:
        asleep = self.engine.asleep_bytes if self.engine is not None else 0
        if self._mode == "none" or asleep == 0:
            return []
        if self._mode == "all":
            return [owner for owner in LEAVING if owner in owners]
        if self.device.type != "cuda":  # on a CPU the arena is in the same memory
            return []
        missing = asleep + SLACK - self.free_bytes()
        if missing <= 0:  # no need to measure the owners
            return []
        leaving = plan_offload(self.ledger.measure(), missing)
        return [owner for owner in leaving if owner in owners]  # otherwise the wake-up raises and says what is missing

    def come_back(self, owners: Collection[str] = LEAVING) -> None:
        """Start to bring back what was offloaded, at the end of a rollout. The current stream waits for policy and
        gradients, which are needed next; the optimizer's copies run during forward and backward passes, and its step
        waits for them.

        Args:
            owners: the owners to bring back, of "optimizer", "gradients" and "policy".
        """
        for owner in reversed(LEAVING):
            if owner in owners:
                self._offloads[owner].start_return()
                if owner != "optimizer":
                    self._offloads[owner].finish_return()

    def _guard(self) -> None:
        optimizer = self._optimizer()
        if optimizer is not None and optimizer is not self._guarded:
            self._guards()
            self._guarded, self._guards = optimizer, guard(optimizer, self._offloads["optimizer"])

    def settle(self) -> None:
        """Bring all offloaded state back, ready for use. Called before a checkpoint, and at the end of the run."""
        for offload in self._offloads.values():
            offload.return_all()

    def reclaim(self) -> None:
        """Free the device memory that torch's allocator caches without using it, since another engine may need all of
        it."""
        if self.device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()
            self._unused = None

    def make_room_to_build(self, plan: Prediction) -> None:
        """Offload the optimizer's state and the policy while an engine is built, each if the prediction says that it is
        offloaded during rollouts. Before the first step, the optimizer has state only if the run was resumed or the
        engine is built again.

        Args:
            plan: the prediction that `check_fit` returned.
        """
        self._leave(owner for owner in ("optimizer", "policy") if owner in plan.away["rollout"])
        self.reclaim()

    def return_after_build(self, engine: Engine) -> None:
        """Bring back what `make_room_to_build` has offloaded, once the engine is built. The engine's KV cache sleeps
        meanwhile, as at each weight sync."""
        if not all(offload.resident for offload in self._offloads.values()):
            asked(self._source, engine, "sleep", keep_weights=True)
            self.come_back()

    def park_policy(self) -> None:
        """Move the base model's weights to host memory while the engine is built, if policy and engine are going to
        share the engine's copy of the weights."""
        for p in self._policy.base_parameters().values():
            p.data = p.data.cpu()
        torch.cuda.empty_cache()

    def unpark_policy(self) -> None:
        """Move back to the device the base weights that `park_policy` moved away and that got no place in the engine's
        memory; all of them if the engine could not be built."""
        self.settle()
        for p in self._policy.base_parameters().values():
            if p.device.type != self.device.type:
                p.data = p.data.to(self.device)

    # --- the books --------------------------------------------------------------------------------------------------

    def check_fit(
        self, *, kv_cache_bytes: int, shared: bool, engine_weight_bytes: int, workspace: int, sleeps: bool
    ) -> Prediction:
        """Predict whether the run fits into memory before its engine is built, and refuse it if it does not.

        Args:
            kv_cache_bytes: the KV cache's size, or the smallest that suffices.
            shared: whether the engine's weights will be the policy's memory.
            engine_weight_bytes: bytes that the engine's own weights take on one rank.
            workspace: further bytes that are needed while the engine is built.
            sleeps: whether the engine gives memory back during TRAIN.

        Returns:
            The prediction of what building the engine will need, as far as is known now.

        Raises:
            MemoryPlanError: the run does not fit; names the phase, the largest use of memory and the setting to change.
            ConfigError: HybridConfig.offload is "all", and the engine does not sleep.
        """
        if self._mode == "all" and not sleeps:
            raise ConfigError(
                "HybridConfig.offload='all' moves nothing with an engine that does not sleep. Let it sleep "
                "(vllm_enable_sleep_mode, or enable_sleep_mode of engine_options), or leave offload out."
            )
        asleep = ENGINES if sleeps else ()
        self._predict(kv_cache_bytes, engine_weight_bytes, shared=shared, asleep=asleep).check(self.capacity())
        return self._predict(kv_cache_bytes + workspace, engine_weight_bytes, shared=shared, asleep=asleep)

    def engine_weight_bytes(self, itemsize: int, ranks_per_replica: int) -> int:
        """Return the bytes that an engine with its own weights holds on one rank. The result is the same on all ranks,
        however the policy is sharded.

        Args:
            itemsize: bytes per element in the engine.
            ranks_per_replica: the number of ranks that one copy of the weights is divided among.
        """
        whole = sum(getattr(p, "ds_numel", None) or elements(p) for p in self._policy.module.parameters())
        return whole * itemsize // ranks_per_replica

    def predict_live(self, engine: Engine, keeps_weights: bool) -> None:
        """Predict the run's memory from the engine that was built, and store the result as `prediction`.

        Args:
            keeps_weights: whether the engine's weights stay on the device during TRAIN; `WeightSync.keeps_weights`.
        """
        self._unused = None
        held = self.ledger.measure()
        whole = sum(storage.nbytes() for storage in storages(self._resident("weights")))
        shared = held["engine weights"] < whole / 2
        asleep = () if not engine.sleeps else ENGINES[1:] if keeps_weights else ENGINES
        kv_cache = held["KV cache"] + engine.asleep_bytes  # only the KV cache may be asleep by now
        self.prediction = self._predict(kv_cache, held["engine weights"], shared=shared, asleep=asleep)

    def _predict(
        self, kv_cache_bytes: int, engine_weight_bytes: int, *, shared: bool, asleep: Collection[str]
    ) -> Prediction:
        """Predict the run's memory, and choose which of optimizer, gradients and policy are offloaded during ROLLOUT.
        As few are offloaded as needed for the run to fit, or all if `HybridConfig.offload` is "all". None is offloaded
        if the engine gives no memory back during TRAIN, or if offloading is off.

        Args:
            kv_cache_bytes: size of the KV cache.
            engine_weight_bytes: size of the engine's own weights.
            shared: whether the engine uses the policy's memory for its weights.
            asleep: the engine's owners ("engine weights", "KV cache") that give memory back during TRAIN.
        """
        movable: tuple[str, ...] = LEAVING[:2] if shared else LEAVING
        if self._mode == "none" or not asleep or (self._mode == "auto" and self.device.type != "cuda"):
            movable = ()  # as in `_leaving`
        return predict_fitting(
            self.capacity(),
            movable,
            least=len(movable) if self._mode == "all" else 0,
            parameters=parameter_sizes(self._policy.module),
            optimizer=self._optimizer_name,
            optional_state=self._optional_state(),
            engine_weight_bytes=engine_weight_bytes,
            kv_cache_bytes=kv_cache_bytes,
            shared=shared,
            asleep=asleep,
        )

    def _optional_state(self) -> int:
        """Return the bytes that the optimizer's options add to its state; 0 while there is no optimizer."""
        optimizer = self._optimizer()
        return 0 if optimizer is None else optional_state_bytes(torch_optimizer(optimizer))

    def capacity(self) -> int:
        """Return the bytes that policy, gradients, optimizer and engine together may take on the device: the bytes that
        are free, and the bytes that they hold now."""
        held = self.ledger.measure()
        return self.free_bytes() + sum(n for owner, n in held.items() if owner != "other")

    def table(self) -> list[str]:
        """Return the memory prediction as lines of text that are printed when the run starts; no lines before the
        engine is built."""
        return table(self.prediction) if self.prediction is not None else []

    def free_bytes_in_rollout(self) -> int:
        """Return the bytes that may be taken by an engine that is about to be built, its weights included. They are the
        bytes that are free now; if offloading is off, less the optimizer state that will be added later."""
        stays = 0
        if self._mode == "none":
            trainable = [p for p in parameter_sizes(self._policy.module) if p.trainable]
            held = self.ledger.measure()["optimizer"]
            stays = max(0, optimizer_bytes(self._optimizer_name, trainable)[0] + self._optional_state() - held)
        return self.free_bytes() - stays

    def free_bytes(self) -> int:
        """Return the bytes of the device that nobody uses, including the bytes that torch caches for later tensors."""
        if self.device.type != "cuda":
            return host.free_bytes()
        free, _ = torch.cuda.mem_get_info(self.device)
        kept = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        if self._unused is None:
            segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
            self._unused = unused_in_private_pools(segments, self._arena.device)
        return free + kept - self._unused

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """Return a context that adds a note on the memory of each owner to an out-of-memory error raised inside."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            capacity = torch.cuda.mem_get_info(self.device)[1] if self.device.type == "cuda" else None
            error.add_note(self.ledger.report(self._phase(), capacity, self.prediction))
            raise

    def close(self) -> None:
        """Bring all offloaded state back, remove the hooks from the optimizer, and free the host arena."""
        self.settle()
        self._guards()
        self._guarded, self._guards = None, lambda: None
        self._arena.close()


def unused_in_private_pools(segments: Iterable[Mapping[str, Any]], device: torch.device) -> int:
    """Return the bytes that torch has reserved in private memory pools (of CUDA graphs, or of a sleeping engine) and
    that are not allocated: no tensor outside of these pools can get them, so they do not count as free.

    Args:
        segments: segments as `torch.cuda.memory_snapshot` returns them.
    """
    private = (s for s in segments if s["device"] == device.index and tuple(s["segment_pool_id"]) != (0, 0))
    return sum(int(s["total_size"] - s["allocated_size"]) for s in private)


def optimizer_name(args: TrainingArguments) -> str:
    """Return the name of the trainer's optimizer, TRL's `optim`."""
    name = getattr(args, "optim", "adamw_torch_fused")
    return str(getattr(name, "value", name))
