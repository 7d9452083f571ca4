"""What a user's code changes between two rollouts, with no optimizer step, reaches the engine, or is refused."""

import copy

import pytest
import torch
from peft import (
    LNTuningConfig,
    LoraConfig,
    OFTConfig,
    PolyConfig,
    PrefixTuningConfig,
    ShiraConfig,
    get_peft_model,
)
from trlx_hybrid import HybridConfig, HybridEngine
from trlx_hybrid.errors import ComponentError, SyncError
from trlx_hybrid.testing.models import character_tokenizer, tiny_model

from tests.support.agreement import gap

PLAIN = {"r": 4, "init_lora_weights": "gaussian", "target_modules": ["q_proj", "v_proj"]}


@pytest.fixture
def engine(started_once):
    """`engine(model, weights)`, closed at the end."""
    built = []

    def build(model, weights="auto"):
        config = HybridConfig(engine_options={"max_model_len": 64}, weights=weights)
        built.append(HybridEngine(model, character_tokenizer(), max_tokens=8, config=config))
        return built[-1]

    yield build
    for one in built:
        one.close()


def adapted(architecture="qwen3", adapter=None):
    torch.manual_seed(0)
    return get_peft_model(tiny_model(architecture), adapter or LoraConfig(**PLAIN))


def layers_of(model):
    return [module for module in model.modules() if hasattr(module, "lora_A") and hasattr(module, "scaling")]


@pytest.mark.parametrize(
    ("architecture", "path"), [("qwen3", "alias"), ("qwen3", "copy"), ("qwen3", "gather"), ("gpt_oss", "lora")]
)
def test_frozen_weights_that_are_written_to(engine, architecture, path):
    """The base of gpt-oss is streamed into the engine, whose loader computes its experts anew."""
    model = adapted(architecture) if path == "lora" else tiny_model(architecture)
    norms = [p for name, p in model.named_parameters() if "norm" in name]
    for norm in norms:
        norm.requires_grad_(False)
    session = engine(model, path).session
    assert gap(session) < 1e-5
    before = session.versions.version
    with torch.no_grad():
        for norm in norms:
            norm.mul_(1.5)
    assert gap(session) < 1e-5
    assert session.versions.version == before + 1
    assert gap(session) < 1e-5
    assert session.versions.version == before + 1  # nothing is news twice


@pytest.mark.parametrize("path", ["alias", "copy", "gather"])
def test_a_module_that_takes_the_place_of_another(engine, path):
    model = tiny_model()
    session = engine(model, path).session
    assert gap(session) < 1e-5
    model.lm_head = copy.deepcopy(model.lm_head)
    for factor in (2.0, 0.25):
        with torch.no_grad():
            model.lm_head.weight.mul_(factor)
        assert gap(session) < 1e-5


@pytest.mark.parametrize("path", ["alias", "copy", "gather"])
def test_a_frozen_weight_that_is_put_elsewhere(engine, path):
    model = tiny_model()
    model.model.norm.requires_grad_(False)
    session = engine(model, path).session
    assert gap(session) < 1e-5
    model.model.norm.weight.data = model.model.norm.weight.data * 1.5
    assert gap(session) < 1e-5


@pytest.mark.parametrize("path", ["gather", "merged"])
def test_a_module_that_is_trained_as_a_whole_and_counts_or_not(engine, path):
    model = adapted(adapter=LoraConfig(**PLAIN, modules_to_save=["lm_head"]))
    model.add_adapter("other", LoraConfig(**PLAIN, modules_to_save=["lm_head"]))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name or "modules_to_save" in name:
                p.add_(torch.randn_like(p) * 0.05)
    session = engine(model, path).session
    assert gap(session) < 1e-5
    with model.disable_adapter():
        assert gap(session) < 1e-5
    model.set_adapter("other")
    assert gap(session) < 1e-5
    model.set_adapter("default")
    assert gap(session) < 1e-5


