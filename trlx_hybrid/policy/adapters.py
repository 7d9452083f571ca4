"""The PEFT adapters in a model: the layers that hold them, their parameters and state, and their merging into copies of
the base weights, so that the trainer's weights stay as they are.

PEFT's own `merge_adapter` writes into the base weights and subtracts the adapter again afterwards, which leaves
rounding behind at every sync. Here the base tensor is saved before the merge and restored afterwards, bit for bit.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..errors import SyncError
from .sharded import unsharded

if TYPE_CHECKING:
    from peft import PeftModel
    from peft.tuners.tuners_utils import BaseTunerLayer
    from transformers import PreTrainedModel


def tuned(model: nn.Module) -> bool:
    """Return whether a model is a PEFT model with adapted layers, such as LoRA's. False for prompt learning, which
    adapts no layer."""
    if "peft" not in sys.modules or not hasattr(model, "peft_config"):
        return False
    from peft import PeftModel
    from peft.tuners.tuners_utils import BaseTuner

    return isinstance(model, PeftModel) and isinstance(model.base_model, BaseTuner)


def adapter_layers(modules: Iterable[nn.Module]) -> list[BaseTunerLayer]:
    """Return the modules that PEFT has put into a model, out of the given ones: PEFT's tuner layers, and its wrappers
    such as `ModulesToSaveWrapper`."""
    if "peft" not in sys.modules:
        return []
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    found = list(modules)
    # checked once per class: per module it would take 1 ms for adapters in 28 layers
    kinds = {kind for kind in set(map(type, found)) if issubclass(kind, BaseTunerLayer | AuxiliaryTrainingWrapper)}
    return [module for module in found if type(module) in kinds]


def held_by(layer: BaseTunerLayer) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield (adapter name, parameter) for each adapter parameter that a PEFT layer holds itself, rather than in a PEFT
    layer inside it.

    For two adapters of the same kind the order of the parameters is the same.
    """
    for attribute in layer.adapter_layer_names:
        held = getattr(layer, attribute, None)  # a wrapper also names its inner layer's, with a dot: skipped
        for adapter, part in held.items() if isinstance(held, nn.ModuleDict | nn.ParameterDict) else ():
            for parameter in part.parameters() if isinstance(part, nn.Module) else [part]:
                yield adapter, parameter


@contextmanager
def adapters_kept(model: PeftModel, modules: Iterable[nn.Module] | None = None) -> Iterator[None]:
    """Restore the state of a PEFT model's adapters on exit: which ones are active, and which parameters of the model
    require gradients. Does nothing for other models.

    Args:
        modules: all modules of the model, where the caller has listed them already.
    """
    if not tuned(model):
        yield
        return
    found = list(model.modules() if modules is None else modules)
    layers = [(layer, copy.copy(layer._active_adapter)) for layer in adapter_layers(found)]
    names = model.active_adapter, copy.copy(model.base_model.active_adapter)
    trained = [(p, p.requires_grad) for module in found for p in module._parameters.values() if p is not None]
    try:
        yield
    finally:
        model.active_adapter, model.base_model.active_adapter = names
        for layer, active in layers:
            layer._active_adapter = active
        for p, required in trained:
            if p.requires_grad is not required:
                p.requires_grad_(required)


