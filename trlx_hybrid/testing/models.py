"""The parts of a tiny run, built without any download: models of real architectures with random weights, one of which
sees images, a tokenizer of characters, prompts, and arguments of a trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

CHARACTERS = [chr(code) for code in range(32, 127)]
SPECIAL = ["<pad>", "<eos>", "<bos>"]
ARCHITECTURES = ("qwen2", "qwen3", "llama", "gemma2")
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
YARN = ROPE | {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
ROUTED = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "first_k_dense_replace": 1}
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16}
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
GRANITE = {"embedding_multiplier": 12.0, "logits_scaling": 8.0, "residual_multiplier": 0.2}
LATENT = {
    "head_dim": 64,
    "q_lora_rank": 64,
    "kv_lora_rank": 512,  # with 64, the size that vLLM's kernel for CPUs has
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
    "num_key_value_heads": 4,
}
SHAPES: dict[str, dict[str, Any]] = {
    "apertus": {"rope_parameters": ROPE},
    "cohere2": SLIDING | {"logit_scale": 0.25},
    "deepseek_v3": LATENT
    | ROUTED
    | {"n_group": 2, "topk_group": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "rope_parameters": YARN},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 64, "moe_layer_start_index": 1},
    "exaone4": SLIDING,
    "gemma3_text": SLIDING,
    "gemma4_text": SLIDING
    | {
        "global_head_dim": 32,
        "vocab_size_per_layer_input": len(SPECIAL) + len(CHARACTERS),
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
    },
    "glm4_moe": ROUTED | {"use_qk_norm": True},
    # For latents transformers uses 1e-6 whatever the config says (published: 1e-5, which is 2e-5 nats off in vLLM).
    "glm4_moe_lite": LATENT | ROUTED | {"mlp_layer_types": ["dense", "sparse"], "rms_norm_eps": 1e-6},
    "gpt2": {"activation_function": "gelu_new", "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "gpt_oss": SLIDING | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "granite": GRANITE,
    "granitemoe": GRANITE | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "nemotron": {"initializer_range": 0.05},  # squares its activations
    "olmo3": SLIDING,
    "olmoe": EXPERTS,
    "opt": {"ffn_dim": 192, "word_embed_proj_dim": 128, "dropout": 0.0},
    "phi": {"num_key_value_heads": 4, "intermediate_size": 512, "resid_pdrop": 0.0},
    "phi3": {"partial_rotary_factor": 0.75},
    "qwen2_moe": EXPERTS | {"shared_expert_intermediate_size": 64},
    "qwen3_5_moe_text": LINEAR | EXPERTS | {"shared_expert_intermediate_size": 64},
    "qwen3_5_text": LINEAR,
    "qwen3_moe": EXPERTS,
    "qwen3_next": LINEAR | EXPERTS | {"shared_expert_intermediate_size": 64},
    "smollm3": {"no_rope_layers": [1, 0]},
}
"""Config fields that an architecture needs in addition to `TINY`, by transformers' model type."""


TINY: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
    "initializer_range": 0.1,
}
"""Config fields that all the text models share. The special token ids are those of `character_tokenizer`."""


def character_tokenizer(**special: str) -> Any:
    """Return a `PreTrainedTokenizerFast` that has one token per printable ASCII character, and pad, eos and bos.

    Args:
        special: further special tokens, by the attribute under which a processor reads them, such as `image_token`.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        bos_token="<bos>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
        **({"extra_special_tokens": special} if special else {}),
    )


def tiny_model(
    architecture: str = "qwen3", *, tied: bool = False, seed: int = 0, dtype: Any = None, **config: Any
) -> Any:
    """Return a causal language model with a few hundred thousand random weights, whose values are large enough for the
    log-probs of different tokens to differ clearly.

    Args:
        architecture: the model type of transformers, such as "qwen3".
        tied: whether input and output embeddings share their weight.
        seed: seed of the random weights.
        dtype: dtype of the weights; float32 by default.
        config: fields of the model's config that differ from `TINY` and `SHAPES`.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = TINY | {"vocab_size": len(SPECIAL) + len(CHARACTERS), "tie_word_embeddings": tied}
    fields |= SHAPES.get(architecture, {}) | config
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(architecture, **fields))
    return model.to(dtype or torch.float32)


def tiny_grpo(folder: Path, **settings: Any) -> dict[str, Any]:
    """Return arguments for a `GRPOConfig`: three steps of a tiny model on a CPU, sampled by vLLM, with the same results
    on any number of ranks.

    Args:
        folder: the output folder.
        settings: arguments to add or to override.
    """
    return {
        "output_dir": str(folder),
        "num_generations": 4,
        "max_completion_length": 8,
        "max_steps": 3,
        "optim": "sgd",  # Adam divides rounding noise by itself where a gradient is zero
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
        "use_vllm": True,
        "vllm_max_model_length": 48,
    } | settings


def sorting_prompts(count: int = 32) -> Any:
    """Return a `datasets.Dataset` with a column `prompt`: different texts that `character_tokenizer` can encode.

    Args:
        count: the number of rows.
    """
    from datasets import Dataset

    return Dataset.from_dict({"prompt": [f"sort {i * 7919 % 1000}=" for i in range(count)]})


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
