"""What training needs, against what torch counts while a model runs forward and backward."""

from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.utils.flop_counter import FlopCounterMode
from transformers import GPT2Config, GPT2LMHeadModel, Qwen2Config, Qwen2ForCausalLM
from trlx_hybrid.policy.policy import Policy
from trlx_hybrid.testing.models import tiny_model
from trlx_hybrid.trl.metrics.flops import PEAK, counted, model_flops, peak

ROWS, PROMPT, COMPLETION = 3, 40, 24
LENGTH = PROMPT + COMPLETION
EAGER = {"attn_implementation": "eager"}  # its products are counted one by one


def policy_of(model):
    return Policy(lambda: model, None, torch.device("cpu"))


def flops_counted(model):
    """By torch: products with weights, and of attention."""
    base = policy_of(model).base
    ids = torch.randint(3, 97, (ROWS, LENGTH))
    with FlopCounterMode(display=False) as counter:
        hidden = base.base_model(input_ids=ids).last_hidden_state
        base.get_output_embeddings()(hidden[:, PROMPT - 1 : -1].flatten(0, 1)).sum().backward()
    counts = {str(op): flops for op, flops in counter.get_flop_counts()["Global"].items()}
    return counts["aten.mm"] + counts.get("aten.addmm", 0), counts["aten.bmm"]


def expected(model):
    ours, masks = model_flops(policy_of(model)), [torch.ones(ROWS, n, dtype=torch.int64) for n in (PROMPT, COMPLETION)]
    tokens, scored, pairs = counted(*masks).tolist()
    assert (tokens, scored, pairs) == (ROWS * LENGTH, ROWS * COMPLETION, ROWS * LENGTH * (LENGTH + 1) // 2)
    return ours.of(tokens, scored, 0), ours.of(0, 0, pairs)


def gpt2():
    return GPT2LMHeadModel(GPT2Config(vocab_size=98, n_embd=64, n_layer=2, n_head=2, n_positions=256, **EAGER))


def experts():
    model = tiny_model("qwen3_moe", num_experts=8, num_experts_per_tok=2, moe_intermediate_size=48, **EAGER)
    model.set_experts_implementation("eager")
    return model


def adapted(**given):
    model = get_peft_model(tiny_model(**EAGER), LoraConfig(r=4, target_modules="all-linear", **given))
    model.enable_input_require_grads()  # as TRL does where it checkpoints: the first layer's input has a gradient
    return model


MODELS = {
    "qwen3": lambda: tiny_model("qwen3", **EAGER),
    "tied": lambda: tiny_model("qwen2", tied=True, **EAGER),
    "llama": lambda: tiny_model("llama", **EAGER),
    "gpt2": gpt2,
    "experts": experts,
    "LoRA": adapted,
    "LoRA and a head": lambda: adapted(modules_to_save=["lm_head"]),
}


@pytest.mark.parametrize("name", MODELS)
def test_flops_are_those_that_torch_counts(name):
    model = MODELS[name]()
    linear, attention = flops_counted(model)
    ours, pairs = expected(model)
    assert ours == pytest.approx(linear, rel=1e-12)
    assert pairs == pytest.approx(attention * (LENGTH + 1) / (2 * LENGTH), rel=0.005)  # and of rotary embeddings


def frozen_in_part():
    model = tiny_model()
    model.model.layers[0].requires_grad_(False)
    return model


def trained_tokens():
    return get_peft_model(tiny_model(), LoraConfig(r=4, target_modules="all-linear", trainable_token_indices=[5, 6]))


UNKNOWN = {
    "windows": lambda: tiny_model("gemma2"),
    "windows everywhere": lambda: tiny_model("mistral", sliding_window=8),
    "a state": lambda: tiny_model("falcon_h1", mamba_d_ssm=64, mamba_n_heads=2),
    "frozen in part": frozen_in_part,
    "other adapters": trained_tokens,
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_flops_that_weights_do_not_tell_are_not_guessed(name):
    assert model_flops(policy_of(UNKNOWN[name]())) is None


def test_padding_is_not_counted():
    prompts, completions = torch.tensor([[0, 1, 1], [1, 1, 1]]), torch.tensor([[1, 0], [1, 1]])
    assert counted(prompts, completions).tolist() == [3 + 5, 1 + 2, 3 * 4 // 2 + 5 * 6 // 2]


@pytest.mark.parametrize(
    ("name", "weights", "bf16", "expected"),
    [
        ("NVIDIA H200", torch.float32, True, 989e12),
        ("NVIDIA H200", torch.bfloat16, False, 989e12),
        ("NVIDIA H200", torch.float32, False, 67e12),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", torch.bfloat16, True, None),
        ("NVIDIA H20", torch.bfloat16, True, None),
    ],
)
def test_the_peak_is_that_of_the_device_and_what_it_computes_in(monkeypatch, name, weights, bf16, expected):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    policy = SimpleNamespace(device=torch.device("cuda", 0), dtype=weights)
    assert peak(policy, SimpleNamespace(bf16=bf16, fp16=False)) == expected


def test_no_format_is_faster_than_a_narrower_one():
    assert all(half > tf32 >= full for half, tf32, full in PEAK.values())


def test_a_cpu_has_no_known_peak():
    assert peak(policy_of(tiny_model()), SimpleNamespace(bf16=False, fp16=False)) is None


def test_a_step_of_qwen2_takes_what_its_weights_and_attention_say():
    """64 rows of 128 + 512 tokens: 6 × 1.5 billion × 40,960 and attention are 0.38 s at an H100's peak."""
    config = Qwen2Config(
        hidden_size=1536,
        intermediate_size=8960,
        num_hidden_layers=28,
        vocab_size=151936,
        num_attention_heads=12,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        model = Qwen2ForCausalLM(config)
    flops = model_flops(policy_of(model))
    assert flops.of(64 * 640, 64 * 512, 64 * 640 * 641 // 2) / 989e12 == pytest.approx(0.38, abs=0.005)
