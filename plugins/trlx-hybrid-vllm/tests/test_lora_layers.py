"""What vLLM's LoRA slots can hold is decided from the live PEFT model, before an engine is built."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from trlx_hybrid.testing.models import tiny_model
from trlx_hybrid.weights.policy import Policy
from trlx_hybrid_vllm.adapters import lora_arguments
from trlx_hybrid_vllm.lora_layers import lora_layers


def policy_of(model, **config):
    config = {"r": 4, "target_modules": "all-linear"} | config
    adapted = get_peft_model(model, LoraConfig(**config))
    return Policy(lambda: adapted, None, torch.device("cpu"))


def test_arguments_cover_the_largest_rank_and_wrap_only_what_is_adapted():
    policy = policy_of(tiny_model("llama"), target_modules=["q_proj", "down_proj"], rank_pattern={"down_proj": 17})
    assert lora_arguments(policy) == {
        "enable_lora": True,
        "max_loras": 1,
        "max_cpu_loras": 1,
        "max_lora_rank": 32,
        "lora_target_modules": ["down_proj", "q_proj"],
    }


REFUSED = {
    "DoRA": {"use_dora": True},
    "modules_to_save": {"modules_to_save": ["norm"]},
    "trainable_token_indices": {"trainable_token_indices": [3, 4]},
    "trains biases": {"bias": "all"},
    "lora_bias": {"lora_bias": True},
    "target_parameters": {"target_modules": ["q_proj"], "target_parameters": ["mlp.up_proj.weight"]},
    "embed_tokens is adapted by PEFT's Embedding": {"target_modules": ["embed_tokens", "q_proj"]},
    "lm_head is the output head": {"target_modules": ["lm_head", "q_proj"]},
    "rank is 600, and vLLM's largest is 512": {"r": 600},
    "alora_invocation_tokens": {"alora_invocation_tokens": [3], "task_type": "CAUSAL_LM"},
    "MiCALinearVariant": {"init_lora_weights": "mica"},
    "layer_replication": {"layer_replication": [(0, 2), (1, 2)]},
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_slots_cannot_hold_is_refused_by_name(reason):
    model = tiny_model("llama", attention_bias=True, mlp_bias=True)
    assert reason in lora_arguments(policy_of(model, **REFUSED[reason]))


def test_what_is_not_one_plain_lora_adapter_is_refused_by_name():
    from peft import IA3Config, PrefixTuningConfig

    plain = tiny_model("llama")
    assert "not a PEFT model" in lora_arguments(Policy(lambda: plain, None, torch.device("cpu")))
    for config in (
        IA3Config(target_modules=["q_proj"], feedforward_modules=[]),
        PrefixTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"),
    ):
        other = get_peft_model(tiny_model("llama"), config)
        reason = lora_arguments(Policy(lambda model=other: model, None, torch.device("cpu")))
        assert f"of type {config.peft_type.value}" in reason
    policy = policy_of(tiny_model("llama"))
    policy.fsdp_version = 1
    assert "FSDP1 flattens the adapter's parameters" in lora_arguments(policy)
    policy.fsdp_version = None
    policy.module.add_adapter("other", LoraConfig(r=4, target_modules=["q_proj"]))
    policy.module.base_model.set_adapter(["default", "other"])
    assert "2 adapters are active (default, other)" in lora_arguments(policy)


def test_an_adapter_in_a_wrapped_or_plain_transformers_model_is_found():
    """Activation checkpointing renames modules; `add_adapter` of transformers makes no PeftModel."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

    model = tiny_model("llama")
    model.add_adapter(LoraConfig(r=4, target_modules=["q_proj"]))
    policy = Policy(lambda: model, None, torch.device("cpu"))
    assert lora_arguments(policy)["lora_target_modules"] == ["q_proj"]
    apply_activation_checkpointing(model, check_fn=lambda m: type(m).__name__ == "LlamaDecoderLayer")
    assert list(lora_layers(policy)) == [f"model.layers.{i}.self_attn.q_proj" for i in range(2)]
