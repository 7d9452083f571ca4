"""Weight sync of LoRA adapters (`weights="lora"`): the base stays in the engine, and each sync moves only the adapter.

The adapter is copied from memory to memory, never merged, never through a file. vLLM's LoRA slots are the tensors in
which it keeps A and B of each adapted layer. It allocates them once, when the engine is built, and its kernels and CUDA
graphs read them at those addresses. An empty adapter is registered with vLLM under a fixed id; each sync copies A and
scaling * B of every PEFT layer into the slots. vLLM never sees the trainer's tensors: its own way of loading an adapter
would keep them and multiply them by the scaling in place.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from trlx_hybrid.contract.protocols import WeightSync
from trlx_hybrid.contract.types import LoadReport
from trlx_hybrid.errors import SyncError, listed
from trlx_hybrid.memory.ledger import plain_tensors
from trlx_hybrid.policy import quantised
from trlx_hybrid.policy.fingerprint import Frozen
from trlx_hybrid.policy.policy import Policy, unwrapped_name
from trlx_hybrid.policy.sharded import whole
from trlx_hybrid.weights.verify import SAMPLED_TENSORS, Rotation

from ..private.lora import LoRASlots, ModuleSlots
from .loader import counted, differ, flagged
from .shared import SharedSync, refuse_other_bits

if TYPE_CHECKING:
    from peft.tuners.lora.layer import LoraLayer
    from trlx_hybrid.session import Session
    from vllm import LLM
    from vllm.lora.request import LoRARequest

ADAPTER_ID = 1
"""The id under which the policy's adapter is registered with vLLM.

vLLM's warm-up adapters are numbered from 1: its dummy runs find this id registered, and use the adapter instead of
evicting it.
"""
OUTSIDE = 32
"""The number of regions of vLLM's LoRA slots, outside of what the adapter fills, that one sync checks for zeros.

