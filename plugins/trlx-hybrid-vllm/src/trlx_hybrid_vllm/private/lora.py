"""Access to vLLM's LoRA slots (the tensors in which it keeps A and B of each adapted layer), and its LoRA wrappers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .engine import runner_of

if TYPE_CHECKING:
    from vllm import LLM
    from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA


def adapter_slots_of(module: torch.nn.Module) -> list[torch.Tensor]:
    """Return the LoRA slots of one layer, the tensors in which vLLM keeps an adapter's A and B; [] without any.

    They are neither parameters nor buffers.
    """
    stacked = [*getattr(module, "lora_a_stacked", ()), *getattr(module, "lora_b_stacked", ())]
    return [tensor for tensor in stacked if isinstance(tensor, torch.Tensor)]


@contextmanager
def unwrapped(model: torch.nn.Module) -> Iterator[None]:
    """Replace vLLM's LoRA wrappers in a model by the layers that they wrap, inside the context.

    vLLM's weight loader needs the names that the layers have without wrappers. Changes nothing without `enable_lora`. A
    wrapper can sit at several places of the model (tied heads, routers); all are put back.
    """
    from vllm.lora.layers import BaseLayerWithLoRA

    places = [
        (parent, key, child)
        for parent in list(model.modules())
        for key, child in parent._modules.items()
        if isinstance(child, BaseLayerWithLoRA)
    ]
    try:
        for parent, key, child in places:
            layer = child
            while isinstance(layer, BaseLayerWithLoRA):
                layer = layer.base_layer
            parent._modules[key] = layer
        yield
    finally:
        for parent, key, child in places:
            parent._modules[key] = child


def bypassed(model: torch.nn.Module) -> set[int]:
    """Return the `id()` of each layer that the model also calls without the LoRA wrapper that vLLM put around it.

    The model holds such a layer at two places, and only one was wrapped, so an adapter there might have no effect.
    """
    from vllm.lora.layers import BaseLayerWithLoRA

    wrapped = {id(module.base_layer) for module in model.modules() if isinstance(module, BaseLayerWithLoRA)}
    plain = (module for module in model.modules() if not isinstance(module, BaseLayerWithLoRA))
    return wrapped & {id(child) for module in plain for child in module._modules.values()}


@dataclass(frozen=True, slots=True)
class ModuleSlots:
    """vLLM's LoRA slots for one module: the tensors in which it keeps the module's A and B.

    A fused layer, such as q, k and v in one, has several modules.

    Attributes:
        name: the module's name in vLLM.
        a: the tensor for A, (largest rank, in).
        b: the tensor for B, (out, largest rank).
        spare: further tensors of the layer that must stay zero; [] for all but the first module of a fused layer.
    """

    name: str
    a: Tensor
    b: Tensor
    spare: list[Tensor]
    _layer: BaseLinearLayerWithLoRA
    _number: int

    def parts(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Return the parts of a whole A (r, in) and B (out, r) that this tensor-parallel rank of the engine holds."""
        layer = self._layer
        if layer.n_slices == 1:
            return layer.slice_lora_a(a), layer.slice_lora_b(b)
        all_a, all_b = ([factor if i == self._number else None for i in range(layer.n_slices)] for factor in (a, b))
        return layer.slice_lora_a(all_a)[self._number], layer.slice_lora_b(all_b)[self._number]


class LoRASlots:
    """The tensors (slots) in which an in-process engine keeps the A and B of its one LoRA adapter.

    Args:
        llm: vLLM's LLM, built with `enable_lora`.
        adapter: the id under which the adapter is registered with vLLM.
    """

    def __init__(self, llm: LLM, adapter: int) -> None:
        self._manager = runner_of(llm).lora_manager._adapter_manager  # the CPU's and the GPU's runner share its mixin
        self._adapter = adapter

    def register(self) -> None:
        """Zero the tensors for A and B, remove all adapters that vLLM knows, and register one without weights."""
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.lora_weights import LoRALayerWeights

        manager, name = self._manager, "none"
        nothing = LoRALayerWeights(name, 1, 1, torch.zeros(1, 1), torch.zeros(1, 1))  # vLLM wants one layer at least
        manager.remove_all_adapters()
        manager.add_adapter(LoRAModel(self._adapter, 1, {name: nothing}))
        manager.activate_adapter(self._adapter)  # zeroes its slot in every layer it has no weights for

    def held(self) -> bool:
        """Return whether vLLM still has the adapter in its slots."""
        manager = self._manager
        return self._adapter in manager.lora_index_to_id and self._adapter in manager.list_adapters()

    def modules(self) -> Iterator[ModuleSlots]:
        """Yield the tensors for A and B of every module that vLLM can adapt; `register` must come first."""
        from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA

        from .adapted_linear import beside_slots

        index = self._manager.lora_index_to_id.index(self._adapter)
        passed = bypassed(self._manager.model)
        for name, layer in self._manager.modules.items():
            if id(layer.base_layer) in passed:
                continue
            parts = self._manager.packed_modules.get(name, [name])
            if isinstance(layer, BaseLinearLayerWithLoRA) and len(parts) == layer.n_slices:
                slots = zip(parts, layer.lora_a_stacked, layer.lora_b_stacked, strict=True)
                for number, (part, a, b) in enumerate(slots):
                    spare = [] if number else beside_slots(layer)
                    yield ModuleSlots(part, a[index, 0], b[index, 0], spare, layer, number)

    def name_of(self, name: str) -> str:
        """Return the name in vLLM of a module of the policy, mapped as vLLM does it when it loads an adapter from disk.

        Args:
            name: the policy's name of the module.
        """
        mapper = getattr(self._manager.model, "hf_to_vllm_mapper", None)
        if mapper is None:
            return name
        weight = ".lora_A.weight"
        return str(mapper.get_rename_mapper().map_name(name + weight)).removesuffix(weight)
