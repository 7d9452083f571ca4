"""The trainer's LoRA adapter in vLLM's LoRA slots: copied from memory to memory, never merged, never through a file.

vLLM allocates the slots of every wrapped layer once, when the engine is built, and its kernels and CUDA graphs read
them at those addresses. An empty adapter is registered there under a fixed id; each write copies A and scaling * B of
every PEFT layer into the slots. vLLM never sees the trainer's tensors: its own way of loading an adapter would keep
them and multiply them by the scaling in place.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from trlx_hybrid.errors import SyncError, listed
from trlx_hybrid.policy.policy import Policy, unwrapped_name
from trlx_hybrid.policy.sharded import whole
from trlx_hybrid.weights.verify import Rotation

from ..private.lora import LoRASlots, ModuleSlots
from ..private.models import adapter_ranks, without_adapters
from .loader import differ, flagged

if TYPE_CHECKING:
    from peft import LoraConfig
    from peft.tuners.lora.layer import LoraLayer
    from vllm import LLM
    from vllm.lora.request import LoRARequest

ADAPTER_ID = 1
"""The adapter's id. vLLM's warm-up adapters count from 1: a dummy run then finds this id taken, and uses it instead of
evicting it."""
OUTSIDE = 32
"""The number of parts of vLLM's slots that one sync checks for zeros, of those that the adapter does not fill.

Each slot has about four such parts.
"""
UNSERVED = {
    "use_dora": "DoRA scales the merged weight, which no LoRA slot holds",
    "modules_to_save": "it trains whole modules beside the LoRA layers",
    "trainable_token_indices": "it trains rows of the embeddings",
    "target_parameters": "it adapts fused expert parameters, not layers",
    "lora_bias": "vLLM's slots have no bias",
    "layer_replication": "it repeats layers that share base weights",
    "alora_invocation_tokens": "an activated LoRA starts in the middle of a sequence",
    "arrow_config": "Arrow routes each token between adapters",
}
"""Fields of LoraConfig that change what an adapter computes, with the reason that vLLM's slots cannot serve them.

Other variants are found on the layers themselves.
"""


# --- what vLLM can serve ----------------------------------------------------------------------------------------------


def lora_arguments(policy: Policy, dtype: torch.dtype | None = None) -> dict[str, Any] | str:
    """Return the engine arguments with which vLLM can hold this policy's adapter, or why it cannot.

    Only the targeted layers are wrapped, and a fused one if any of its parts is: a wrapped layer costs two more kernels
    per step and slots of its own, and vLLM refuses to wrap the head of vocabularies above 258,048.

    Args:
        policy: the live policy, before the engine is built.
        dtype: the dtype that the engine will compute in, if known.
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
        "max_lora_rank": next(size for size in adapter_ranks() if size >= rank),
        "lora_target_modules": sorted({name.rpartition(".")[2] for name in layers}),
    }


def lora_layers(policy: Policy) -> dict[str, LoraLayer]:
    """Return PEFT's LoRA layers in model order, each under the name that its module had before PEFT wrapped it."""
    if "peft" not in sys.modules:  # a PEFT model cannot exist without it, and importing it takes a second
        return {}
    from peft.tuners.lora.layer import LoraLayer

    found = {}
    for name, module in policy.base.named_modules():
        if isinstance(module, LoraLayer):
            found[unwrapped_name(name)] = module
    return found


def active_adapters(layers: dict[str, LoraLayer]) -> list[str]:
    """Return the sorted names of the adapters that are active in at least one of these LoRA layers."""
    return sorted({a for layer in layers.values() for a in layer.active_adapters if a in layer.r})


