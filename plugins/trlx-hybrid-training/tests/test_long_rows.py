"""Whole runs whose rows memory does not hold: norms and MLPs in tiles, layers' inputs in host memory."""

import logging
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import trlx_hybrid
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Qwen3Config
from trlx_hybrid.session import Session
from trlx_hybrid.testing.models import tiny_model
from trlx_hybrid_training import comparison, layer_memory, recomputation, scoring, tiles
from trlx_hybrid_training.host_inputs import HostInputs
from trlx_hybrid_training.layer_memory import LayerPlan, bytes_by_width
from trlx_hybrid_training.options import BEFORE
from trlx_hybrid_training.recomputation import Recomputation

sys.path.insert(0, str(Path(__file__).parent))
from scripted import STEPS, Offer, difference, lora, masked

GRPO = trlx_hybrid.GRPOTrainer
LONG = {"adaptive_checkpointing": True, "tiles": True, "activation_offloading": True}


@pytest.fixture
def plans(monkeypatch):
    """What the losses' forward passes did, in tiles of a few tokens, on a device that holds nothing."""
    seen = []

    def planned(self, *args, stock=Recomputation._plan):
        seen.append(stock(self, *args))
        return seen[-1]

    monkeypatch.setattr(Recomputation, "_plan", planned)
    monkeypatch.setattr(tiles, "TILE", 8)
    monkeypatch.setattr(recomputation, "OFFLOADING", ("cpu",))
    monkeypatch.setattr(layer_memory, "WORTH", 0)
    monkeypatch.setattr(Session, "free_bytes", lambda self: 0)
    return seen


@pytest.mark.parametrize("adapters", [False, True], ids=["full", "LoRA"])
@pytest.mark.parametrize("joined", [False, True], ids=["apart", "joined"])
def test_the_run_is_trls(compared, noisy, plans, adapters, joined):
    given = {"peft_config": lora()} if adapters else {}
    padded, ours = compared(GRPO, LONG | {"joined": joined}, noisy, **STEPS, **given)
    assert set(plans) == {LayerPlan(kept=0, tiled=True, offloaded=2)}
    assert max(difference(ours, padded)) < 1e-5


def test_an_adapter_on_a_base_in_4_bits(compared, plans, tmp_path):
    pytest.importorskip("bitsandbytes")
    tiny_model().save_pretrained(tmp_path)
    bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32)

    def model():
        return AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=bits, dtype=torch.float32)

    padded, ours = compared(GRPO, LONG, model=model, peft_config=lora(), rollout_func=masked, **STEPS)
    assert set(plans) == {LayerPlan(kept=0, tiled=True, offloaded=2)}
    for mine, theirs in zip(ours.logs, padded.logs, strict=True):
        assert mine == pytest.approx(theirs, abs=1e-5, rel=1e-5)
    trained = {name: weight for name, weight in padded.weights().items() if "lora_" in name}
    assert trained
    for name, weight in trained.items():  # in bfloat16, as TRL trains them: one unit is up to 2^-7 of a value
        torch.testing.assert_close(ours.weights()[name], weight, rtol=2**-7, atol=2**-13)


def test_inputs_go_to_host_memory_and_change_no_bit(compared, noisy, plans):
    """Where tiles are off, whose sums may round otherwise."""
    _, usual = compared(GRPO, {}, noisy, **STEPS)
    _, ours = compared(GRPO, LONG | {"tiles": False}, noisy, **STEPS)
    assert set(plans) == {LayerPlan(kept=0, tiled=False, offloaded=2)}
    assert difference(ours, usual) == (0.0, 0.0)


def test_inputs_stay_where_the_device_is_the_host_or_they_are_small(compared, noisy, plans, monkeypatch):
    for module, name, value in ((recomputation, "OFFLOADING", ("cuda",)), (layer_memory, "WORTH", 1 << 29)):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, value)
            plans.clear()
            compared(GRPO, LONG, noisy, **STEPS)
        assert {plan.offloaded for plan in plans} == {0}


