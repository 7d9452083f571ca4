"""The forecast of a pass of the loss on the meta device: against what real layers keep, and what a real run decides."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import trlx_hybrid
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, Qwen2Config, Qwen3Config
from trlx_hybrid.contract.activations import PlannedLoss
from trlx_hybrid.policy.policy import Policy
from trlx_hybrid.session import Session
from trlx_hybrid.testing.models import tiny_model
from trlx_hybrid_training import attention, forecast, layer_memory, recomputation, tiles
from trlx_hybrid_training.forecast import activations, rows_of
from trlx_hybrid_training.lora import apply
from trlx_hybrid_training.meta_pass import LiveBytes, MetaPass
from trlx_hybrid_training.options import PackedOptions
from trlx_hybrid_training.packing import Pack
from trlx_hybrid_training.recomputation import counting_kept, layers_of
from trlx_hybrid_training.tiles import tileable, tiled

sys.path.insert(0, str(Path(__file__).parent))
from scripted import STEPS

GRPO = trlx_hybrid.GRPOTrainer
HEAD = (64, 64)
SHAPE = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2, "num_attention_heads": 4}
SHAPE |= {"vocab_size": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SHAPE |= {"num_key_value_heads": 2, "head_dim": 32}


def made(kind, dtype, adapters, device):
    attention.register()
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(kind(**SHAPE), dtype=dtype).train()
        if adapters:
            apply(get_peft_model(model, LoraConfig(r=4, target_modules="all-linear")))
            model.enable_input_require_grads()
    return model


@pytest.mark.parametrize("kind", [Qwen2Config, Qwen3Config, LlamaConfig, Gemma3TextConfig])
@pytest.mark.parametrize("adapters", [False, True], ids=["full", "LoRA"])
@pytest.mark.parametrize(
    ("dtype", "autocast"),
    [(torch.float32, None), (torch.bfloat16, None), (torch.float32, torch.bfloat16)],
    ids=["float32", "bfloat16", "autocast"],
)
def test_a_layer_keeps_no_more_than_on_the_meta_device_and_little_less(kind, adapters, dtype, autocast):
    """A row, whole and in tiles. A CPU's attention keeps its output twice, in two layouts, and a GPU's once."""
    model = made(kind, dtype, adapters, "cpu")
    model.config._attn_implementation = attention.NAME
    ids = torch.randint(3, 90, (1, 1024))
    pack = Pack.of(ids, torch.ones_like(ids), 200)
    meta = made(kind, dtype, adapters, "meta")
    counted = MetaPass(meta, pack.segments, pack.prefixes, 400, HEAD, autocast, dtype)
    last = layers_of(model)[-1]
    for in_tiles in (False, True):
        casting = torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None)
        modules = tileable(last) if in_tiles else []
        with tiled(modules, 256), attention.packing(), casting, counting_kept(last) as kept:
            model(**pack.inputs, segments=pack.segments, prefixes=pack.prefixes, use_cache=False)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tiles, "TILE", 256)
            found = counted.kept(in_tiles)
        twice = 1024 * SHAPE["hidden_size"] * (autocast or dtype).itemsize
        assert sum(kept.values()) - twice <= found <= sum(kept.values()) * 1.01


@pytest.fixture
def small(monkeypatch):
    """A device on which a few MiB decide, in tiles of a few tokens."""
    monkeypatch.setattr(tiles, "TILE", 8)
    monkeypatch.setattr(recomputation, "OFFLOADING", ("cpu",))
    monkeypatch.setattr(layer_memory, "WORTH", 0)
    monkeypatch.setattr(layer_memory, "WORKSPACE", 0)


@pytest.mark.parametrize("free", [0, 250_000, 600_000, 1_000_000, 1 << 40])
def test_it_plans_what_a_run_plans(run, noisy, scripted, small, monkeypatch, free):
    """Before and after the run has counted a layer."""
    monkeypatch.setattr(Session, "free_bytes", lambda self: free)
    hybrid = noisy | {"scoring": "packed", "scoring_options": {"joined": False, "cuda_graphs": False}}
    done = run(GRPO, hybrid=hybrid, plugins=[scripted], **STEPS | {"max_steps": 1})
    session = done.trainer.session
    chooses = recomputation.Recomputation(session, PackedOptions())
    layers, tokens = layers_of(session.policy.base), 100
    for p in session.policy.parameters:
        p.grad = None
    for layer in layers:
        layer.gradient_checkpointing = True
    first = chooses._plan(tokens, 0, 1, layers)
    if first.kept:
        model = session.policy.base.train()
        model.config._attn_implementation = attention.NAME
        ids = torch.randint(3, 90, (1, tokens))
        pack = Pack.of(ids, torch.ones_like(ids), 50)
        with chooses.chosen(tokens), attention.packing():
            model(**pack.inputs, segments=pack.segments, prefixes=pack.prefixes, use_cache=False)
    decided = chooses._plan(tokens, 0, 1, layers)
    done.close()
    loss = planned(session.args, free=free, length=tokens, completion=50)
    assert activations(loss, PackedOptions()).layers == forecast._told(decided, len(layers))


def planned(args, **given):
    with torch.device("meta"):
        model = tiny_model()
    policy = Policy(lambda: model, None, torch.device("meta"))
    return PlannedLoss(policy=policy, args=args, **{"rows": 1, "prompts": 1, "tile": HEAD, **given})


def test_host_memory_is_counted_in_whole_chunks(small):
    args = SimpleNamespace(gradient_checkpointing=True, bf16=False, fp16=False, gradient_accumulation_steps=1)
    found = activations(planned(args, free=0, length=100, completion=50), PackedOptions())
    assert found.host == 256 << 20
    kept = activations(planned(args, free=0, length=100, completion=50), PackedOptions(activation_offloading=False))
    assert kept.host == 0


@pytest.mark.parametrize("rows", [2, 8])
def test_a_prompt_is_computed_once_where_its_rows_are_together(rows):
    args = SimpleNamespace(gradient_checkpointing=True, bf16=False, fp16=False, gradient_accumulation_steps=1)
    loss = planned(args, free=1 << 40, rows=rows, prompts=rows // 2, length=100, completion=20)
    ids = torch.randint(3, 90, (rows, 100))
    ids[rows // 2 :, :80] = ids[: rows // 2, :80]
    pack = Pack.of(ids, torch.ones_like(ids), 20, shared_below=0.9)
    segments, prefixes = rows_of(loss, shares=True)
    assert (tuple(segments), tuple(prefixes)) == (pack.segments, pack.prefixes)
    assert activations(loss, PackedOptions()).tokens == sum(pack.segments)
    assert activations(loss, PackedOptions(shared_prompts=False)).tokens == rows * 100


def test_a_model_that_cannot_be_packed_is_not_forecast():
    args = SimpleNamespace(gradient_checkpointing=True, bf16=False, fp16=False, torch_compile=True)
    assert activations(planned(args, free=0, length=100, completion=50), PackedOptions()) is None


def test_the_most_bytes_that_lived_at_one_time():
    """Without those of tensors that were there before, and their views."""
    before = torch.empty(5000, dtype=torch.uint8, device="meta")
    with LiveBytes([before]) as live:
        before.view(50, 100).t()
        kept = torch.empty(1000, dtype=torch.uint8, device="meta")
        two = kept + kept
        del two
        three = kept.view(10, 100).contiguous() + 1
    assert live.peak == 2000
    del kept, three
    assert live.now == 0


@pytest.mark.parametrize("in_tiles", [False, True], ids=["whole", "tiles"])
@pytest.mark.parametrize("kept", [0, 6], ids=["recomputed", "kept"])
def test_further_layers_add_what_they_keep(monkeypatch, kept, in_tiles):
    """Passes of one and two layers tell the peak of a pass of six, or a little more."""
    monkeypatch.setattr(tiles, "TILE", 256)
    monkeypatch.setitem(SHAPE, "num_hidden_layers", 6)
    model = made(Qwen3Config, torch.bfloat16, adapters=True, device="meta")
    counted = MetaPass(model, (1024,), ((0, 0),), 200, HEAD, torch.bfloat16, torch.bfloat16)
    inputs = 1024 * SHAPE["hidden_size"] * 2
    told = forecast._peak(layer_memory.LayerPlan(kept=kept, tiled=in_tiles), 6, inputs, counted)
    whole = counted.peak(6, recomputed=not kept, in_tiles=in_tiles)
    assert whole <= told <= 1.05 * whole
