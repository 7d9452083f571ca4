"""PEFT layers as the plain modules they stand for, with the adapter merged, and the trainer's weights left alone.

PEFT's own `merge_adapter` writes into the base weights and subtracts the adapter again afterwards, which leaves
rounding behind at every sync. Here the base tensor is saved before and put back after, bit for bit.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class AdaptedModule:
    """A module under PEFT: the layers that adapt it, outermost first, and the module they wrap."""

    layers: tuple[Any, ...]
    base: nn.Module

    @torch.no_grad()
    def merged(self) -> dict[str, Tensor]:
        """Parameters of the wrapped module with every active adapter merged; they stay valid afterwards."""
        parameters = dict(self.base.named_parameters())
        pending = [
            layer for layer in self.layers if layer.active_adapters and not layer.disable_adapters and not layer.merged
        ]
        if not pending:
            return {name: p.detach() for name, p in parameters.items()}
        saved = {name: p.detach().clone() for name, p in parameters.items()}
        try:
            for layer in reversed(pending):
                layer.merge()
            return {name: p.detach().clone() for name, p in parameters.items()}
        finally:
            for layer in pending:
                layer.unmerge()
            for name, p in parameters.items():
                p.data.copy_(saved[name])


def adapted(module: nn.Module) -> AdaptedModule | None:
    """`module` as an adapted one, or None where it is no PEFT layer or wrapper."""
    if "peft" not in sys.modules:  # a PEFT model cannot exist without it, and importing it takes a second
        return None
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import ModulesToSaveWrapper, TrainableTokensWrapper

    if isinstance(module, ModulesToSaveWrapper):
        return AdaptedModule((), module.modules_to_save[module.active_adapters[0]])
    if isinstance(module, TrainableTokensWrapper):
        module = module.token_adapter
    if not isinstance(module, BaseTunerLayer):
        return None
    layers: list[Any] = [module]
    while isinstance(layers[-1].base_layer, BaseTunerLayer):  # PEFT stacks one wrapper per adapted expert parameter
        layers.append(layers[-1].base_layer)
    return AdaptedModule(tuple(layers), layers[-1].base_layer)


def parted_head(model: Any) -> nn.Module | None:
    """The output head of a transformers model whose config ties it to the input embeddings, where adapters change one
    of the two without the other: it then has weights of its own, for an engine too. None otherwise."""
    config = model.config
    if not (config.tie_word_embeddings or config.get_text_config().tie_word_embeddings):
        return None
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    ends = [adapted(end) for end in (embeddings, head) if end is not None]
    if not any(ends) or getattr(getattr(head, "token_adapter", None), "tied_adapter", None) is not None:
        return None
    whole = all(end is not None and not end.layers for end in ends)  # trained as modules of their own: perhaps as one
    return None if whole and len({id(end.base.weight) for end in ends if end is not None}) == 1 else head
