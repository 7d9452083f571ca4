"""The live model as a folder vLLM can read: config, generation config and tokenizer, no weights.

Never from `name_or_path`: that is empty for models built from a config, and stale for resized or merged ones.
"""

from __future__ import annotations

import copy
from pathlib import Path

from trlx_hybrid.weights.merging import parted_head
from trlx_hybrid.weights.policy import Policy


def write_without_weights(policy: Policy, folder: Path) -> None:
    """Write what describes the policy into `folder`; the weights come through the sync."""
    model = policy.base
    config = copy.deepcopy(model.config)
    config.architectures = [policy.architecture]
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # of the trainer's base; the engine is told its own
    if parted_head(model) is not None:
        config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = False
    config.save_pretrained(folder)
    if model.generation_config is not None:
        # Not `save_pretrained`, which refuses the odd combinations that published generation configs contain.
        model.generation_config.to_json_file(folder / "generation_config.json")
    policy.processing_class.save_pretrained(folder)