def test_ranks_of_one_host_share_its_memory(compared, noisy, plans, monkeypatch):
    monkeypatch.setattr("trlx_hybrid.memory.host.free_bytes", lambda: 1 << 30)
    monkeypatch.setattr(Recomputation, "_input", 1 << 20)  # 39 tokens or more take 39 MiB each of two layers
    compared(GRPO, LONG, noisy, **STEPS)
    assert {plan.offloaded for plan in plans} == {2}
    plans.clear()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1000")
    compared(GRPO, LONG, noisy, **STEPS)
    assert plans[0].offloaded == 0


def test_padded_rows_of_one_tile_are_not_planned_in_tiles(compared, noisy, plans, monkeypatch):
    """However many there are: a module is tiled by the length of its rows."""
    monkeypatch.setattr(tiles, "TILE", 40)
    compared(GRPO, LONG | {"packing": False}, noisy, **STEPS)
    assert not any(plan.tiled for plan in plans)


def test_rows_of_one_tile_are_counted_whatever_their_linear_modules_tell(compared, noisy, plans, monkeypatch):
    """These tell too much, and a run whose layers are never counted would recompute all of them."""
    monkeypatch.setattr(tiles, "TILE", 8192)
    compared(GRPO, LONG, noisy, **STEPS)
    assert plans[0] == LayerPlan(kept=1)
    assert set(plans[1:]) == {LayerPlan(kept=0, offloaded=2)}


class Operations(TorchDispatchMode):
    """Notes each operation of torch, with the shapes of what it reads."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        shapes = [tuple(value.shape) for value in args if isinstance(value, torch.Tensor)]
        self.seen.append((str(func), shapes))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("adapters", [False, True], ids=["full", "LoRA"])
def test_they_cost_nothing_where_memory_holds_the_rows(run, noisy, plans, monkeypatch, adapters):
    """Not one operation of a step, forward or backward, is another than without tiles and host memory."""
    monkeypatch.setattr(Session, "free_bytes", lambda self: 1 << 60)
    stock, found = GRPO.training_step, {}

    def training_step(self, *args, **kwargs):
        with Operations() as operations:
            loss = stock(self, *args, **kwargs)
        found[on].append(operations.seen)
        return loss

    monkeypatch.setattr(GRPO, "training_step", training_step)
    for on in (False, True):
        found[on] = []
        options = BEFORE | {"adaptive_checkpointing": True, "tiles": on, "activation_offloading": on}
        given = {"peft_config": lora()()} if adapters else {}
        settings = noisy | {"scoring": "packed", "scoring_options": options}
        run(GRPO, hybrid=settings, plugins=[Offer()], **STEPS, **given).close()
    assert [plan.tiled or plan.offloaded > 0 for plan in plans] == [False] * len(plans)
    assert found[True] == found[False]
    assert len(found[True]) > 2
    assert all(any("backward" in name for name, _ in step) for step in found[True])


def test_it_is_said_once(compared, noisy, plans, caplog):
    with caplog.at_level(logging.WARNING):
        compared(GRPO, LONG, noisy, **STEPS)
    said = [r.message for r in caplog.records if "does not fit as it is" in r.message]
    assert len(said) == 1
    assert "2 of 2 layers are recomputed, 2 of their inputs are kept in host memory, and norms and MLPs are" in said[0]


def test_the_host_has_less_memory_than_is_wanted(compared, noisy, plans, monkeypatch):
    monkeypatch.setattr("trlx_hybrid.memory.host.free_bytes", lambda: 0)
    padded, ours = compared(GRPO, LONG, noisy, **STEPS)
    assert {plan.offloaded for plan in plans} == {0}
    assert max(difference(ours, padded)) < 1e-5


def test_a_tiled_layer_is_counted_where_one_is_kept(compared, noisy, plans, monkeypatch):
    """So that the next forward pass knows more than its linear modules tell."""
    monkeypatch.setattr(Recomputation, "_plan", lambda *_: LayerPlan(kept=1, tiled=True))
    padded, ours = compared(GRPO, LONG, noisy, **STEPS)
    chooses = ours.trainer.session.scoring.recomputation
    assert chooses.tiled_bytes.seen
    assert not chooses.whole_bytes.seen
    assert chooses.recomputed == 1
    layers = chooses._layers()
    told = bytes_by_width(layers[-1], 4) * 100
    counted = sum(storages_of_a_whole_layer(ours.trainer, 100).values())
    assert counted <= chooses._sizes(100, 0, 1, layers).whole < 0.8 * told
    assert max(difference(ours, padded)) < 1e-5


def storages_of_a_whole_layer(trainer, tokens):
    model = trainer.session.policy.base.train()
    with recomputation.counting_kept(model.model.layers[-1]) as storages:
        model(input_ids=torch.arange(tokens)[None] % 90, use_cache=False)
    return storages


def test_host_memory_is_freed_at_the_end(run, noisy, plans):
    done = run(GRPO, hybrid=noisy | {"scoring": "packed", "scoring_options": BEFORE | LONG}, plugins=[Offer()], **STEPS)
    host = done.trainer.session.scoring.recomputation.host
    assert isinstance(host, HostInputs)
    assert host.bytes
    done.close()
    assert host.bytes == 0


@pytest.mark.parametrize("adapters", [False, True], ids=["full", "LoRA"])
def test_long_rows_are_compared_on_a_part(compared, noisy, monkeypatch, caplog, adapters):
    """Whole rows, padded, would take more memory than the run: those around the completion's beginning."""
    monkeypatch.setattr(scoring, "LONGEST", 12)
    seen = []

    def prepare(self, rows, stock=scoring._alone):
        seen.append((rows.input_ids.shape[1], rows.completion_length))
        return stock(rows)

    monkeypatch.setattr(scoring, "_alone", lambda rows: prepare(None, rows))
    with caplog.at_level(logging.INFO):
        padded, ours = compared(GRPO, {}, noisy, **STEPS, **({"peft_config": lora()} if adapters else {}))
    assert seen == [(12, 6)]
    assert any("on up to 12 tokens of each" in r.message for r in caplog.records)
    assert ours.trainer.session.scoring.padded_because is None
    assert max(difference(ours, padded)) < 1e-5


