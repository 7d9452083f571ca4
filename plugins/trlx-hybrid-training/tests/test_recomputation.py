"""Gradient checkpointing for as many layers as memory asks for: the same bits, and no more arithmetic than needed."""

import sys
from pathlib import Path

import pytest
import torch
import trlx_hybrid
from hypothesis import given
from hypothesis import strategies as st
from peft import ShiraConfig
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer
from trlx_hybrid.session import Session
from trlx_hybrid.testing.models import tiny_model
from trlx_hybrid_training import attention, recomputation
from trlx_hybrid_training.layer_memory import LayerBytes
from trlx_hybrid_training.options import BEFORE
from trlx_hybrid_training.packing import Pack

sys.path.insert(0, str(Path(__file__).parent))
from scripted import difference, lora

GRPO = trlx_hybrid.GRPOTrainer


@pytest.fixture
def trained(run, noisy, scripted, monkeypatch):
    """`trained(adaptive, free, **arguments)`: a run, and how often each of its losses computed a layer."""

    def start(adaptive, free=1 << 60, **given):
        calls = []
        stock = Qwen3DecoderLayer.forward
        loss = GRPO._compute_loss

        def forward(self, *args, **kwargs):
            if calls and torch.is_grad_enabled():
                calls[-1] += 1
            return stock(self, *args, **kwargs)

        def compute_loss(self, *args, **kwargs):
            calls.append(0)
            return loss(self, *args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(Qwen3DecoderLayer, "forward", forward)
            patch.setattr(GRPO, "_compute_loss", compute_loss)
            patch.setattr(Session, "free_bytes", lambda self: free)
            options = BEFORE | {"adaptive_checkpointing": adaptive}
            settings = {"scoring": "packed", "scoring_options": options}
            given = {"max_steps": 2, "gradient_accumulation_steps": 2, "gradient_checkpointing": True} | given
            done = run(GRPO, hybrid=noisy | settings, plugins=[scripted], **given)
            done.close()
        return done, calls

    return start


@pytest.mark.parametrize("adapters", [False, True], ids=["all weights", "LoRA"])
def test_layers_are_computed_once_where_memory_is_free(trained, adapters):
    """After the first loss, which counts what a layer keeps. Every bit of the run is that of full checkpointing."""
    given = {"peft_config": lora()} if adapters else {}
    make = {name: value() for name, value in given.items()}
    usual, twice = trained(False, **make)
    make = {name: value() for name, value in given.items()}
    ours, once = trained(True, **make)
    layers = twice[0] // 2
    assert twice == [2 * layers] * 4  # each layer forward, and once more
    assert once == [2 * layers - 1, *[layers] * 3]
    assert difference(ours, usual) == (0.0, 0.0)


def test_an_adapter_of_sparse_values_is_counted(trained):
    """PEFT's SHiRA, whose passes save tensors that have no storage."""
    (full, _), (chosen, _) = (
        trained(adaptive, peft_config=ShiraConfig(r=2, target_modules=["q_proj"])) for adaptive in (False, True)
    )
    assert max(difference(chosen, full)) == 0.0


def test_all_layers_are_recomputed_where_no_memory_is_free(trained):
    usual, twice = trained(False)
    ours, calls = trained(True, free=0)
    assert calls == [twice[0] - 1, *twice[1:]]
    assert difference(ours, usual) == (0.0, 0.0)


def test_the_users_word_against_checkpointing_stands(trained, capsys):
    _, calls = trained(True, gradient_checkpointing=False, free=0)
    assert len(set(calls)) == 1
    assert "gradient_checkpointing is off, so that there is nothing to decide" in capsys.readouterr().err


def test_the_header_says_that_layers_are_chosen(trained, capsys):
    trained(True)
    assert "layers are recomputed as far as memory asks for it" in capsys.readouterr().err


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
def test_what_a_layer_keeps_is_counted_to_the_byte(autocast):
    """Against the tensors that the layer's own graph refers to."""
    model = tiny_model().train()
    layer = model.model.layers[-1]
    whole = {}
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast), recomputation.counting_kept(layer) as counted:
        layer.register_forward_hook(
            lambda _, __, out: whole.setdefault("out", out[0] if isinstance(out, tuple) else out)
        )
        inputs = {}
        layer.register_forward_pre_hook(lambda _, args: inputs.setdefault("in", args[0]))
        model(torch.randint(3, 90, (1, 37)), use_cache=False)
    own = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    seen, found, stack = set(), {}, [whole["out"].grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen or node is inputs["in"].grad_fn:
            continue
        seen.add(node)
        names = [name for name in dir(node) if name.startswith("_saved_")]
        for value in [getattr(node, name) for name in names]:
            for tensor in value if isinstance(value, (list, tuple)) else [value]:
                if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in own:
                    found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        stack += [parent for parent, _ in node.next_functions]
    assert sum(counted.values()) == sum(found.values()) > 37 * model.config.hidden_size * 4


def test_copied_tokens_have_no_input(run, noisy, scripted):
    """A layer keeps more for them, but its input has computed tokens only."""
    done = run(GRPO, hybrid=noisy | {"scoring": "packed"}, plugins=[scripted], max_steps=1)
    chooses = done.trainer.session.scoring.recomputation
    layers = done.trainer.session.policy.base.model.layers
    alone, shared = (chooses._sizes(100, copied, 1, layers) for copied in (0, 400))
    assert shared.inputs == alone.inputs == 100 * chooses._input
    assert shared.whole > alone.whole
    done.close()


def test_copies_of_a_shared_prompt_are_expected():
    """From a row alone: no less than there is, and less than without sharing."""
    attention.register()
    model = tiny_model().train()
    model.config._attn_implementation = attention.NAME
    ids, kept, actual = torch.arange(3, 63).repeat(8, 1), LayerBytes(), 0
    for rows in (ids[:1], ids):
        pack = Pack.of(rows, torch.ones_like(rows), 10, shared_below=1.0)
        own = {"segments": pack.segments, "prefixes": pack.prefixes}
        with recomputation.counting_kept(model.model.layers[-1]) as counted, attention.packing():
            model(**pack.inputs, **own, use_cache=False)
        actual = sum(counted.values())
        if len(rows) == 1:
            kept.add(60, actual)
    tokens = 8 * 10 + 7 + 50
    assert tokens == sum(pack.segments)
    assert actual <= kept.expected(tokens + (8 * 60 - tokens) // recomputation.COPIED) < 0.5 * kept.expected(8 * 60)


@given(
    st.lists(st.integers(1, 1 << 17), min_size=1, max_size=12), st.integers(0, 10**6), st.integers(1, 4096), st.data()
)
def test_a_pass_is_never_expected_to_keep_less_than_it_does(seen, fixed, each, data):
    """Where a layer keeps `each` for a token and `fixed` for any number."""
    kept = LayerBytes()
    assert kept.expected(10) is None
    for tokens in seen:
        kept.add(tokens, fixed + each * tokens)
    tokens = data.draw(st.integers(1, 1 << 18))
    expected = kept.expected(tokens)
    assert expected >= fixed + each * tokens
    if tokens in seen and tokens == max(n for n in seen if n.bit_length() == tokens.bit_length()):
        assert expected == fixed + each * tokens


def test_a_large_pass_is_not_what_is_expected_of_a_small_one():
    """Several micro-batches have shared it, and the next ones may not."""
    kept = LayerBytes()
    for tokens in (6_000, 48_000):
        kept.add(tokens, 100 * tokens)
    assert kept.expected(7_000) == 700_000
