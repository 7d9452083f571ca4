"""Router replay: the trainer's forward passes take the experts that vLLM chose, and what is left is rounding."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import trl
import trlx_hybrid
from transformers import AutoConfig, AutoModelForImageTextToText
from trlx_hybrid.errors import ComponentError, ConfigError
from trlx_hybrid.routing import DIFFERENCE, EXPERTS, ROUTERS, RouterReplay, aligned, routers_of
from trlx_hybrid.testing.chat import chat_tokenizer
from trlx_hybrid.testing.models import tiny_model

sys.path.insert(0, str(Path(__file__).parent))
from dropping import Offers

LAYERS, CHOSEN = 2, 4
BLOCK = LAYERS * 2 * 2 * 32 * 32 * 4  # bytes of 32 tokens' keys and values, 2 heads of 32 each, in fp32
GAP = "sampling/sampling_logp_difference"
HALF = {"engine": "vllm", "engine_options": {"dtype": "bfloat16"}, "max_logprob_gap": float("inf")}
LONG = {"max_steps": 1, "per_device_train_batch_size": 16, "max_completion_length": 40}


def routed(seed=2, **config):
    return tiny_model("qwen3_moe", seed=seed, **{"num_experts": 16, "num_experts_per_tok": CHOSEN} | config)


@pytest.fixture
def train(run):
    """`train(replay, hybrid, **arguments)`: a finished run of a model with experts."""

    def start(replay, hybrid=None, trainer=trlx_hybrid.GRPOTrainer, **given):
        made = given.pop("make", dict)()
        hybrid = {"engine": "vllm", "router_replay": replay} | (hybrid or {})
        finished = run(trainer, hybrid=hybrid, **{"model": routed(), **given, **made})
        finished.close()
        return finished

    return start


def logged(finished, name):
    return [log[name] for log in finished.trainer.state.log_history if name in log]


# --- what it is for ---------------------------------------------------------------------------------------------------


def test_what_is_left_between_engine_and_trainer_is_rounding(train):
    """The ruler is a model in which nothing can be chosen, with as many experts to a token: there the gap is what the
    engine's bf16 rounds. Of what goes beyond it nine tenths are gone; the rest is of its size, above it or below as
    the processor's products round."""
    own, replayed = train(False, HALF, **LONG), train(True, HALF, **LONG)
    rounding = train(False, HALF, model=routed(num_experts=CHOSEN), **LONG)
    assert own.recorder.completions == replayed.recorder.completions
    for kind in ("mean", "max"):
        (without,), (with_it,), (least,) = (logged(each, f"{GAP}/{kind}") for each in (own, replayed, rounding))
        assert least < without
        assert with_it - least < 0.1 * (without - least)
    assert not logged(own, DIFFERENCE)
    assert 0 < logged(replayed, DIFFERENCE)[0] < 0.05


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"gradient_accumulation_steps": 2},
        {"generation_kwargs": {"stop": ["#"]}},
    ],
    ids=["plain", "accumulated", "stop strings"],
)
def test_of_every_token_that_was_computed_the_experts_are_known(train, given):
    drawn = train(True, HALF, max_steps=1, **given).trainer._buffered_inputs
    experts = torch.cat([micro[EXPERTS] for micro in drawn])
    mask = torch.cat([torch.cat([m["prompt_mask"], m["completion_mask"]], dim=1) for m in drawn]).bool()
    assert experts.dtype == torch.int16
    assert tuple(experts.shape) == (*mask.shape, LAYERS, CHOSEN)
    computed = mask & (mask.flip(1).cumsum(1).flip(1) > 1)  # all but the last of a row
    assert (experts[computed] >= 0).all()
    assert (experts[computed].sort(-1).values.diff(dim=-1) > 0).all()  # each once


class Watching(trl.GRPOTrainer):
    """Keeps what the experts computed in the loss forwards, and what they were to compute."""

    def compute_loss(self, model, inputs, *args, **kwargs):
        self.computed.clear()
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        self.seen.append((inputs[EXPERTS], dict(self.computed)))
        return loss


def test_the_choice_that_reaches_the_experts_is_the_engines(run):
    model = routed()
    kind = trlx_hybrid.hybrid(Watching)
    given = {"model": model, "max_steps": 2, "gradient_accumulation_steps": 2, "gradient_checkpointing": False}
    started = run(kind, train=False, hybrid=HALF | {"router_replay": True, "scoring": "padded"}, **given)
    trainer = started.trainer
    trainer.computed, trainer.seen = {}, []
    for number, layer in enumerate(model.model.layers):
        layer.mlp.experts.register_forward_pre_hook(lambda _, a, n=number: trainer.computed.update({n: a[1]}))
    trainer.train()
    assert len(trainer.seen) == 4
    for wanted, computed in trainer.seen:
        for layer in range(LAYERS):
            engines = wanted[:, :, layer].flatten(0, 1).long()
            known = (engines >= 0).all(1)
            assert known.any()
            assert torch.equal(engines[known].sort(1).values, computed[layer][known].sort(1).values)
    assert logged(started, DIFFERENCE)[0] > 0


