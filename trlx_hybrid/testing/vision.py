"""A tiny vision-language model with random weights, and its processor."""

from __future__ import annotations

from typing import Any

from .models import character_tokenizer

MARKS = {name: f"<|{name}|>" for name in ("vision_start", "vision_end", "image_pad", "video_pad")}
PATCHES = {"qwen2_5_vl": 14, "qwen3_vl": 16}
"""Side of an image patch in pixels, by model type. Images are resized to four by four patches; an image token covers
two by two of them."""
TEMPLATE = (
    "{% for message in messages %}{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    + MARKS["vision_start"]
    + MARKS["image_pad"]
    + MARKS["vision_end"]
    + "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
)


def tiny_vision_model(
    architecture: str = "qwen2_5_vl", seed: int = 0, head_dim: int = 32, tokenizer: Any = None, tower_heads: int = 2
) -> tuple[Any, Any]:
    """Return a small vision-language model with random weights, and its processor.

    Args:
        architecture: the model type, a key of `PATCHES`.
        seed: seed of the random weights.
        head_dim: dimension of an attention head, in the vision tower and in the text model. vLLM's attention on GPUs
            needs 64 or more.
        tokenizer: the tokenizer, with a chat template; by default a tokenizer with one token per character.
        tower_heads: the number of attention heads of the vision tower; a multiple of the number of tensor-parallel
            ranks.
    """
    import torch
    import transformers
    from transformers import AutoConfig, AutoModelForImageTextToText
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

    older, patch = architecture == "qwen2_5_vl", PATCHES[architecture]
    if tokenizer is None:
        tokenizer = character_tokenizer()
        tokenizer.chat_template = TEMPLATE
    tokenizer.add_special_tokens({"additional_special_tokens": list(MARKS.values())})
    side = (4 * patch) ** 2
    settings = {"size": {"shortest_edge": side, "longest_edge": side}, "patch_size": patch, "merge_size": 2}
    kind = transformers.Qwen2_5_VLProcessor if older else transformers.Qwen3VLProcessor
    processor = kind(
        Qwen2VLImageProcessor(**settings),
        tokenizer,
        Qwen2VLVideoProcessor(**settings),
        chat_template=tokenizer.chat_template,
    )
    tower: dict[str, Any] = {"depth": 2, "hidden_size": tower_heads * head_dim, "intermediate_size": 96}
    tower["num_heads"] = tower_heads
    tower |= {"out_hidden_size": 4 * head_dim, "patch_size": patch, "initializer_range": 0.1}
    if older:
        tower |= {"window_size": 56, "fullatt_block_indexes": [1]}
    else:
        tower |= {"deepstack_visual_indexes": [0], "num_position_embeddings": 64}
    sections = [head_dim // 8, 3 * head_dim // 16, 3 * head_dim // 16]  # for time, height and width
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": sections}
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": 4 * head_dim,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "initializer_range": 0.1,
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "rope_parameters": rope if older else rope | {"mrope_interleaved": True},
    } | ({} if older else {"head_dim": head_dim})
    ids = {
        "image_token_id": "image_pad",
        "video_token_id": "video_pad",
        "vision_start_token_id": "vision_start",
        "vision_end_token_id": "vision_end",
    }
    ids = {key: tokenizer.convert_tokens_to_ids(MARKS[mark]) for key, mark in ids.items()}
    config = AutoConfig.for_model(architecture, text_config=text, vision_config=tower, **ids)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(config).eval()
    head = model.get_output_embeddings().weight.data
    model.get_input_embeddings().weight.data[:, 0] = 1  # a constant of each text token that no layer changes
    for layer in model.model.language_model.layers:
        layer.self_attn.o_proj.weight.data[0] = layer.mlp.down_proj.weight.data[0] = 0
    head[:, 0] = 0
    head[list(ids.values()), 0] = -30  # hardly ever sampled, as after pretraining
    model.generation_config.update(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    return model, processor
