"""One set of weights, two owners: views of vLLM's memory, and copies into them."""

import pytest
import torch
import trlx_hybrid
from accelerate import Accelerator
from safetensors import safe_open
from trlx_hybrid.errors import ComponentError, SyncError
from trlx_hybrid.testing.models import tiny_model
from trlx_hybrid.weights import verify as proof
from trlx_hybrid_vllm.private.engine import model_of

from tests.support.agreement import gap

SHAPES = [(a, tied) for a in ("qwen2", "qwen3", "llama") for tied in (False, True)] + [("gemma2", True)]
"""Gemma ties its embeddings always."""


def perturb(model):
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_(torch.randn_like(p) * 0.05)


# --- both oracles, every path ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("architecture", "tied"), SHAPES, ids=[f"{a}-{'tied' if t else 'untied'}" for a, t in SHAPES])
@pytest.mark.parametrize("path", ["alias", "copy", "gather"])
def test_a_path_passes_both_oracles_after_a_perturbation(run, path, architecture, tied):
    model = tiny_model(architecture, tied=tied)
    model.set_attn_implementation("eager")  # sdpa leaves out Gemma 2's soft-capping of attention, vLLM does not
    finished = run(trlx_hybrid.GRPOTrainer, model=model, use_vllm=True, hybrid={"weights": path}, train=False)
    session = finished.trainer.session
    assert gap(session) < 1e-5
    perturb(finished.trainer.model)
    session.weights_changed()
    assert gap(session) < 1e-5
    assert session.weights.name == path
    assert session.live_engine.differing(session.policy.full_weights()) == []


GEMMA4 = {
    "global_head_dim": 32,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 64,
    "vocab_size_per_layer_input": 98,
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
}
APERTUS = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}


@pytest.mark.parametrize(
    ("path", "architecture", "config"),
    [(path, "gemma4_text", GEMMA4) for path in ("alias", "copy", "reshard", "gather")]
    + [("alias", "apertus", APERTUS)],
)
def test_buffers_that_a_checkpoint_holds_come_with_the_weights(run, path, architecture, config):
    """Gemma 4 scales each layer by a buffer; Apertus's activation has two, which vLLM computes anew."""
    model = tiny_model(architecture, tied=True, **config)
    for module in model.modules():
        if type(module).__name__ == "XIELUActivation":
            module.bfloat16()  # as transformers and vLLM build it, in whatever dtype the model is
    scales = [b for name, b in model.named_buffers() if name.endswith("layer_scalar")]
    for scale in scales:
        scale.fill_(0.7)
    finished = run(trlx_hybrid.GRPOTrainer, model=model, use_vllm=True, hybrid={"weights": path}, train=False)
    session = finished.trainer.session
    assert gap(session) < 1e-5
    assert session.weights.name == path
    perturb(model)
    for scale in scales:
        scale.mul_(0.8)
    session.weights_changed()
    assert gap(session) < 1e-5
    assert session.live_engine.differing(session.policy.full_weights()) == []
    for scale in scales:
        scale.mul_(0.8)
        with pytest.raises(SyncError, match="layer_scalar"):
            session.weights.check(full=True) or proof.check_bits(session.live_engine, session.policy)


@pytest.mark.parametrize("architecture", ["deepseek_v3", "qwen3_next"])
def test_experts_latents_and_states_survive_sleep(run, architecture):
    """DeepSeek's derived matrices and linear attention's states are given back with the weights and the KV cache."""
    model = tiny_model(architecture)
    given = {"weights": "gather", "engine_options": {"enable_sleep_mode": True}}
    finished = run(trlx_hybrid.GRPOTrainer, model=model, use_vllm=True, hybrid=given, max_steps=2, learning_rate=1e-2)
    session = finished.trainer.session
    assert session.live_engine.asleep == {"weights", "kv_cache"}
    assert gap(session) < 1e-5