# --- where both choose alike, nothing changes -------------------------------------------------------------------------

CASES = {
    "grpo": {},
    "accumulated": {"gradient_accumulation_steps": 2, "max_steps": 2},
    "rloo": {"trainer": trlx_hybrid.RLOOTrainer, "config_class": trl.RLOOConfig, "beta": 0.0},
    "evaluated": {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 8},
    "unchecked": {"gradient_checkpointing": False},
}


@pytest.mark.parametrize("given", CASES.values(), ids=CASES)
def test_with_equal_choices_no_bit_changes(train, prompts, given):
    if "eval_strategy" in given:
        given = given | {"eval_dataset": prompts.select(range(8))}
    own, replayed = (train(replay, make=lambda: {"model": routed()}, **given) for replay in (False, True))
    assert set(logged(replayed, DIFFERENCE)) == {0.0}  # of every token, so the capture is in its place as well
    assert own.logs == replayed.logs
    weights = replayed.weights()
    assert all(torch.equal(weights[name], weight) for name, weight in own.weights().items())


def test_what_vllm_preempts_is_computed_again_and_known_once(train, monkeypatch):
    from vllm.v1.core.sched.scheduler import Scheduler

    preempted, preempt = [], Scheduler._preempt_request
    monkeypatch.setattr(Scheduler, "_preempt_request", lambda *a, **k: preempted.append(1) or preempt(*a, **k))
    few = {"engine_options": {"kv_cache_memory_bytes": 12 * BLOCK}}
    replayed = train(True, few, max_completion_length=40, max_steps=1, generation_kwargs={"ignore_eos": True})
    assert preempted
    assert logged(replayed, DIFFERENCE) == [0.0]


def test_later_steps_on_a_rollout_keep_its_experts(train):
    """Whatever the weights have become; before they change, both choose alike."""
    replayed = train(True, steps_per_generation=2, num_iterations=2, max_steps=4)
    first, *later = logged(replayed, DIFFERENCE)
    assert first == 0.0
    assert min(later) > 0.0


def test_adapters_train_with_it_and_their_reference_chooses_for_itself(train):
    from peft import LoraConfig

    given = {"beta": 0.1, "max_steps": 1, "peft_config": LoraConfig(target_modules=["q_proj", "v_proj"])}
    own, replayed = (train(r, HALF, **given, make=lambda: {"model": routed()}) for r in (False, True))
    first, second = (each.trainer._buffered_inputs[0] for each in (own, replayed))
    assert EXPERTS in second
    assert logged(replayed, DIFFERENCE)[0] > 0
    assert torch.equal(first["completion_ids"], second["completion_ids"])
    assert torch.equal(first["ref_per_token_logps"], second["ref_per_token_logps"])


@pytest.mark.parametrize(
    "options", [{"deferred": False}, {}, {"adaptive_checkpointing": True, "joined": True}], ids=str
)
def test_packed_rows_replay_what_padded_ones_do(train, options):
    given = {"max_steps": 1, "gradient_accumulation_steps": 2, "make": lambda: {"model": routed()}}
    padded = train(True, HALF, **given)
    packed = train(True, HALF | {"scoring": "packed", "scoring_options": options}, **given)
    for name in (f"{GAP}/mean", f"{GAP}/max", "loss", "grad_norm"):
        assert logged(packed, name) == pytest.approx(logged(padded, name), abs=1e-5)
    assert logged(packed, DIFFERENCE)[0] > 0


def test_a_recorded_run_is_replayed_with_its_experts(train, tmp_path):
    given = {"max_steps": 2, "make": lambda: {"model": routed()}}
    recorded = train(True, HALF | {"record": str(tmp_path / "kept")}, **given)
    again = train(True, {"engine": None, "replay": str(tmp_path / "kept")}, **given)
    assert again.logs == recorded.logs
    weights = again.weights()
    assert all(torch.equal(weights[name], weight) for name, weight in recorded.weights().items())


