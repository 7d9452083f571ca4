"""The trainer's LoRA adapter in vLLM's LoRA slots: copied from memory to memory, never merged, never through a file.

vLLM allocates the slots of every wrapped layer once, when the engine is built, and its kernels and CUDA graphs read
them at those addresses. An empty adapter is registered there under a fixed id; each write copies A and scaling * B of
every PEFT layer into the slots. vLLM never sees the trainer's tensors: its own way of loading an adapter keeps them and
multiplies them by the scaling in place.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from trlx_hybrid.errors import SyncError, listed
from trlx_hybrid.weights.policy import Policy

from . import internals
from .loading import differ
from .lora_layers import active_adapters, allowed_ranks, largest_rank, lora_layers, unserved
from .lora_slot import Cut, Slot, factors_of, place_of, weights_of

ADAPTER_ID = 1
"""vLLM's warm-up adapters count from 1: a dummy run then finds this id taken, and uses it instead of evicting it."""


def lora_arguments(policy: Policy, dtype: torch.dtype | None = None) -> dict[str, Any] | str:
    """Engine arguments with which vLLM can hold this policy's adapter, or why it cannot.

    Only the targeted layers are wrapped, and a fused one if any of its parts is: a wrapped layer costs two more kernels
    per step and slots of its own, and vLLM refuses to wrap the head of vocabularies above 258,048.

    Args:
        policy: the live policy, before the engine is built.
        dtype: what the engine will compute in, if known.
    """
    reason = unserved(policy, dtype)
    if reason is not None:
        return reason
    layers = lora_layers(policy)
    rank = largest_rank(layers)
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_cpu_loras": 1,
        "max_lora_rank": next(size for size in allowed_ranks() if size >= rank),
        "lora_target_modules": sorted({name.rpartition(".")[2] for name in layers}),
    }