def test_what_vllm_computes_into_a_buffer_stays_when_the_parameters_are_made_random():
    """Qwen2.5-VL's scale of the pixels is such a buffer, and in no checkpoint."""
    from trlx_hybrid_vllm.private.models import dummy_load_format
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader import get_model_loader

    model = torch.nn.Sequential(torch.nn.BatchNorm1d(4))
    torch.nn.init.constant_(model[0].weight, 5.0)
    get_model_loader(LoadConfig(load_format=dummy_load_format())).load_weights(model, None)
    assert model[0].running_var.tolist() == [1.0] * 4
    assert model[0].weight.abs().max() < 1


def test_over_twenty_steps_alias_copy_and_gather_sample_and_score_alike_with_and_without_sleep(run):
    def sampled(path, sleep):
        finished = run(
            trlx_hybrid.GRPOTrainer,
            use_vllm=True,
            vllm_enable_sleep_mode=sleep,
            hybrid={"weights": path},
            max_steps=20,
        )
        finished.close()
        rewards = [log["reward"] for log in finished.trainer.state.log_history if "reward" in log]
        assert len(rewards) == 20
        return finished.recorder.completions, rewards

    first = sampled("alias", False)
    others = [(p, s) for p in ("alias", "copy", "gather") for s in (False, True)][1:]
    for path, sleep in others:
        assert sampled(path, sleep) == first, (path, sleep)


# --- alias -------------------------------------------------------------------------------------------------------


def test_an_alias_moves_nothing_and_halves_the_weights(run):
    finished = run(trlx_hybrid.GRPOTrainer, use_vllm=True, max_steps=2)
    session = finished.trainer.session
    engine = session.live_engine
    owned = {p.untyped_storage().data_ptr() for p in engine.resident("weights")}
    memory = [range(t.data_ptr(), t.data_ptr() + t.nbytes) for t in engine.resident("weights")]
    assert session.weights.name == "alias"
    for p in finished.trainer.model.parameters():
        assert any(p.data_ptr() in block for block in memory)
    logs = [log for log in finished.trainer.state.log_history if "hybrid/sync_bytes" in log]
    assert [log["hybrid/sync_bytes"] for log in logs][1:] == [0]
    assert len(owned) > 1


def test_a_parameter_that_somebody_rebound_is_taken_back(run):
    finished = run(trlx_hybrid.GRPOTrainer, use_vllm=True, max_steps=1)
    session, model = finished.trainer.session, finished.trainer.model
    moved = model.model.layers[0].self_attn.q_proj.weight
    moved.data = moved.data.clone() * 1.5
    session.weights_changed()
    assert gap(session) < 1e-5
    assert session.metrics["hybrid/sync_bytes"] == moved.nbytes
    with torch.no_grad():
        moved.mul_(0.5)
    session.weights_changed()
    assert gap(session) < 1e-5
    assert session.metrics["hybrid/sync_bytes"] == 0


def test_averaged_weights_are_sampled_from_in_an_evaluation_and_training_goes_on_from_its_own(run):
    """The common snippet: `backup = p.data; p.data = shadow`, evaluate, `p.data = backup`."""
    finished = run(trlx_hybrid.GRPOTrainer, use_vllm=True, max_steps=1)
    session, model = finished.trainer.session, finished.trainer.model
    own = finished.weights()
    shadow = {name: p.data * 0.9 for name, p in model.named_parameters()}
    backup = {}
    for name, p in model.named_parameters():
        backup[name], p.data = p.data, shadow[name]
    assert gap(session) < 1e-5
    assert gap(session) < 1e-5  # a second batch of the evaluation
    assert all(torch.equal(backup[name], own[name]) for name in own)
    assert all(torch.equal(shadow[name], own[name] * 0.9) for name in own)
    for name, p in model.named_parameters():
        p.data = backup[name]
    assert all(torch.equal(p, own[name]) for name, p in model.named_parameters())
    perturb(model)
    assert gap(session) < 1e-5
    assert session.metrics["hybrid/sync_bytes"] == 0  # one memory again