@pytest.mark.parametrize("path", ["lora", "gather", "merged"])
def test_an_adapter_that_counts_more_or_not_at_all(engine, path):
    model = adapted(adapter=LoraConfig(**PLAIN | {"init_lora_weights": False}))  # B is not zero
    session = engine(model, path).session
    assert gap(session) < 1e-5
    for layer in layers_of(model):
        layer.scale_layer(3.0)
    assert gap(session) < 1e-5
    with model.disable_adapter():
        assert gap(session) < 1e-5
    assert gap(session) < 1e-5


def test_an_adapter_that_was_merged_in_place_would_count_twice(engine):
    model = adapted()
    session = engine(model, "lora").session
    assert gap(session) < 1e-5
    model.merge_adapter()
    with pytest.raises(SyncError, match="would count twice: `unmerge_adapter` first"):
        gap(session)
    model.unmerge_adapter()
    assert gap(session) < 1e-5


def test_an_adapter_that_was_unloaded_leaves_no_slots_behind(engine):
    model = adapted()
    built = engine(model, "lora")
    assert gap(built.session) < 1e-5
    model.unload()
    for _ in range(2):
        with pytest.raises(SyncError, match=r"other layers of the adapter than there are now: .*release_engine"):
            gap(built.session)


@pytest.mark.parametrize(
    "adapter",
    [
        LNTuningConfig(target_modules=["input_layernorm", "post_attention_layernorm"]),
        OFTConfig(r=0, oft_block_size=4, target_modules=["q_proj", "down_proj"]),
        ShiraConfig(r=4, target_modules=["q_proj"]),
    ],
    ids=["norms", "oft", "shira"],
)
def test_adapters_whose_merge_puts_another_weight_in_place(engine, adapter):
    """What the trainer computes with is as it was after each merge: the same memory, laid out alike."""
    model = adapted(adapter=adapter)
    session = engine(model).session
    places = {name: (p.data_ptr(), p.stride()) for name, p in model.named_parameters()}
    for factor in (1.5, 0.5):
        with torch.no_grad():
            for p in model.parameters():
                if p.requires_grad:
                    p.add_(torch.full_like(p, 0.01)).mul_(factor)
        assert gap(session) < 1e-5
        assert {name: (p.data_ptr(), p.stride()) for name, p in model.named_parameters()} == places


@pytest.mark.parametrize("path", ["lora", "merged"])
def test_an_idle_adapter_on_other_layers_changes_nothing(engine, path):
    model = adapted()
    session = engine(model, path).session
    assert gap(session) < 1e-5
    model.add_adapter("idle", LoraConfig(**PLAIN | {"target_modules": ["o_proj"]}))
    assert gap(session) < 1e-5


@pytest.mark.parametrize(
    ("adapter", "why"),
    [
        (
            LoraConfig(r=4, lora_bias=True, target_modules=["q_proj"]),
            r"lora\.layer\.Linear into the base \(RuntimeError: Impossible to merge LoRA",
        ),
        (PolyConfig(r=4, target_modules=["q_proj"]), r"poly\.layer\.Linear into the base \(NotImplementedError\)"),
    ],
    ids=["bias", "poly"],
)
def test_adapters_that_peft_cannot_merge_are_named(engine, adapter, why):
    with pytest.raises(SyncError, match=rf"PEFT cannot merge its peft\.tuners\.{why}.*let transformers generate"):
        gap(engine(adapted(adapter=adapter)).session)


def test_tokens_that_an_adapter_puts_before_the_prompt_are_no_weights(engine):
    with pytest.raises(ComponentError, match=r"adapter 'default' \(PREFIX_TUNING\) is no change of weights"):
        engine(adapted(adapter=PrefixTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM")))


@pytest.mark.parametrize("path", ["alias", "lora", "gather"])
def test_an_engine_that_is_built_in_inference_mode_can_be_trained(engine, path):
    model = adapted() if path == "lora" else tiny_model()
    session = engine(model, path).session
    with torch.inference_mode():
        assert gap(session) < 1e-5
    ids = torch.tensor([[5, 6, 7, 8]])
    model(input_ids=ids, labels=ids).loss.backward()
    with torch.no_grad():
        for p in model.parameters():
            if p.grad is not None:
                p.sub_(0.1 * p.grad)
    assert gap(session) < 1e-5
