"""The parameter classes, against the models that transformers builds."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from trlx_hybrid.errors import ConfigError
from trlx_hybrid_reshard.planner.architectures import ARCHITECTURES, SHAPES, describe

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 70,
}
EXPERTS = {"num_experts": 6, "moe_intermediate_size": 10, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
VARIANTS = [
    ("qwen2", {}),
    ("qwen2", {"tie_word_embeddings": True}),
    ("qwen3", {"head_dim": 16}),
    ("qwen3", {"attention_bias": True}),
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("llama", {"tie_word_embeddings": True}),
    ("gemma", {"head_dim": 16}),
    ("qwen3_moe", {"head_dim": 8, "num_experts": 6, "moe_intermediate_size": 10}),
    ("qwen3_moe", {"attention_bias": True} | EXPERTS),
]


@pytest.mark.parametrize(("kind", "more"), VARIANTS, ids=str)
def test_names_and_shapes_are_those_of_transformers(kind, more):
    config = AutoConfig.for_model(kind, **SMALL | more)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    built = {name: tuple(p.shape) for name, p in model.named_parameters()}
    described = {p.name.format(i): p.shape for p in describe(config).parameters for i in p.layers}
    assert described == built


def test_every_architecture_is_compared_with_transformers():
    assert {kind for kind, _ in VARIANTS} == set(ARCHITECTURES)


def test_the_trillion_parameters_are_a_trillion():
    assert 1.0e12 < describe(SHAPES["1t-moe"]).bytes / 2 < 1.1e12


def test_an_unknown_architecture_gets_a_hint():
    with pytest.raises(ConfigError, match=r"'qwen_2'. Did you mean 'qwen2'"):
        describe({"model_type": "qwen_2"})


def test_a_missing_field_is_named():
    with pytest.raises(ConfigError, match=r"lacks 'hidden_size'"):
        describe({"model_type": "llama", "vocab_size": 10})
