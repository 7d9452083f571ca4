"""Tiny random shapes of the architectures that users have on their disks, served by vLLM on a CPU in float32.

Of each: the weight path that `auto` takes, and the largest difference between the log-probs that the engine samples
with and the trainer's, before and after a change of all weights; or the error that refuses it.
"""

from __future__ import annotations

import re
from typing import Any

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Arcee": ("arcee", {}),
    "Command R7B, Command A": ("cohere2", {"tied": True}),
    "DeepSeek-V3, DeepSeek-R1": ("deepseek_v3", {}),
    "ERNIE 4.5": ("ernie4_5", {"tied": True}),
    "ERNIE 4.5, mixture": ("ernie4_5_moe", {"tied": True}),
    "EXAONE 4": ("exaone4", {}),
    "Gemma": ("gemma", {"tied": True}),
    "Gemma 2": ("gemma2", {"tied": True}),
    "Gemma 3, text": ("gemma3_text", {"tied": True}),
    "Gemma 4, text": ("gemma4_text", {"tied": True}),
    "GLM-4": ("glm", {}),
    "GLM-4-0414, GLM-Z1": ("glm4", {}),
    "GLM-4.5, GLM-4.6": ("glm4_moe", {}),
    "GLM-4.7-Flash": ("glm4_moe_lite", {}),
    "GPT-2": ("gpt2", {"tied": True}),
    "GPT-NeoX, Pythia": ("gpt_neox", {"num_key_value_heads": 4}),
    "gpt-oss": ("gpt_oss", {}),
    "Granite 3": ("granite", {"tied": True}),
    "Granite 3, mixture": ("granitemoe", {"tied": True}),
    "Llama 2, 3": ("llama", {}),
    "Llama 3.2": ("llama", {"tied": True}),
    "Mistral 7B": ("mistral", {}),
    "Mixtral": ("mixtral", {}),
    "Nemotron": ("nemotron", {}),
    "OLMo 2": ("olmo2", {}),
    "OLMo 3": ("olmo3", {}),
    "OLMoE": ("olmoe", {}),
    "OPT": ("opt", {"tied": True}),
    "Phi-2": ("phi", {}),
    "Phi-3, Phi-4": ("phi3", {}),
    "Phi-4-mini": ("phi3", {"tied": True, "partial_rotary_factor": 0.75}),
    "Qwen1.5-MoE, Qwen2-MoE": ("qwen2_moe", {}),
    "Qwen2, Qwen2.5": ("qwen2", {}),
    "Qwen2.5, up to 3B": ("qwen2", {"tied": True}),
    "Qwen3": ("qwen3", {}),
    "Qwen3, up to 4B": ("qwen3", {"tied": True}),
    "Qwen3-MoE": ("qwen3_moe", {}),
    "Qwen3-Next": ("qwen3_next", {}),
    "Qwen3.5, text": ("qwen3_5_text", {}),
    "Qwen3.5-MoE, text": ("qwen3_5_moe_text", {}),
    "Seed-OSS": ("seed_oss", {}),
    "SmolLM2": ("llama", {"tied": True, "num_key_value_heads": 4}),
    "SmolLM3": ("smollm3", {"tied": True}),
    "StableLM 2": ("stablelm", {}),
    "StarCoder2": ("starcoder2", {"tied": True}),
}
"""What users call a model, its model type in transformers, and arguments of `tiny_model`."""

WITH_TORCHVISION = ("Qwen3.5, text", "Qwen3.5-MoE, text")
"""Those whose class vLLM has in a file with one that sees images."""

ADAPTER = {"r": 4, "lora_alpha": 8, "init_lora_weights": "gaussian"}
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa"]


def measure(name: str) -> dict[str, Any]:
    """One row of the table. An adapter that no slot holds is tried on the attention alone."""
    from trlx_hybrid.testing.models import tiny_model

    architecture, fields = MODELS[name]
    row = {"model": name, "class": type(tiny_model(architecture, **fields)).__name__}
    row["all weights"] = served(name, None)
    row["LoRA"] = served(name, "all-linear")
    if row["LoRA"].get("weights") == "gather" and "no LoRA slots" not in row["LoRA"]["reason"]:
        row["LoRA on attention"] = served(name, ATTENTION)
    return row


def served(name: str, targets: str | list[str] | None) -> dict[str, Any]:
    """The path that all weights, or an adapter on these modules, take, the largest gap in nats, and why it is not the
    cheapest; or what refuses it."""
    import torch
    from peft import LoraConfig, get_peft_model
    from trlx_hybrid import HybridEngine
    from trlx_hybrid.errors import HybridError
    from trlx_hybrid.testing.agreement import gap
    from trlx_hybrid.testing.models import character_tokenizer, tiny_model

    architecture, fields = MODELS[name]
    model = tiny_model(architecture, **fields)
    if getattr(model.config, "attn_logit_softcapping", None):
        model.set_attn_implementation("eager")  # sdpa leaves the soft-capping of attention out
    draws = torch.Generator().manual_seed(0)
    for key, buffer in model.named_buffers():
        if key.endswith("correction_bias"):
            buffer.copy_(torch.rand(buffer.shape, generator=draws))
    if targets is not None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = get_peft_model(model, LoraConfig(target_modules=targets, **ADAPTER))
    try:
        with HybridEngine(model, character_tokenizer(), max_tokens=8, engine_options={"max_model_len": 64}) as engine:
            gaps = [gap(engine.session)]
            with torch.no_grad():
                for p in model.parameters():
                    if p.requires_grad:
                        p.add_(torch.randn(p.shape, generator=draws) * 0.03)
            engine.session.weights_changed()
            gaps.append(gap(engine.session))
            weights, why = engine.session.weights.name, engine.session.weights_why
    except HybridError as error:
        return {"refused": str(error)}
    cheaper = re.search(rf"not {'alias' if targets is None else 'lora'}: (.*?)(?=; not \w+: |$)", why)
    return {"weights": weights, "gap": max(gaps)} | ({"reason": cheaper[1]} if cheaper else {})