# --- one router -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "architecture", ["qwen3_moe", "qwen2_moe", "olmoe", "mixtral", "qwen3_next", "qwen3_5_moe_text"]
)
def test_weights_of_given_experts_are_the_routers_own_and_bring_it_gradients(architecture):
    size = {"num_local_experts" if architecture == "mixtral" else "num_experts": 8}
    model = tiny_model(architecture, **size)
    layer, router = next(iter(routers_of(model).items()))
    assert type(router).__name__ in ROUTERS
    hidden = torch.randn(6, 128, generator=torch.Generator().manual_seed(0))
    _, scores, own = router(hidden)
    scores.square().sum().backward()
    gradient, router.weight.grad = router.weight.grad, None

    replay = RouterReplay(model)
    experts = torch.full((6, 2, 2), -1, dtype=torch.int16)
    experts[:, layer] = own
    experts[1, layer] = own[1].flip(0)  # the same two
    with replay.replaying(experts):
        again = router(hidden)
    assert torch.equal(again[1], scores)
    assert torch.equal(again[2], own)
    again[1].square().sum().backward()
    assert torch.equal(router.weight.grad, gradient)
    assert replay.difference().tolist() == [0, 12]
    router.weight.grad = None

    others = torch.tensor([[e for e in range(8) if e not in row][:2] for row in own.tolist()])
    experts[:, layer], experts[5, layer] = others, -1  # where it is not known, the router chooses
    with replay.replaying(experts):
        weights, indices = router(hidden)[1:]
    assert torch.equal(indices, torch.cat([others[:5], own[5:]]))
    replay.close()
    probabilities = router(hidden)[0].softmax(-1).gather(1, indices)
    if getattr(router, "norm_topk_prob", True):
        probabilities = probabilities / probabilities.sum(1, keepdim=True)
    assert torch.allclose(weights, probabilities, rtol=0, atol=1e-7)
    weights.square().sum().backward()
    expected = torch.autograd.grad(probabilities.square().sum(), router.weight)[0]
    assert torch.allclose(router.weight.grad, expected, rtol=0, atol=1e-6)
    assert expected.abs().max() > 1e-4
    assert replay.difference().tolist() == [10, 10]

    assert torch.equal(router(hidden)[2], own)
    other = RouterReplay(model)
    with pytest.raises(ComponentError, match="has the experts of 6"), other.replaying(experts):
        router(torch.cat([hidden, hidden]))


def test_experts_stand_where_their_tokens_stand():
    experts = [np.arange(2 * n).reshape(n, 1, 2).astype(np.int16) for n in (3, 2)]
    mask = torch.tensor([[0, 1, 1], [1, 1, 1]])
    rows = aligned(experts, mask, 5)[:, :, 0, 0].tolist()
    assert rows == [[-1, 0, 2, 4, -1], [0, 2, -1, -1, -1]]
    with pytest.raises(ComponentError, match="experts of 1 completions for 2 rows"):
        aligned(experts[:1], mask, 5)


# --- what is refused --------------------------------------------------------------------------------------------------


def rollout_func(prompts, trainer):
    raise AssertionError


def add(a: int, b: int) -> int:
    """Add.

    Args:
        a: one number.
        b: another.

    Returns:
        The sum.
    """
    return a + b


class OwnLogProbs(trl.GRPOTrainer):
    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        raise AssertionError


def seeing():
    """Experts beside a vision tower; vLLM's class of Aria needs no torchvision."""
    small = {"intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = small | {"model_type": "aria_text", "hidden_size": 64, "vocab_size": 98, "moe_num_experts": 4}
    tower = small | {"model_type": "idefics3_vision", "hidden_size": 64}
    config = AutoConfig.for_model("aria", text_config=text, vision_config=tower)
    return AutoModelForImageTextToText.from_config(config)


REFUSED = {
    "OwnLogProbs._get_per_token_logps_and_entropies computes": {"trainer": OwnLogProbs},
    "Qwen3ForCausalLM routes no tokens to experts": {"model": tiny_model},
    "no router that is known": {"model": lambda: tiny_model("glm4_moe")},
    "router_replay is set, but TRL's own generation path": {"hybrid": {"engine": None}},
    "a rollout_func brings tokens without": {"rollout_func": lambda: rollout_func},
    "the turns of a conversation": {
        "tools": lambda: [add],
        "model": lambda: routed(vocab_size=len(chat_tokenizer(["no"]))),
        "processing_class": lambda: chat_tokenizer(["no"]),
    },
    "prompts with images are not covered": {"model": seeing},
    "torch_compile compiles the routers": {"torch_compile": True},
}


@pytest.mark.parametrize(("said", "given"), REFUSED.items(), ids=[*REFUSED])
def test_a_run_that_cannot_replay_is_refused_before_an_engine_is_built(run, said, given):
    trainer = trlx_hybrid.hybrid(given.get("trainer", trl.GRPOTrainer))
    made = {name: v() if callable(v) else v for name, v in given.items() if name != "trainer"}
    hybrid = {"engine": "vllm", "router_replay": True} | made.pop("hybrid", {})
    with pytest.raises(ConfigError, match=said):
        run(trainer, train=False, hybrid=hybrid, **{"model": routed()} | made)


@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        ({"rollout": "forgetful"}, "rollout 'forgetful' .* without `experts`"),
        ({"scoring": "careless"}, "scoring 'careless' leaves out the experts"),
    ],
)
def test_a_component_that_drops_the_experts_is_named(run, chosen, said):
    hybrid = {"engine": "vllm", "router_replay": True} | chosen
    with pytest.raises(ComponentError, match=said):
        run(trlx_hybrid.GRPOTrainer, model=routed(), hybrid=hybrid, plugins=[Offers()])
