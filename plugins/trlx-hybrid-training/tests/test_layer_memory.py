"""The plan of what layers keep for the backward pass: as much as memory holds, and nothing that it does not hold."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, Phi3Config, Qwen2Config, Qwen3Config
from trlx_hybrid.testing.models import tiny_model
from trlx_hybrid_training import attention
from trlx_hybrid_training.layer_memory import (
    IN_BACKWARD,
    UNDER_WAY,
    WORTH,
    LayerPlan,
    Layers,
    Memory,
    bytes_by_width,
    plan,
)
from trlx_hybrid_training.packing import Pack
from trlx_hybrid_training.recomputation import counting_kept, layers_of
from trlx_hybrid_training.tiles import tileable, tiled

GIB = 1 << 30
MEMORIES = st.builds(Memory, free=st.integers(0, 200 * GIB), others=st.integers(0, 20 * GIB))


@st.composite
def layers(draw):
    whole = draw(st.integers(0, 60 * GIB))
    tiles = draw(st.none() | st.integers(0, whole))
    tile = 0 if tiles is None else draw(st.integers(0, whole - tiles))
    count, inputs = draw(st.integers(1, 96)), draw(st.integers(0, 2 * GIB))
    return Layers(count=count, inputs=inputs, whole=whole, tiled=tiles, tile=tile)


@given(MEMORIES, layers(), st.booleans())
def test_what_is_kept_fits_and_one_more_would_not(memory, layers, to_host):
    found = plan(memory, layers, to_host)
    each, peak = layers.each(found.tiled), layers.peak(found.tiled)
    inputs = (layers.count - found.offloaded) * layers.inputs
    assert 0 <= found.kept <= layers.count
    assert 0 <= found.offloaded <= layers.count - found.kept
    assert not found.tiled or layers.tiled is not None
    assert to_host or not found.offloaded
    if found.kept:
        assert found.kept * each + peak + inputs <= memory.budget
    if found.kept < layers.count and each and not found.offloaded:
        assert (found.kept + 1) * each + peak + inputs > memory.budget
    if 0 < found.offloaded < layers.count:
        taken = peak + inputs + UNDER_WAY * layers.inputs
        assert taken <= memory.budget < taken + layers.inputs


@given(MEMORIES, layers())
def test_nothing_is_tiled_or_offloaded_that_fits_without(memory, layers):
    found = plan(memory, layers, to_host=True)
    recomputed = layers.count * layers.inputs + IN_BACKWARD * layers.whole
    if recomputed <= memory.budget:
        assert not found.tiled
        assert not found.offloaded
    elif layers.tiled is not None:
        assert found.tiled
        fits = layers.count * layers.inputs + layers.peak(in_tiles=True) <= memory.budget
        assert bool(found.offloaded) == (not fits and layers.count * layers.inputs >= WORTH)


def test_a_row_of_128k_tokens_of_an_8b_model():
    """36 layers, hidden size 4,096, MLP 12,288, in bf16, on a GPU of 80 GB with 14 GiB of weights."""
    layers = Layers(count=36, inputs=GIB, whole=30 * GIB, tiled=5 * GIB, tile=GIB)
    room = Memory(free=65 * GIB, others=GIB)
    assert plan(room, layers, to_host=True) == LayerPlan(kept=0, tiled=True)
    assert plan(Memory(free=48 * GIB, others=GIB), layers, to_host=True) == LayerPlan(kept=0, tiled=True, offloaded=16)


@pytest.mark.parametrize("kind", [Qwen2Config, Qwen3Config, LlamaConfig, Gemma3TextConfig, Phi3Config])
@pytest.mark.parametrize("adapters", [False, True], ids=["full", "LoRA"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_linear_modules_tell_what_a_layer_keeps_at_most(kind, adapters, dtype):
    attention.register()
    shape = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2, "num_attention_heads": 4}
    tokens = {"vocab_size": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = kind(**shape, **tokens, num_key_value_heads=2, head_dim=32)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).train()
    if adapters:
        get_peft_model(model, LoraConfig(r=4, target_modules="all-linear"))
        model.enable_input_require_grads()
    model.config._attn_implementation = attention.NAME
    last = layers_of(model)[-1]
    ids = torch.randint(3, 90, (1, 1024))
    pack = Pack.of(ids, torch.ones_like(ids), 1000)
    for modules in ([], tileable(last)):
        with tiled(modules, 256), attention.packing(), counting_kept(last) as counted:
            model(**pack.inputs, segments=pack.segments, prefixes=pack.prefixes, use_cache=False)
        bound = bytes_by_width(last, dtype.itemsize, modules) * 1024
        assert bound / 6 < sum(counted.values()) <= bound


@pytest.mark.parametrize("architecture", ["gpt2", "qwen3_moe"])
def test_layers_with_other_matrices_tell_nothing(architecture):
    layer = layers_of(tiny_model(architecture))[-1]
    assert bytes_by_width(layer, 4) is None
