"""The models of the whole runs, random weights and a character tokenizer, written to disk as a user has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, Qwen2Config
from trlx_hybrid.testing.chat import chat_tokenizer, chatty_model
from trlx_hybrid.testing.models import character_tokenizer, tiny_model, tiny_vision_model

from benchmarks.rollout import SCALES

SIZES: dict[str, dict[str, Any]] = {
    "cuda": {
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 64,
    },
    "cpu": {},
}
"""Of the plain model: large enough on a GPU that every message of a weight sync is what it is for larger ones."""

EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "decoder_sparse_step": 1}
PICTURES = {"pictures": "qwen3_vl", "older_pictures": "qwen2_5_vl"}
CALLS = [
    '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>',
    '<tool_call>\n{"name": "fetch", "arguments": {"key": "word"}}\n</tool_call>',
    "that is all",
]


def write(name: str, folder: Path) -> Path:
    """`plain`, `experts`, `caller` or one of PICTURES, of a size for the device there is, or `seven`; written once."""
    path = folder / name
    if (path / "config.json").exists():
        return path
    device = "cuda" if torch.cuda.is_available() else "cpu"
    head_dim = 64 if device == "cuda" else 32
    tokenizer: Any
    if name in PICTURES:
        model, tokenizer = tiny_vision_model(PICTURES[name], head_dim=head_dim)
    elif name == "caller":
        tokenizer = chat_tokenizer(CALLS)
        model = chatty_model(tokenizer, CALLS, head_dim=head_dim)
    else:
        tokenizer = character_tokenizer()
        tokenizer.chat_template = (
            "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}<eos>{% endfor %}"
            "{% if add_generation_prompt %}assistant: {% endif %}"
        )
        if name == "seven":
            with torch.device("cuda"):  # a CPU draws its weights for minutes
                model = AutoModelForCausalLM.from_config(Qwen2Config(**SCALES["7b"].config), dtype=torch.bfloat16)
        else:
            shape = SIZES[device] | {"max_position_embeddings": 2048, "initializer_range": 0.02}
            experts = name == "experts"
            model = tiny_model("qwen3_moe" if experts else "qwen3", **shape | (EXPERTS if experts else {}))
    text = getattr(tokenizer, "tokenizer", tokenizer)  # of a processor
    model.generation_config = GenerationConfig(eos_token_id=text.eos_token_id, pad_token_id=text.pad_token_id)
    partial = folder / f"{name}.part"
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    partial.rename(path)
    del model
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return path
