"""Tiny random shapes of the architectures that users have on their disks, served by vLLM on a CPU in float32.

Of each: the weight path that `auto` takes, and the largest difference between the log-probs that the engine samples
with and the trainer's, before and after a change of all weights; or the error that refuses it.
"""

from __future__ import annotations

import functools
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
    "Gemma 3": ("gemma3", {}),
    "Gemma 4, text": ("gemma4_text", {"tied": True}),
    "Gemma 4 E2B, E4B": ("gemma4", {}),
    "Gemma 4 31B": ("gemma4", {"use_bidirectional_attention": "vision"}),
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
    "Mistral 3": ("mistral3", {}),
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
    "Qwen2.5-VL": ("qwen2_5_vl", {}),
    "Qwen3": ("qwen3", {}),
    "Qwen3, up to 4B": ("qwen3", {"tied": True}),
    "Qwen3-MoE": ("qwen3_moe", {}),
    "Qwen3-Next": ("qwen3_next", {}),
    "Qwen3-VL": ("qwen3_vl", {}),
    "Qwen3.5, text": ("qwen3_5_text", {}),
    "Qwen3.5-MoE, text": ("qwen3_5_moe_text", {}),
    "Seed-OSS": ("seed_oss", {}),
    "SmolLM2": ("llama", {"tied": True, "num_key_value_heads": 4}),
    "SmolLM3": ("smollm3", {"tied": True}),
    "StableLM 2": ("stablelm", {}),
    "StarCoder2": ("starcoder2", {"tied": True}),
}
"""What users call a model, its model type in transformers, and arguments of `tiny_model` or `other_vision_model`."""

NONE = "none in TRL"
GEMMA_4 = dict.fromkeys(["gemma4", *(f"gemma4_v{revision}" for revision in range(2, 6))], "")
PUBLISHED: dict[str, dict[str, str]] = {name: {NONE: ""} for name in MODELS} | {
    "Command R7B, Command A": {"cohere2": "Tiny Aya", NONE: "the others"},
    "DeepSeek-V3, DeepSeek-R1": {"deepseekv3": ""},
    "Gemma": {"gemma": ""},
    "Gemma 2": {"gemma": ""},
    "Gemma 3, text": {"gemma3": ""},
    "Gemma 3": {"gemma3": ""},
    "Gemma 4, text": GEMMA_4,
    "Gemma 4 E2B, E4B": GEMMA_4,
    "Gemma 4 31B": GEMMA_4,
    "GLM-4.5, GLM-4.6": {"glm4moe": "GLM-4.5", NONE: "GLM-4.6"},
    "gpt-oss": {"gptoss": ""},
    "Llama 2, 3": {"llama3": "Llama 3", "llama3_1": "Llama 3.1", NONE: "Llama 2"},
    "Llama 3.2": {"llama3_2": ""},
    "Phi-3, Phi-4": {"phi3": "Phi-3", "phi3_5": "Phi-3.5", NONE: "Phi-4"},
    "Qwen2, Qwen2.5": {"qwen2_5": "Qwen2.5", "deepseek_r1_distill": "DeepSeek-R1-Distill", NONE: "Qwen2"},
    "Qwen2.5, up to 3B": {"qwen2_5": ""},
    "Qwen2.5-VL": {"qwen2_5_vl": ""},
    "Qwen3": {"qwen3": ""},
    "Qwen3, up to 4B": {"qwen3": "Qwen3", "qwen3_instruct_2507": "Qwen3-Instruct-2507"},
    "Qwen3-MoE": {"qwen3": ""},
    "Qwen3-VL": {"qwen3_vl": ""},
    "Qwen3.5, text": {"qwen3_5_nothink": "up to 2B", "qwen3_5_think": "from 4B"},
    "Qwen3.5-MoE, text": {"qwen3_5_think": ""},
}
"""TRL's copies of the chat templates that they are published with, each with those of the row that it is of: empty
where they all are. Source: trl 1.16, `chat_templates/README.md` and `REPOS` of `scripts/check_chat_templates.py`."""

PICTURED = tuple(
    name
    for name, (architecture, _) in MODELS.items()
    if architecture in ("gemma3", "gemma4", "mistral3", "qwen2_5_vl", "qwen3_vl")
)
"""Those that are given a picture."""
WITH_TORCHVISION = (*PICTURED, "Qwen3.5, text", "Qwen3.5-MoE, text")
"""Those, and others whose class vLLM has in a file with one that sees images."""

ADAPTER = {"r": 4, "lora_alpha": 8, "init_lora_weights": "gaussian"}
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa"]
TEXT_MODEL = r".*language_model.*_proj"


