"""Functions about the PEFT adapters in a model: the layers that hold adapters, their parameters, and their state."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from peft import PeftModel
    from peft.tuners.tuners_utils import BaseTunerLayer


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