@dataclass(frozen=True, slots=True)
class AdaptedModule:
    """A module of the base model that PEFT adapts: its PEFT layers, outermost first, and the original module that they
    wrap (`base`)."""

    layers: tuple[BaseTunerLayer, ...]
    base: nn.Module

    @property
    def pending(self) -> list[BaseTunerLayer]:
        """The layers whose adapters are in effect but not merged into the base weights."""
        return [
            layer for layer in self.layers if layer.active_adapters and not layer.disable_adapters and not layer.merged
        ]

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters of the original module and of all PEFT layers around it."""
        return list((self.layers[0] if self.layers else self.base).parameters())

    @torch.no_grad()
    def merged(self) -> dict[str, Tensor]:
        """Return the original module's parameters by name, as copies into which every active adapter is merged. If no
        adapter has to be merged, the parameters themselves are returned, detached. Sharded parameters stay sharded
        where PEFT can merge DTensors, as it can for plain LoRA; otherwise full tensors are returned.

        Raises:
            SyncError: PEFT cannot merge one of the adapters.
        """
        pending = self.pending
        if not pending:
            return {name: p if hasattr(p, "ds_id") else p.detach() for name, p in self.base.named_parameters()}
        with nullcontext() if all(_beyond_lora(layer) is None for layer in pending) else unsharded(self.layers[0]):
            return self._merged(pending)

    def _merged(self, pending: list[BaseTunerLayer]) -> dict[str, Tensor]:
        parameters = dict(self.base.named_parameters())
        saved = {name: (p.data, p.detach().clone()) for name, p in parameters.items()}
        try:
            for layer in reversed(pending):
                _merge(layer)
            merged = self.layers[-1].base_layer  # LayerNorm tuning replaces it by its own module
            return {name: p.detach().clone() for name, p in merged.named_parameters()}
        finally:
            for layer in pending:
                if layer.merged:
                    layer.unmerge()
            for name, p in parameters.items():
                memory, bits = saved[name]
                if p.stride() != memory.stride():  # OFT leaves the weight transposed, in other memory
                    p.data = memory
                p.data.copy_(bits)


def _merge(layer: BaseTunerLayer) -> None:
    try:
        layer.merge()
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError, ValueError) as error:
        kind, why = f"{type(layer).__module__}.{type(layer).__name__}", f"{type(error).__name__}: {error}"
        raise SyncError(
            f"PEFT cannot merge its {kind} into the base ({why.rstrip(': .')}), so that no engine can be given what it "
            "computes. Train LoRA without a bias of its own, or let transformers generate."
        ) from error


def adapted(module: nn.Module) -> AdaptedModule | None:
    """Return the PEFT layers that a module consists of, with the module that they wrap, as an AdaptedModule; None for a
    module that is neither a PEFT layer nor one of PEFT's wrappers."""
    if "peft" not in sys.modules:  # without it there is no PEFT model, and importing it takes a second
        return None
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import ModulesToSaveWrapper, TrainableTokensWrapper

    if isinstance(module, ModulesToSaveWrapper):
        trained = [name for name in module.active_adapters if name in module.modules_to_save]
        whole = trained and not module.disable_adapters
        return AdaptedModule((), module.modules_to_save[trained[0]] if whole else module.original_module)
    if isinstance(module, TrainableTokensWrapper):
        module = module.token_adapter
    if not isinstance(module, BaseTunerLayer):
        return None
    layers = [module]
    while isinstance(layers[-1].base_layer, BaseTunerLayer):  # PEFT stacks one wrapper per adapted expert parameter
        layers.append(layers[-1].base_layer)
    return AdaptedModule(tuple(layers), layers[-1].base_layer)


def adapted_modules(model: nn.Module) -> Iterator[tuple[str, AdaptedModule]]:
    """Yield (name, AdaptedModule) for each module of a model that PEFT adapts. Where several PEFT layers adapt one
    module, the name of the outermost layer is taken."""
    seen: set[int] = set()
    for name, module in model.named_modules():
        found = None if id(module) in seen else adapted(module)
        if found is not None:
            seen.update(id(layer) for layer in found.layers)
            yield name, found


def beyond_lora(model: PreTrainedModel) -> str | None:
    """Return why some adapter of a transformers model is more than plain LoRA on a single layer's weight, as text with
    the layer's name; None where all are plain LoRA."""
    found = list(adapted_modules(model))
    if found and untied_head(model) is not None:
        return "adapters part the output head from the embeddings that it is tied to (`gather` serves that)"
    whys = ((name, _beyond_lora(layer)) for name, module in found for layer in module.layers)
    return next((f"{name} {why}, which is merged as a whole (`gather`)" for name, why in whys if why), None)


def _beyond_lora(layer: BaseTunerLayer) -> str | None:
    from peft.tuners.lora.layer import Embedding, Linear

    kind = type(layer)
    if kind not in (Linear, Embedding):
        return f"is adapted by PEFT's {kind.__name__} layer"
    variants = [v for a, v in layer.lora_variant.items() if a in layer.active_adapters]
    return f"computes a variant of LoRA ({type(variants[0]).__name__})" if variants else None


def untied_head(model: PreTrainedModel) -> nn.Module | None:
    """Return the output head of a transformers model if its config ties the head to the input embeddings, but adapters
    change only one of the two: the head then has weights of its own, and needs them in the engine, too. Return None
    otherwise."""
    configs = model.config, model.config.get_text_config()  # a vision-language model's text config may not have it
    if not any(getattr(config, "tie_word_embeddings", False) for config in configs):
        return None
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    ends = [adapted(end) for end in (embeddings, head) if end is not None]
    if not any(ends) or getattr(getattr(head, "token_adapter", None), "tied_adapter", None) is not None:
        return None
    whole = all(end is not None and not end.layers for end in ends)  # separate modules: perhaps one weight
    return None if whole and len({id(end.base.weight) for end in ends if end is not None}) == 1 else head
