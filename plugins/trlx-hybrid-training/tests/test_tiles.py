"""Norms and MLPs in tiles of the sequence: what they compute stays the same, and no more is computed or kept."""

import logging
from contextlib import nullcontext

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Qwen3Config, Qwen3MoeConfig
from trlx_hybrid_training import tiles
from trlx_hybrid_training.tiles import tileable, tiled

SHAPE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
SHAPE |= {"num_key_value_heads": 1, "head_dim": 16, "vocab_size": 64}
TOKENS, TILE = 150, 32


def model_of(adapters=False, dropout=0.0):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(Qwen3Config(**SHAPE)).train()
    if adapters:
        config = LoraConfig(r=4, target_modules="all-linear", lora_dropout=dropout, init_lora_weights=False)
        get_peft_model(model, config)
    model.enable_input_require_grads()
    return model


def gradients(model, context, reentrant=None, autocast=False):
    """The loss, and the gradients of one backward pass whose layers compute in `context(layer)`."""
    ids = torch.arange(TOKENS)[None] % 60
    for layer in model.model.layers:

        def in_context(function, *args, layer=layer):
            def run(*args):
                with context(layer):
                    return function(*args)

            return run(*args) if reentrant is None else checkpoint(run, *args, use_reentrant=reentrant)

        layer.gradient_checkpointing, layer._gradient_checkpointing_func = True, in_context
    model.zero_grad()
    torch.manual_seed(1)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def in_tiles(layer):
    return tiled(tileable(layer), TILE)


def furthest(ours, theirs):
    """The largest difference of gradients, as a share of the largest value of each."""
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - g).abs().max() / g.abs().max().clamp_min(1e-12)) for name, g in theirs.items())


@pytest.mark.parametrize("reentrant", [None, False, True], ids=["kept", "recomputed", "reentrant"])
@pytest.mark.parametrize("adapters", [False, True], ids=["full", "LoRA"])
def test_gradients_are_those_of_the_whole_sequence(adapters, reentrant):
    model = model_of(adapters)
    whole = gradients(model, lambda _: nullcontext(), reentrant)
    ours = gradients(model, in_tiles, reentrant)
    assert ours[0] == pytest.approx(whole[0], abs=1e-6)
    assert furthest(ours[1], whole[1]) < 1e-5


def test_gradients_of_an_adapter_on_a_base_in_4_bits(tmp_path):
    pytest.importorskip("bitsandbytes")
    model_of().save_pretrained(tmp_path)
    bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=bits, dtype=torch.float32).train()
    get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    model.enable_input_require_grads()
    assert type(model.model.layers[0].mlp.up_proj.base_layer).__name__ == "Linear4bit"
    whole, ours = (gradients(model, context, False) for context in (lambda _: nullcontext(), in_tiles))
    assert ours[0] == pytest.approx(whole[0], abs=1e-6)
    assert furthest(ours[1], whole[1]) < 1e-5


def test_under_autocast_gradients_differ_by_rounding():
    model = model_of()
    whole = gradients(model, lambda _: nullcontext(), False)[1]  # in float32
    rounded, ours = (gradients(model, context, False, True)[1] for context in (lambda _: nullcontext(), in_tiles))
    assert furthest(ours, whole) < 1.5 * furthest(rounded, whole)


@pytest.mark.parametrize("reentrant", [None, False, True], ids=["kept", "recomputed", "reentrant"])
def test_dropout_drops_the_same_in_the_backward_pass(reentrant):
    """Against tiles whose graphs are kept: the same draws, and nothing computed twice."""
    model = model_of(adapters=True, dropout=0.3)

    def cut(layer):
        stack = [(module, module.forward) for module in tileable(layer)]

        class Cut:
            def __enter__(self):
                for module, stock in stack:
                    module.forward = lambda x, stock=stock: torch.cat([stock(t) for t in x.split(TILE, 1)], 1)

            def __exit__(self, *_):
                for module, _ in stack:
                    del module.forward

        return Cut()

    plain, ours = gradients(model, cut, reentrant), gradients(model, in_tiles, reentrant)
    assert ours[0] == plain[0]
    assert furthest(ours[1], plain[1]) < 1e-5


