"""vLLM's model loader for an engine whose weights come later, through a sync. Imports vLLM.

vLLM's own ("dummy") fills persistent buffers with random numbers as well. But what vLLM computes into a buffer when it
builds a model, as Qwen2.5-VL's scale of the pixels, is in no checkpoint, so no sync would ever bring it back.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

from .loading import persistent_buffers

LOAD_FORMAT = "dummy_parameters"


@register_model_loader(LOAD_FORMAT)
class DummyParametersLoader(DummyModelLoader):  # type: ignore[misc]
    """Random parameters; buffers as the model's constructor left them, like before a real checkpoint is loaded."""

    def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
        """As vLLM's, with the persistent buffers put back."""
        buffers = [b for _, b in persistent_buffers(model) if not b.is_meta]
        kept = [b.clone() for b in buffers]
        super().load_weights(model, model_config)
        for buffer, value in zip(buffers, kept, strict=True):
            buffer.copy_(value)