def unserved(policy: Policy, dtype: torch.dtype | None) -> str | None:
    """Return why vLLM's LoRA slots cannot hold what this policy trains, or None.

    Args:
        policy: the live policy.
        dtype: the dtype that the engine will compute in; None where it is not known yet.
    """
    from vllm.platforms import current_platform

    if not policy.adapters:
        return "the policy is not a PEFT model: there is no adapter to serve"
    reason = _unserved_config(policy) or _unserved_layers(policy) or without_adapters(policy.architecture)
    if reason is not None:
        return reason
    if policy.fsdp_version == 1:
        return "FSDP1 flattens the adapter's parameters. Set `fsdp_version: 2` in the accelerate config"
    for name, p in policy.module.named_parameters():
        if hasattr(p, "ds_id"):
            return f"{name} is in ZeRO-3's flat buffers: gather merges the adapter instead. Or use FSDP2"
    if dtype is torch.float32 and not current_platform.is_cpu():
        return "vLLM's LoRA kernels compute in 16 bits, and the engine in float32. Set engine_options dtype='bfloat16'"
    rank, largest = largest_rank(lora_layers(policy)), adapter_ranks()[-1]
    return f"the adapter's rank is {rank}, and vLLM's largest is {largest}" if rank > largest else None


def _unserved_config(policy: Policy) -> str | None:
    configs = cast("dict[str, LoraConfig]", policy.module.peft_config)
    for name, config in configs.items():
        kind = getattr(config.peft_type, "value", config.peft_type)
        if kind != "LORA":
            return f"adapter {name!r} is of type {kind}; vLLM serves LoRA"
    active = active_adapters(lora_layers(policy))
    if len(active) != 1:
        return f"{len(active)} adapters are active ({', '.join(active)}); vLLM applies one. Use `set_adapter`"
    config = configs[active[0]]
    if config.bias != "none":
        return f"adapter {active[0]!r} trains biases of the base (bias={config.bias!r})"
    for field, why in UNSERVED.items():
        if getattr(config, field):
            return f"adapter {active[0]!r} has {field}: {why}"
    return None


def _unserved_layers(policy: Policy) -> str | None:
    from peft.tuners.lora.layer import Linear
    from peft.utils.other import AuxiliaryTrainingWrapper

    plain = {Linear, getattr(sys.modules.get("peft.tuners.lora.bnb"), "Linear4bit", Linear)}

    for name, module in policy.base.named_modules():
        if isinstance(module, AuxiliaryTrainingWrapper):
            return f"{name} is trained as a whole ({type(module).__name__})"
    layers = lora_layers(policy)
    (adapter,) = active_adapters(layers)
    head = policy.base.get_output_embeddings()
    for name, layer in layers.items():
        if type(layer) not in plain:  # subclasses compute something else: sharded or adaptive layers
            return f"{name} is adapted by PEFT's {type(layer).__name__} layer; vLLM's slots hold plain linear ones"
        if layer is head:
            return f"{name} is the output head: vLLM would scale a slot with the vocabulary and drop prompt log-probs"
        if name.rpartition(".")[2].isdigit():
            return (
                f"{name} ends in a number: vLLM goes by the last part of a name, and would choose whole blocks, too. "
                "Leave it out of the adapter's target_modules"
            )
        variant = layer.lora_variant.get(adapter)
        if variant is not None:
            return f"{name} computes a variant of LoRA ({type(variant).__name__})"
        if layer.lora_bias.get(adapter):
            return f"{name} has lora_bias: {UNSERVED['lora_bias']}"
    return None


def largest_rank(layers: dict[str, LoraLayer]) -> int:
    """Return the largest rank that an active adapter has in any layer: PEFT's `rank_pattern` may change it by layer."""
    active = active_adapters(layers)
    return max(int(layer.r[a]) for layer in layers.values() for a in active if a in layer.r)


# --- the slots --------------------------------------------------------------------------------------------------------