def measure(name: str) -> dict[str, Any]:
    """One row of the table. An adapter that no slot holds is tried on less: the attention, or the text model, alone."""
    row = {"model": name, "class": type(built(name)[0]).__name__}
    row["all weights"] = served(name, None)
    row["LoRA"] = served(name, "all-linear")
    if row["LoRA"].get("weights") != "lora" and "no LoRA slots" not in row["LoRA"].get("reason", ""):
        case, modules = ("LoRA on text model", TEXT_MODEL) if name in PICTURED else ("LoRA on attention", ATTENTION)
        row[case] = served(name, modules)
    return row


def built(name: str) -> tuple[Any, Any]:
    """The tiny model, and its tokenizer or processor."""
    from trlx_hybrid.testing.models import PATCHES, character_tokenizer, tiny_model, tiny_vision_model

    from tests.support.vision import other_vision_model

    architecture, fields = MODELS[name]
    if name not in PICTURED:
        return tiny_model(architecture, **fields), character_tokenizer()
    return tiny_vision_model(architecture) if architecture in PATCHES else other_vision_model(architecture, **fields)


def served(name: str, targets: str | list[str] | None) -> dict[str, Any]:
    """The path that all weights, or an adapter on these modules, take, the largest gap in nats, and why it is not the
    cheapest; or what refuses it. `pictures`: what refuses those, and the gap is one of text alone."""
    import torch
    from peft import LoraConfig, get_peft_model
    from trlx_hybrid import HybridEngine
    from trlx_hybrid.errors import EngineError, HybridError

    from tests.support.agreement import gap

    model, tokenizer = built(name)
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
    apart: Any = gap_of_pictured if name in PICTURED else gap
    only: dict[str, str] = {}
    length = 128 if name in PICTURED else 64
    try:
        with HybridEngine(model, tokenizer, max_tokens=8, engine_options={"max_model_len": length}) as engine:
            try:
                gaps = [apart(engine.session)]
            except EngineError as error:
                apart, only = functools.partial(gap_of_pictured, shown=False), {"pictures": str(error)}
                gaps = [apart(engine.session)]
            with torch.no_grad():
                for p in model.parameters():
                    if p.requires_grad:
                        p.add_(torch.randn(p.shape, generator=draws) * 0.03)
            engine.session.weights_changed()
            gaps.append(apart(engine.session))
            weights, why = engine.session.weights.name, engine.session.weights_why
    except HybridError as error:
        return {"refused": str(error)}
    cheaper = re.search(rf"not {'alias' if targets is None else 'lora'}: (.*?)(?=; not \w+: |$)", why)
    return {"weights": weights, "gap": max(gaps)} | only | ({"reason": cheaper[1]} if cheaper else {})


def gap_of_pictured(session: Any, shown: bool = True) -> float:
    """As `tests.support.agreement.gap`, of a model that sees pictures. What stands for one is never sampled.

    Args:
        shown: whether there is a picture in the prompt.
    """
    import torch
    from trlx_hybrid.contract.types import Sampling
    from trlx_hybrid.policy.policy import evaluating

    from tests.support.vision import picture

    policy, processor = session.policy, session.policy.processing_class
    images = [[picture("qwen2_5_vl", squares=5)]] if shown else None
    parts = ("vision_start", "image", "vision_end") if shown else ()
    text = "".join(getattr(processor, f"{part}_token", "") for part in parts) + "what is it"
    given = dict(processor(text=[text], images=images, return_tensors="pt"))
    prompt = given["input_ids"]
    with session.rollout_phase(True):
        sampling = Sampling(max_tokens=8, logprobs=0, extra={"ignore_eos": True})
        (completion,) = session.generate(prompt.tolist(), images, sampling=sampling)
    targets = torch.tensor([completion.token_ids])
    for key, values in given.items():
        if key == "input_ids":
            given[key] = torch.cat([prompt, targets], 1)
        elif key.endswith("token_type_ids"):  # ones where the picture is
            given[key] = torch.cat([values, torch.zeros_like(targets)], 1)
        elif key == "attention_mask":
            given[key] = torch.ones(1, prompt.numel() + targets.numel(), dtype=torch.long)
    with torch.no_grad(), evaluating(policy.module):
        logits = policy.module(**given).logits[0, prompt.numel() - 1 : -1].float()
    for kind in ("image", "video"):
        if (placeholder := getattr(policy.base.config, f"{kind}_token_id", None)) is not None:
            logits[:, placeholder] -= 100
    ours = logits.log_softmax(-1).gather(-1, targets[0, :, None])[:, 0]
    return float((torch.tensor([p[0] for p in completion.logprobs]) - ours).abs().max())
