"""Tiny models of real architectures with random weights, and a character tokenizer, built without any download."""

from __future__ import annotations

from typing import Any

CHARACTERS = [chr(code) for code in range(32, 127)]
SPECIAL = ["<pad>", "<eos>", "<bos>"]
ARCHITECTURES = ("qwen2", "qwen3", "llama", "gemma2")


def character_tokenizer() -> Any:
    """One token per printable ASCII character, with pad, eos and bos; a `PreTrainedTokenizerFast`."""
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
    )


def tiny_model(
    architecture: str = "qwen3", *, tied: bool = False, seed: int = 0, dtype: Any = None, **config: Any
) -> Any:
    """A causal language model of a few ten thousand parameters, weights spread widely enough to tell apart.

    Args:
        architecture: one of ARCHITECTURES (transformers' model types).
        tied: whether input and output embeddings share their weight.
        config: fields of the model's config to change.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    fields: dict[str, Any] = {
        "vocab_size": len(SPECIAL) + len(CHARACTERS),
        "hidden_size": 128,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 256,
        "tie_word_embeddings": tied,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": 2,
        "initializer_range": 0.1,
    } | config
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(architecture, **fields))
    return model.to(dtype or torch.float32)