def test_an_mlp_is_computed_once_more_and_not_twice():
    """In a recomputed layer: the layer's recomputation ends before its MLP."""
    model, calls = model_of(), []
    act = model.model.layers[1].mlp.act_fn
    act.forward = lambda x, stock=act.forward: calls.append(torch.is_grad_enabled()) or stock(x)
    gradients(model, in_tiles, False)  # compares the modules first
    calls.clear()
    gradients(model, in_tiles, False)
    tiles = -(-TOKENS // TILE)
    assert calls == [False] * tiles + [True] * tiles


def test_hooks_of_a_parameter_run_once():
    """As DDP's and FSDP2's, which send a gradient when it is there."""
    model, seen = model_of(), []
    weight = model.model.layers[0].mlp.up_proj.weight
    weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    found = gradients(model, in_tiles, False)[1]
    assert len(seen) == 1
    assert torch.equal(seen[0], found["model.layers.0.mlp.up_proj.weight"])


def test_a_parameter_with_a_hook_on_its_gradient_is_left_alone():
    """The hook would see a tile's gradient."""
    model = model_of()
    layer = model.model.layers[0]
    layer.mlp.up_proj.weight.register_hook(lambda g: g)
    assert layer.mlp not in tileable(layer)
    assert model.model.layers[1].mlp in tileable(model.model.layers[1])


def test_an_mlp_with_a_hook_inside_is_left_alone():
    """What it sees of a tile has no gradient in the forward pass, and comes once more in the backward pass."""
    model = model_of()
    layer = model.model.layers[0]
    layer.mlp.act_fn.register_forward_hook(lambda *_: None)
    assert layer.mlp not in tileable(layer)


@pytest.mark.parametrize("of", ["FSDP2", "ZeRO-3"])
def test_a_module_whose_parts_are_gathered_by_themselves_is_computed_whole(monkeypatch, of):
    """As where FSDP2 shards each of an MLP's linear layers: gradients of what they gather would be lost."""
    model, lengths = model_of(), []
    mlp = model.model.layers[0].mlp
    mlp.act_fn.forward = lambda x, stock=mlp.act_fn.forward: lengths.append(x.shape[1]) or stock(x)
    if of == "FSDP2":
        monkeypatch.setattr(tiles, "is_sharded", lambda p: p is mlp.up_proj.weight)
    else:
        mlp.up_proj.weight.ds_id = 3
    gradients(model, in_tiles)
    assert lengths == [TOKENS]


def test_noise_without_a_module_of_its_own_is_computed_whole(caplog):
    """And the comparison draws no number that the layer's recomputation would miss."""

    class Noisy(nn.Linear):
        def __init__(self, *sizes):
            super().__init__(*sizes)
            self.residual_dropout = 0.5

        def forward(self, x):
            return nn.functional.dropout(super().forward(x), self.residual_dropout, self.training)

    model = model_of()
    for layer in model.model.layers:
        layer.mlp = nn.Sequential(Noisy(32, 32), layer.mlp.act_fn)
    whole, ours = (gradients(model, context, False) for context in (lambda _: nullcontext(), in_tiles))
    assert any("is not computed in tiles: 0.residual_dropout=0.5" in record.message for record in caplog.records)
    assert furthest(ours[1], whole[1]) < 1e-5


def test_experts_are_left_alone():
    config = Qwen3MoeConfig(**SHAPE, num_experts=4, moe_intermediate_size=16, num_experts_per_tok=2)
    layer = AutoModelForCausalLM.from_config(config).model.layers[0]
    assert {type(module).__name__ for module in tileable(layer)} == {"Qwen3MoeRMSNorm"}


def test_a_module_that_mixes_tokens_is_computed_whole(caplog):
    class Mixing(nn.Linear):
        def forward(self, x):
            return super().forward(x) + x.mean(dim=1, keepdim=True)

    model = model_of()
    mixing = model.model.layers[0].mlp.act_fn
    model.model.layers[0].mlp = nn.Sequential(Mixing(32, 32), mixing)
    whole = gradients(model, lambda _: nullcontext(), False)
    with caplog.at_level(logging.WARNING):
        ours = gradients(model, in_tiles, False)
    assert [r.message for r in caplog.records if "Sequential is not computed in tiles" in r.message]
    assert furthest(ours[1], whole[1]) < 1e-5


def test_a_module_gets_its_own_forward_back():
    model = model_of()
    mlp = model.model.layers[0].mlp
    mlp.forward = own = mlp.forward
    with tiled(tileable(model.model.layers[0]), TILE):
        assert mlp.forward is not own
    assert mlp.forward is own
    assert "forward" not in vars(model.model.layers[0].input_layernorm)


def test_short_sequences_are_computed_whole():
    model, calls = model_of(), []
    model.model.layers[0].mlp.act_fn.register_forward_hook(lambda *_: calls.append(1))
    gradients(model, lambda layer: tiled(tileable(layer)), None)
    assert len(calls) == 1