class AdapterSlots:
    """vLLM's LoRA slots, filled from a live PEFT model.

    Args:
        llm: vLLM's LLM, in process, built with `lora_arguments`.
        policy: the policy those arguments were made from.

    Raises:
        SyncError: vLLM has no slot for some adapted module, or memory beyond the adapter's rank is not zero.
    """

    def __init__(self, llm: Any, policy: Policy) -> None:
        self._manager = internals.adapter_manager(llm)
        self._layers = lora_layers(policy)
        self._adapter = self._active()
        self._slots: list[Slot] = []
        self._outside: list[tuple[str, Tensor]] = []
        self.reset()

    def reset(self) -> None:
        """Zero all slots and register the adapter again; a `write` must follow.

        To be called after a sleep that lost the weights: the slots and the buffers that say which token takes which
        adapter lie in the same memory, and vLLM refills the latter only when the batch's composition changes.

        Raises:
            SyncError: as the constructor.
        """
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.lora_weights import LoRALayerWeights

        manager, name = self._manager, "none"
        nothing = LoRALayerWeights(name, 1, 1, torch.zeros(1, 1), torch.zeros(1, 1))  # vLLM wants one layer at least
        manager.remove_all_adapters()
        manager.add_adapter(LoRAModel(ADAPTER_ID, 1, {name: nothing}))
        manager.activate_adapter(ADAPTER_ID)  # zeroes its slot in every layer it has no weights for
        self._resolve(manager.lora_index_to_id.index(ADAPTER_ID))
        stray = self._stray()
        if stray:
            raise SyncError(
                f"vLLM's LoRA slots are not zero where they must be: {listed(stray)}. Use weights='gather'."
            )

    @property
    def tensors(self) -> int:
        """How many adapter tensors have a slot."""
        return 2 * len(self._slots)

    def write(self) -> int:
        """Copy the adapter into the slots, in a few multi-tensor launches; a disabled adapter is written as zeros.

        Collective where the policy is sharded: each factor is gathered.

        Returns:
            Bytes of adapter tensors read.

        Raises:
            SyncError: the adapter is merged, is no longer the one the slots were made for, or has other shapes.
        """
        if not self._held():
            self.reset()
        live, idle = self._split()
        factors = factors_of(live, self._adapter)
        parts = [s.parts(a, b) for s, (a, b, _) in zip(live, factors, strict=True)]
        for s, (a, b) in zip(live, parts, strict=True):
            if a.shape != s.a.shape or b.shape != s.b.shape:
                raise SyncError(
                    f"The adapter of {s.name} has A {tuple(a.shape)} and B {tuple(b.shape)} now; its slots are "
                    f"{tuple(s.a.shape)} and {tuple(s.b.shape)}. Build a new engine after changing an adapter's rank."
                )
        with torch.no_grad():
            if parts:
                scaled = torch._foreach_mul([b for _, b in parts], [scaling for *_, scaling in factors])
                torch._foreach_copy_([s.a for s in live], [a for a, _ in parts])
                torch._foreach_copy_([s.b for s in live], list(scaled))
            if idle:
                torch._foreach_zero_([t for s in idle for t in (s.a, s.b)])
        return sum(t.numel() * t.element_size() for a, b, _ in factors for t in (a, b))

    def differing(self) -> list[str]:
        """Adapted modules whose slots are not bitwise A and scaling * B, and slots with values outside the adapter."""
        live, idle = self._split()
        names, flags = [], []
        for s, (a, b, scaling) in zip(live, factors_of(live, self._adapter), strict=True):
            a, b = s.parts(a, b)
            for ours, theirs in ((s.a, a), (s.b, torch._foreach_mul([b], [scaling])[0])):
                names.append(s.name)
                flags.append(differ(ours, theirs))
        for s in idle:
            names += [s.name, s.name]
            flags += [s.a.any(), s.b.any()]
        return [*dict.fromkeys(_flagged(names, flags)), *self._stray()]

    def request(self, version: int) -> Any:
        """The `LoRARequest` with which a prompt is served by the adapter as written.

        Args:
            version: weight version in the slots. It is part of the name, which keys vLLM's prefix cache.

        Raises:
            SyncError: vLLM dropped the adapter since the last write.
        """
        from vllm.lora.request import LoRARequest

        if not self._held():
            raise SyncError("vLLM dropped the adapter from its slots since the last weight sync: sync again.")
        return LoRARequest(f"policy-{version}", ADAPTER_ID, "(in memory)")

    # --- where things lie -------------------------------------------------------------------------------------------

    def _held(self) -> bool:
        manager = self._manager
        return ADAPTER_ID in manager.lora_index_to_id and ADAPTER_ID in manager.list_adapters()

    def _resolve(self, index: int) -> None:
        """Find the slots of every adapted module, and everything in vLLM's slots that must stay zero."""
        wanted = {self._theirs(name): name for name, layer in self._layers.items() if self._adapter in layer.lora_A}
        self._slots, self._outside = [], []
        for part, a, b, cut in self._parts(index):
            name = wanted.get(part)
            whole = weights_of(self._layers[name], self._adapter) if name else None
            place = place_of(a, b, *whole, cut) if whole else None
            if name is None or whole is None or place is None:
                self._outside += [(part, a), (part, b)]
                continue
            del wanted[part]
            rank = whole[0].shape[0]
            self._slots.append(Slot(name, self._layers[name], a[:rank], b[:, :rank], *place))
            self._outside += [(part, a[rank:]), (part, b[:, rank:])]
        if wanted:
            raise SyncError(
                f"vLLM has no LoRA slot for {listed(list(wanted.values()))}: it cannot serve this adapter. Use "
                "weights='gather', which merges it, or leave these modules out of the adapter's target_modules."
            )

    def _parts(self, index: int) -> Iterator[tuple[str, Tensor, Tensor, Cut]]:
        """Every unfused module that vLLM can adapt: its name there, A (max rank, in) and B (out, max rank), and how
        vLLM cuts whole factors for them."""
        from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA

        for name, wrapper in self._manager.modules.items():
            parts = self._manager.packed_modules.get(name, [name])
            if isinstance(wrapper, BaseLinearLayerWithLoRA) and len(parts) == wrapper.n_slices:
                slots = zip(parts, wrapper.lora_a_stacked, wrapper.lora_b_stacked, strict=True)
                for number, (part, a, b) in enumerate(slots):
                    yield part, a[index, 0], b[index, 0], Cut(wrapper, number)

    def _theirs(self, name: str) -> str:
        """vLLM's name of a module, found as it finds those of an adapter on disk."""
        mapper = getattr(self._manager.model, "hf_to_vllm_mapper", None)
        if mapper is None:
            return name
        weight = ".lora_A.weight"
        return str(mapper.get_rename_mapper().map_name(name + weight)).removesuffix(weight)

    # --- the adapter's state ----------------------------------------------------------------------------------------

    def _active(self) -> str:
        active = active_adapters(self._layers)
        if len(active) != 1:
            raise SyncError(f"{len(active)} adapters are active ({', '.join(active)}), vLLM holds one: `set_adapter`.")
        return active[0]

    def _split(self) -> tuple[list[Slot], list[Slot]]:
        """The slots whose adapter is applied now, and those whose is disabled."""
        live: list[Slot] = []
        idle: list[Slot] = []
        for s in self._slots:
            if s.layer.merged:
                raise SyncError(f"The adapter is merged into {s.name}, and would count twice: `unmerge_adapter` first.")
            if self._adapter not in s.layer.active_adapters:
                raise SyncError(
                    f"The slots were made for adapter {self._adapter!r}, but {', '.join(s.layer.active_adapters)!r} is "
                    f"active in {s.name}: `set_adapter({self._adapter!r})` before a sync."
                )
            (idle if s.layer.disable_adapters else live).append(s)
        return live, idle

    def _stray(self) -> list[str]:
        names = [f"{part} (outside the adapter)" for part, _ in self._outside]
        return list(dict.fromkeys(_flagged(names, [t.any() for _, t in self._outside])))


def _flagged(names: list[str], flags: list[Tensor]) -> list[str]:
    values = torch.stack(flags).tolist() if flags else []
    return [name for name, flag in zip(names, values, strict=True) if flag]