class AdapterSlots:
    """vLLM's LoRA slots (the tensors that hold an adapter's A and B for each layer), filled from the trainer's model.

    Args:
        llm: vLLM's LLM, in process, built with `lora_arguments`.
        policy: the policy that these arguments were made from.

    Raises:
        SyncError: vLLM has no slot for some adapted module, or memory beyond the adapter's rank is not zero.
    """

    def __init__(self, llm: LLM, policy: Policy) -> None:
        self._engine = LoRASlots(llm, ADAPTER_ID)
        self._policy, self._same_layers = policy, True
        self._layers = lora_layers(policy)
        (self._adapter,) = active_adapters(self._layers)
        self._slots: list[Slot] = []
        self._outside: list[tuple[str, Tensor]] = []
        self._turns, self._outside_turns = Rotation(), Rotation(OUTSIDE)
        self.reset()

    def reset(self) -> None:
        """Zero all slots and register the adapter with vLLM again; a `write` must follow.

        It must be called after a sleep that freed the weights. The slots lie in the same memory. So do the buffers that
        say which token takes which adapter, and vLLM refills these only when the batch's composition changes.

        Raises:
            SyncError: vLLM has no slot for some adapted module, or memory beyond the adapter's rank is not zero.
        """
        self._engine.register()
        self._resolve()
        stray = _stray(self._outside)
        if stray:
            raise SyncError(
                f"vLLM's LoRA slots are not zero where they must be: {listed(stray)}. Use weights='gather'."
            )

    @property
    def tensors(self) -> int:
        """The number of adapter tensors, A and B of each layer, that have a slot."""
        return 2 * len(self._slots)

    def write(self) -> int:
        """Copy the adapter into the slots, in a few multi-tensor launches; a disabled adapter is written as zeros.

        Collective where the policy is sharded: each factor is gathered.

        Returns:
            Bytes of adapter tensors read.

        Raises:
            SyncError: the adapter is merged, is no longer the one the slots were made for, or has other shapes.
        """
        if not self._same_layers:
            self._refuse_other_layers()
        if not self._engine.held():
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

    def forget(self) -> None:
        """Let the next write check that PEFT's layers are still those that the slots were made for.

        Called when modules of the policy may have been replaced.
        """
        self._same_layers = False

    def differing(self, full: bool = True) -> list[str]:
        """Compare the slots bit for bit with A and scaling * B, and check that what the adapter does not fill is zero.

        Collective where the policy is sharded.

        Args:
            full: compare all slots; else a few at each call, in turn.

        Returns:
            The names of the modules whose slots differ, or are not zero where they must be.
        """
        live, idle = self._split()
        chosen = self._slots if full else self._turns.take(self._slots)
        taken = {id(s) for s in chosen}
        live, idle = ([s for s in slots if id(s) in taken] for slots in (live, idle))
        names, flags = [], []
        for s, (a, b, scaling) in zip(live, factors_of(live, self._adapter), strict=True):
            a, b = s.parts(a, b)
            for ours, theirs in ((s.a, a), (s.b, torch._foreach_mul([b], [scaling])[0])):
                names.append(s.name)
                flags.append(differ(ours, theirs))
        for s in idle:
            names += [s.name, s.name]
            flags += [s.a.any(), s.b.any()]
        outside = self._outside if full else self._outside_turns.take(self._outside)
        return [*dict.fromkeys(flagged(names, flags)), *_stray(outside)]

    def request(self, version: int) -> LoRARequest:
        """Return the `LoRARequest` with which vLLM samples a prompt from base and adapter.

        Args:
            version: weight version in the slots. It is part of the name, which is a key of vLLM's prefix cache.

        Raises:
            SyncError: vLLM dropped the adapter since the last write.
        """
        from vllm.lora.request import LoRARequest

        if not self._engine.held():
            raise SyncError("vLLM dropped the adapter from its slots since the last weight sync: sync again.")
        return LoRARequest(f"policy-{version}", ADAPTER_ID, "(in memory)")

    # --- where things lie -------------------------------------------------------------------------------------------

    def _resolve(self) -> None:
        """Find the slots of every adapted module, and everything in vLLM's slots that must stay zero.

        Raises:
            SyncError: vLLM has no slot for an adapted module.
        """
        adapted = (name for name, layer in self._layers.items() if self._adapter in layer.lora_A)
        wanted = {self._engine.name_of(name): name for name in adapted}
        self._slots, self._outside = [], []
        for module in self._engine.modules():
            part = module.name
            self._outside += [(part, spare) for spare in module.spare]
            slot = self._slot(wanted[part], module) if part in wanted else None
            if slot is None:
                self._outside += [(part, module.a), (part, module.b)]
                continue
            del wanted[part]
            self._slots.append(slot)
            rank = slot.a.shape[0]
            self._outside += [(part, module.a[rank:]), (part, module.b[:, rank:])]
        if wanted:
            raise SyncError(
                f"vLLM has no LoRA slot for {listed(list(wanted.values()))}, or computes past it: it cannot serve this "
                "adapter. Use weights='gather', which merges it, or leave these modules out of the adapter's "
                "target_modules."
            )

    def _slot(self, name: str, module: ModuleSlots) -> Slot | None:
        """Return the part of vLLM's slots for a module that its adapter fills, or None where A and B do not fit there.

        Args:
            name: the policy's name of the module.
            module: vLLM's slots for it, of the largest rank.
        """
        layer = self._layers[name]
        (rank, columns), (rows, _) = shapes = [w.shape for w in weights_of(layer, self._adapter)]
        cut = (columns, rows) != (module.a.shape[1], module.b.shape[0])
        slot = Slot(name, layer, module.a[:rank], module.b[:, :rank], module if cut else None)
        own = slot.parts(*(torch.empty(shape, device="meta") for shape in shapes))
        return slot if [t.shape for t in own] == [slot.a.shape, slot.b.shape] else None

    # --- the adapter's state ----------------------------------------------------------------------------------------

    def _refuse_other_layers(self) -> None:
        """Check that the adapter's layers are still those that the slots were made for.

        Raises:
            SyncError: layers were replaced, unloaded or added; the message names them.
        """
        now = lora_layers(self._policy)
        gone = [name for name, layer in self._layers.items() if now.get(name) is not layer]
        new = [name for name in now.keys() - self._layers.keys() if self._adapter in now[name].r]
        if gone or new:
            other = listed(gone or sorted(new))
            raise SyncError(
                f"vLLM's slots were made for other layers of the adapter than there are now: {other}. Release the "
                "engine when an adapter is unloaded or put on anew (`session.release_engine()`): the next rollout "
                "builds another."
            )
        self._same_layers = True

    def _split(self) -> tuple[list[Slot], list[Slot]]:
        """Return the slots of layers that apply their adapter now, and those of layers where it is disabled.

        Raises:
            SyncError: the adapter is merged into some layer, or another one is active there.
        """
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