@pytest.mark.parametrize("path", ["alias", "copy"])
def test_a_parameter_that_was_replaced_is_followed(run, path):
    finished = run(trlx_hybrid.GRPOTrainer, use_vllm=True, hybrid={"weights": path}, max_steps=1)
    session, model = finished.trainer.session, finished.trainer.model
    old = dict(model.named_parameters())  # as an optimizer holds them
    model.load_state_dict(tiny_model(seed=7).state_dict(), assign=True)
    session.weights_changed()
    assert gap(session) < 1e-5
    session.weights_changed()
    assert gap(session) < 1e-5
    assert not any(torch.equal(p, old[name]) for name, p in model.named_parameters() if "norm" not in name)
    with torch.no_grad():
        model.resize_token_embeddings(128)
    session.weights_changed()
    with pytest.raises(SyncError, match=r"model\.embed_tokens\.weight, lm_head\.weight got another shape"):
        gap(session)


class FlatOptimizer(torch.optim.SGD):
    """What DeepSpeed's ZeRO-1 does: parameters become parts of one buffer, and the buffer is stepped."""

    def __init__(self, parameters):
        parameters = list(parameters)
        self.flat = torch.nn.Parameter(torch.cat([p.detach().reshape(-1) for p in parameters]))
        parts = self.flat.detach().split([p.numel() for p in parameters])
        for p, part in zip(parameters, parts, strict=True):
            p.data = part.view_as(p)
        super().__init__([self.flat], lr=1.0)


def test_parameters_that_lie_in_an_optimizers_flat_buffer_stay_there(run):
    model = tiny_model()
    finished = run(trlx_hybrid.GRPOTrainer, model=model, use_vllm=True, train=False)
    session = finished.trainer.session
    assert gap(session) < 1e-5
    assert session.weights.name == "alias"
    finished.trainer.optimizer = optimizer = FlatOptimizer(model.parameters())  # after an evaluation, say
    for _ in range(2):
        optimizer.flat.data.add_(torch.randn_like(optimizer.flat) * 0.05)
        assert gap(session) < 1e-5
    session.release_engine()
    assert gap(session) < 1e-5
    assert session.weights.name == "copy"
    why = "not alias: the optimizer steps a flat buffer that model.embed_tokens.weight is a part of"
    assert why in session.weights_why


# --- copy --------------------------------------------------------------------------------------------------------


def test_frozen_weights_are_copied_when_they_were_written_to_and_after_their_last_update(run):
    finished = run(trlx_hybrid.GRPOTrainer, use_vllm=True, hybrid={"weights": "copy"}, max_steps=1)
    session, layers = finished.trainer.session, finished.trainer.model.model.layers
    small = layers[0].self_attn.q_proj.weight
    perturb(layers[0])
    layers[0].requires_grad_(False)  # LISA: other layers' turn
    layers[1].requires_grad_(False)
    assert gap(session) < 1e-5
    everything = session.metrics["hybrid/sync_bytes"]
    perturb(finished.trainer.model.lm_head)
    assert gap(session) < 1e-5
    assert session.metrics["hybrid/sync_bytes"] < everything
    for write in (lambda: small.data.mul_(1.5), lambda: layers[1].mlp.up_proj.weight.add_(0.1)):  # a merge; by hand
        write()
        perturb(finished.trainer.model.lm_head)
        assert gap(session) < 1e-5
        assert session.metrics["hybrid/sync_bytes"] == everything
    small.data[0, 1] += 3.0  # what no look at a sample sees
    session.weights_changed()
    assert gap(session) < 1e-5


# --- both at once ------------------------------------------------------------------------------------------------


def test_a_mixed_dtype_model_takes_both_alias_and_copy(run):
    model = tiny_model()
    model.model.norm.weight.data = model.model.norm.weight.data.bfloat16()
    finished = run(trlx_hybrid.GRPOTrainer, model=model, use_vllm=True, train=False)
    session = finished.trainer.session
    assert gap(session) < 1e-5
    assert session.weights.name == "alias"
    perturb(model)
    session.weights_changed()
    assert gap(session) < 1e-5
    assert session.metrics["hybrid/sync_bytes"] == model.model.norm.weight.nbytes