def test_a_wrong_part_of_a_long_row_leaves_all_rows_padded(compared, noisy, monkeypatch):
    monkeypatch.setattr(scoring, "LONGEST", 12)
    monkeypatch.setattr(scoring, "_alone", lambda rows, stock=scoring._alone: stock(rows) + torch.tensor(0.1))
    _, ours = compared(GRPO, {}, noisy, **STEPS)
    assert "packed and padded log-probs" in ours.trainer.session.scoring.padded_because


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, for rows so long")
def test_a_row_of_64k_tokens_has_the_log_probs_and_gradients_of_the_plain_path():
    """Two layers as an 8B model has them. Random weights hide a wrong attention, so each gradient is compared."""
    torch.manual_seed(0)
    shape = {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 2, "num_attention_heads": 32}
    config = Qwen3Config(**shape, num_key_value_heads=8, vocab_size=4096, max_position_embeddings=1 << 16)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    ids = torch.randint(1, 4096, (1, 1 << 16), device="cuda")
    host, found = HostInputs(torch.device("cuda", 0)), []
    for long in (False, True):
        model.zero_grad()
        if long:
            for layer in model.model.layers:
                stock, modules = layer._gradient_checkpointing_func, tiles.tileable(layer)
                call = partial(recomputation.computed_in_tiles, modules)
                layer._gradient_checkpointing_func = partial(in_tiles_and_on_the_host, host, stock, call)
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
        host.settle()
        chosen = hidden[:, ::61]
        log_probs = model.lm_head(chosen).float().log_softmax(-1)[..., 7]
        log_probs.mean().backward()
        found.append([log_probs.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
    assert host.bytes
    assert len(found[0]) == len(found[1]) > 20
    assert comparison.difference(found[1], found[0], torch.bfloat16) is None
    host.close()


def in_tiles_and_on_the_host(host, stock, call, function, *args, **kwargs):
    return host.keeping(stock, partial(call, function), *args, **kwargs)