def _stray(outside: Sequence[tuple[str, Tensor]]) -> list[str]:
    """Return the names of those tensors that are not zero.

    Args:
        outside: parts of vLLM's slots that the adapter does not fill, each with vLLM's name of the module.
    """
    names = [f"{part} (outside the adapter)" for part, _ in outside]
    return list(dict.fromkeys(flagged(names, [t.any() for _, t in outside])))


# --- where one layer goes ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Slot:
    """The part of vLLM's memory that holds the adapter of one PEFT layer.

    Under tensor parallelism, an engine's rank has some columns of A or some rows of B, as it has those of the weight.

    Attributes:
        name: the policy's name of the adapted module.
        layer: PEFT's layer.
        a: view of vLLM's memory, (r, in).
        b: view of vLLM's memory, (out, r).
        cut: what cuts out this rank's parts of A and B; None where the rank has all of both.
    """

    name: str
    layer: LoraLayer
    a: Tensor
    b: Tensor
    cut: ModuleSlots | None

    def parts(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Return this rank's parts of the whole A (r, in) and B (out, r)."""
        return (a, b) if self.cut is None else self.cut.parts(a, b)


def factors_of(slots: Sequence[Slot], adapter: str) -> list[tuple[Tensor, Tensor, float]]:
    """Return PEFT's A (r, in), B (out, r) and scaling for each slot. Collective where the policy is sharded.

    Args:
        adapter: the adapter's name in PEFT.
    """
    factors = whole([weight for s in slots for weight in weights_of(s.layer, adapter)])
    scalings = [float(s.layer.scaling[adapter]) for s in slots]
    return list(zip(factors[::2], factors[1::2], scalings, strict=True))


def weights_of(layer: LoraLayer, adapter: str) -> tuple[Tensor, Tensor]:
    """Return A and B of a PEFT layer's adapter, sharded if the policy is.

    They are looked up at each call, because training may rebind any of them. The lookup avoids
    `nn.Module.__getattr__`, which takes longer than the copies for some 200 layers.
    """
    parts = layer._modules
    a = parts["lora_A"]._modules[adapter]._parameters["weight"].data
    return a, parts["lora_B"]._modules[adapter]._parameters["weight"].data