def test_auto_says_why_a_cheaper_path_was_refused(run, capfd):
    finished = run(
        trlx_hybrid.GRPOTrainer, use_vllm=True, hybrid={"engine_options": {"dtype": "bfloat16"}}, max_steps=1
    )
    header = capfd.readouterr().err
    assert "weights=copy (auto; not alias: the policy is in float32, the engine computes in bfloat16" in header
    assert finished.trainer.session.weights.name == "copy"


def test_a_chosen_path_that_cannot_serve_is_refused_with_its_reason(run):
    with pytest.raises(ComponentError, match=r"weights='alias' cannot serve this run: the policy is in float32"):
        run(
            trlx_hybrid.GRPOTrainer,
            use_vllm=True,
            hybrid={"weights": "alias", "engine_options": {"dtype": "bfloat16"}},
        )


def test_a_weight_that_vllm_rearranges_before_it_copies_is_neither_shared_nor_left_stale(run):
    """GPT-NeoX's fused query_key_value, whose heads vLLM puts in another order."""
    model = tiny_model("gpt_neox", num_key_value_heads=4, hidden_dropout=0.0, attention_dropout=0.0)
    finished = run(trlx_hybrid.GRPOTrainer, model=model, use_vllm=True, train=False)
    session = finished.trainer.session
    assert gap(session) < 1e-5
    perturb(model)
    session.weights_changed()
    assert gap(session) < 1e-5
    assert session.weights.name == "gather"
    assert (
        "not alias: gpt_neox.layers.0.attention.query_key_value.weight: vLLM's loader computes" in session.weights_why
    )
    kept = ((n, t) for n, t in session.policy.full_weights() if n != "gpt_neox.layers.0.attention.query_key_value.bias")
    with session.rollout_phase(True), pytest.raises(SyncError, match=r"unwritten: .*query_key_value\.bias"):
        session.live_engine.load_weights(kept)
    session.weights_changed()


def test_a_model_that_vllm_builds_from_transformers_own_classes_trains(run):
    """OLMo 2 comes through vLLM's Transformers backend, which decorates the classes it finds in transformers."""
    model = tiny_model("olmo2")
    bases, attributes = type(model.model).__bases__, dict(vars(type(model.model)))
    finished = run(trlx_hybrid.GRPOTrainer, model=model, use_vllm=True, max_steps=2, learning_rate=1e-2)
    assert gap(finished.trainer.session) < 1e-5
    assert (type(model.model).__bases__, dict(vars(type(model.model)))) == (bases, attributes)
    theirs = model_of(finished.trainer.session.live_engine.llm).model
    assert theirs.do_not_compile  # on a CPU; what vLLM added is there


def test_bits_that_differ_are_named(run):
    finished = run(trlx_hybrid.GRPOTrainer, use_vllm=True, hybrid={"weights": "copy"}, max_steps=1)
    session = finished.trainer.session
    with session.rollout_phase(True):
        engine = session.live_engine
        view = engine.places(session.policy).view("model.layers.1.mlp.down_proj.weight")
        view[0, 0] += 1
        with pytest.raises(SyncError, match=r"other bits than the policy in model\.layers\.1\.mlp\.down_proj\.weight"):
            session.weights.check(full=True)


def test_everything_is_saved_under_alias(run, tmp_path):
    finished = run(trlx_hybrid.GRPOTrainer, use_vllm=True, max_steps=1)
    model = finished.trainer.model
    names = {name for name, _ in model.named_parameters()}
    Accelerator(cpu=True).save_model(model, tmp_path / "accelerate")
    finished.trainer.save_model(tmp_path / "trainer")
    for folder in ("accelerate", "trainer"):
        with safe_open(tmp_path / folder / "model.safetensors", "pt") as saved:
            assert set(saved.keys()) == names
            assert all(torch.equal(saved.get_tensor(n), p) for n, p in model.named_parameters())


def test_after_the_session_the_policy_owns_its_weights(run):
    finished = run(trlx_hybrid.GRPOTrainer, use_vllm=True, max_steps=1)
    before = finished.weights()
    finished.close()
    model = finished.trainer.model
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert all(p.untyped_storage().resizable() for p in model.parameters())