Each slot has about four unfilled regions. They are checked in turn.
"""


class LoraSync(WeightSync):
    """Weight sync that copies the adapter from the trainer's memory into vLLM's LoRA slots.

    The base is frozen. The engine either shares the base's memory (`SharedSync`), or has its own copy. The copy is
    loaded once through vLLM's loader (`StreamedBase`) if the policy is sharded or held in 4 bits, if the engine's ranks
    hold slices, or if the engine's bits are not the policy's.

    Each sync moves only the adapter, with one exception. If the policy holds the base in 4 bits, the engine's copy is
    several times as large, so sleep mode frees it, and the next sync writes it again.

    Attributes:
        keeps_weights: True where the engine's base weights must stay in memory after a rollout.
    """

    name = "lora"
    keeps_weights = True

    def __init__(self, session: Session) -> None:
        self._session = session
        self._base: WeightSync = StreamedBase(session)
        self._slots: AdapterSlots | None = None

    def refuses(self) -> str | None:
        """Return why the policy's adapter cannot be copied into this engine's LoRA slots, or None if it can."""
        engine: Any = self._session.live_engine
        if not hasattr(engine, "adapters_refused"):
            return "it reaches into vLLM's memory, and another engine is in use"
        if engine.adapters_refused is not None:
            return str(engine.adapters_refused)
        shared = (SharedSync(self._session, alias, adapted=True) for alias in (True, False))
        reason = None
        for base in (*shared, StreamedBase(self._session)):
            self._base, reason = base, base.refuses()
            if reason is None:
                break
        if reason is not None:
            return reason
        self.keeps_weights = not self._session.policy.in_4_bits
        try:
            self._slots = AdapterSlots(engine.llm, self._session.policy)
        except SyncError as error:
            return str(error)
        return None

    def open(self) -> None:
        """Prepare the sync of the base weights: let policy and engine share memory where they can."""
        self._base.open()

    def sync(self) -> LoadReport:
        """Write the adapter into vLLM's LoRA slots; the first time, the base into the engine's weights as well."""
        engine: Any = self._session.live_engine
        assert self._slots is not None, "refuses() comes first"
        base = self._base.sync()
        moved = self._slots.write()
        engine.adapter = self._slots.request(self._session.weight_version)
        return LoadReport(tensors=base.tensors + self._slots.tensors, bytes=base.bytes + moved)

    def put_back(self) -> bool:
        """Write back the engine's former bits where a sync overwrote base weights that tensors of the user still use.

        If the user's code keeps tensors of the policy, they lie in the memory that policy and engine share. Called
        after the rollout.

        Returns:
            Whether anything was restored, so that the engine no longer has the policy's weights.
        """
        return self._base.put_back()

    def forget(self) -> None:
        """Let the next sync write the frozen base weights again. That sync also checks that PEFT's LoRA layers are
        still the layers for which vLLM's LoRA slots were made, and raises a SyncError if they are not.

        Called when modules of the policy may have been replaced.
        """
        self._base.forget()
        if self._slots is not None:
            self._slots.forget()

    def check(self, full: bool) -> int:
        """Compare the engine's base weights and LoRA slots with the policy's base and adapter, bit for bit.

        Args:
            full: compare everything; else a few tensors at each call, in turn.

        Returns:
            How many tensors were compared.

        Raises:
            SyncError: some differ; the message names them.
        """
        assert self._slots is not None
        checked = self._base.check(full) or 0
        refuse_other_bits("vLLM's LoRA slots hold other bits than the adapter", self._slots.differing(full))
        return checked + (self._slots.tensors if full else min(self._slots.tensors, 2 * SAMPLED_TENSORS))

    def release(self) -> None:
        """Give the policy's base weights that share the closed engine's memory their own memory again."""
        self._base.release()


class StreamedBase(WeightSync):
    """Loads the base model's weights through vLLM's loader once, where policy and engine share no memory.

    Collective: each tensor is gathered in full, one layer at a time. Later syncs load nothing, as long as the engine
    keeps its weights and nobody writes to the base.
    """

    name = "streamed"

    def __init__(self, session: Session) -> None:
        self._session, self._policy = session, session.policy
        self._streamed, self._frozen = False, Frozen()
        self._turns, self._moved = Rotation(), False

    def refuses(self) -> str | None:
        """Return why the base cannot be loaded into the engine, or would have to be loaded at each sync; else None."""
        if self._session.live_engine.quantized:
            return "a quantised engine keeps no copy of the weights"
        for name, p in self._policy.base_parameters().items():
            if p.requires_grad:
                return f"{name} of the base is trained beside the adapter"
        return self._policy.refuses_gather(merge=False)

    def sync(self) -> LoadReport:
        """Load the base into the engine at the first sync, and after the engine lost it or somebody wrote to it."""
        engine = self._session.live_engine
        written = self._session.ranks.any(self._frozen.changed(self._held()))
        self._moved = not self._streamed or engine.weights_lost or written
        if not self._moved:
            engine.weights_written()
            return LoadReport(tensors=0, bytes=0)
        report = engine.load_weights(self._policy.full_weights(merge=False))
        self._streamed = True
        return report

    def _held(self) -> dict[str, Tensor]:
        """Return this rank's tensors of the base by name (shards, quantised bits and their scales), to detect writes.

        Raises:
            SyncError: some of the base is trained by now.
        """
        parameters = self._policy.base_parameters()
        trained = [name for name, p in parameters.items() if p.requires_grad]
        if trained:
            raise SyncError(
                f"{listed(trained)} of the base began to be trained beside the adapter, which was streamed into the "
                "engine once. Train it from the start, or use weights='gather'."
            )
        own = {name: [getattr(p, "ds_tensor", p), *quantised.scales(p)] for name, p in parameters.items()}
        return {f"{name} {n}": t for name, held in own.items() for n, t in enumerate(plain_tensors(held))}

    def forget(self) -> None:
        """Let the next sync load the base into the engine again."""
        self._streamed = False

    def check(self, full: bool) -> int:
        """Compare the engine's base weights with the policy's, bit for bit.

        Args:
            full: compare all tensors; else a few at each call, in turn, and none if the last sync did not load the
                base.

        Returns:
            How many tensors were compared.

        Raises:
            SyncError: names each tensor that differs.
        """
        compared: dict[str, int] = {}
        if full or self._moved:
            only = None if full else set(self._turns.take(self._policy.checkpoint_names()))
            weights = counted(self._policy.full_weights(only, merge=False), compared)
            differing = self._session.live_engine.differing(weights)
            refuse_other_bits("the engine holds other bits than the policy", differing)
        return len(compared)


# --- the adapter ------------------------------------------------------------------------------------------------------


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


# --- the slots --------------------------------------------------------------------------------------------------------


class AdapterSlots:
    """vLLM's LoRA slots (the tensors that hold an adapter's A and B for each layer), filled from the trainer's model.

    Args:
        llm: vLLM's LLM in this process, built with the arguments that `lora_arguments` returned for the policy.
        policy: the policy, a PEFT model with one active adapter.

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

        Must be called after a sleep that freed the weights, since the slots lie in the memory that was freed. The
        buffers that say which token takes which adapter lie there, too. vLLM refills them only when the batch's
        requests have changed, or after adapters were registered again.

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

        Collective where the policy is sharded: each A and B is gathered.

        Returns:
            Bytes of adapter tensors read.

        Raises:
            SyncError: the adapter is merged, is not the adapter that the slots were made for, or has other shapes.
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
        """Let the next `write` check that PEFT's LoRA layers are still the layers for which vLLM's slots were made.

        Called when modules of the policy may have been replaced.
        """
        self._same_layers = False

    def differing(self, full: bool = True) -> list[str]:
        """Compare the slots bit for bit with A and scaling * B, and check that the parts of vLLM's slots that the
        adapter does not fill are zero.

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
        """Return the part of a module's slots in vLLM that its adapter fills, or None where A and B do not fit there.

        Args:
            name: the policy's name of the module.
            module: vLLM's slots for the module, sized for the largest rank that the engine was built for.
        """
        layer = self._layers[name]
        (rank, columns), (rows, _) = shapes = [w.shape for w in weights_of(layer, self._adapter)]
        cut = (columns, rows) != (module.a.shape[1], module.b.shape[0])
        slot = Slot(name, layer, module.a[:rank], module.b[:, :rank], module if cut else None)
        own = slot.parts(*(torch.empty(shape, device="meta") for shape in shapes))
        return slot if [t.shape for t in own] == [slot.a.shape, slot.b.shape] else None

    # --- the adapter's state ----------------------------------------------------------------------------------------

    def _refuse_other_layers(self) -> None:
        """Check that PEFT's LoRA layers are still the layers for which vLLM's LoRA slots were made.

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
        """Return two lists: the slots of layers that apply their adapter now, and the slots of layers whose adapter is
        disabled.

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
    """Return the names of the modules whose LoRA slots are not zero where the adapter does not fill them.

    Args:
        outside: the parts of vLLM's slots that must be zero, each with vLLM's name of its module.
    """
    names = [f"{part} (outside the adapter)" for part, _ in outside]
    return list(dict.fromkeys(flagged(names, [t.any() for _, t in outside])))


# --- where one layer goes ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Slot:
    """The part of vLLM's LoRA slots that holds the adapter of one PEFT layer.

    Under tensor parallelism, each rank of the engine has some columns of A or some rows of B: the columns or rows that
    it has of the weight.

    Attributes:
        name: the policy's name of the adapted module.
        layer: PEFT's layer.
        a: view of vLLM's memory for A, (r, in).
        b: view of vLLM's memory for B, (out, r).
        cut: vLLM's slots of the module, whose `parts` cuts out this rank's share of A and B; None where the rank has
            all of both.
    """

    name: str
    layer: LoraLayer
    a: Tensor
    b: Tensor
    cut: ModuleSlots | None

    def parts(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Return the parts of the whole A (r, in) and B (out, r) that this rank of the engine holds."""
        return (a, b) if self.cut is None else self.cut.parts(a, b)


def factors_of(slots: Sequence[Slot], adapter: str) -> list[tuple[Tensor, Tensor, float]]:
    """Return PEFT's A (r, in), B (out, r) and scaling of each adapted layer. Collective where the policy is sharded.

    Args:
        slots: for each adapted layer, PEFT's layer and the memory in vLLM that holds its adapter.
        adapter: the adapter's name in PEFT.
    """
    factors = whole([weight for s in slots for weight in weights_of(s.layer, adapter)])
    scalings = [float(s.layer.scaling[adapter]) for s in slots]
    return list(zip(factors[::2], factors[1::2], scalings, strict=True))


def weights_of(layer: LoraLayer, adapter: str) -> tuple[Tensor, Tensor]:
    """Return A and B of a PEFT layer's adapter, sharded if the policy is.

    The tensors are looked up at each call, because training may rebind any of them. They are looked up in the modules'
    dicts for speed: for some 200 layers, `nn.Module.__getattr__` would take longer than copying A and B into the
    engine.
    """
    parts = layer._modules
    a = parts["lora_A"]._modules[adapter]._parameters["weight"].data
    return a, parts["lora_B"]._modules[adapter]._parameters["weight"].data
