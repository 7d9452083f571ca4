"""Base and adapter added up in the engine's own weights: exact in float32, rounded once elsewhere, and said so."""

from pathlib import Path

import pytest
import torch
import trlx_hybrid
from peft import LoraConfig, get_peft_model
from trlx_hybrid import HybridConfig, HybridEngine, hookimpl
from trlx_hybrid.errors import ComponentError, ConfigError, SyncError
from trlx_hybrid.testing.models import character_tokenizer, tiny_model
from trlx_hybrid.testing.processes import rank_reports
from trlx_hybrid_vllm.private.engine import model_of
from trlx_hybrid_vllm.private.lora import adapter_slots_of
from trlx_hybrid_vllm.weights.merged import SHARE, Factors, merge, rounded_at_random

from tests.support.agreement import gap

ADAPTER = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}  # a scaling of 2: a product times it is exact


def adapt(model, **config):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return get_peft_model(model, LoraConfig(**ADAPTER | config))


def perturb(model, scale=0.03):
    generator = torch.Generator().manual_seed(0)
    for p in model.parameters():
        if p.requires_grad:
            p.data.add_(torch.randn(p.shape, generator=generator) * scale)


@pytest.fixture
def serve(started_once):
    """A loop's engine over an adapted model. Closed at the end of the test."""
    engines = []

    def start(model, options=None, seed=0, **engine_options):
        config = HybridConfig(
            engine="vllm",
            engine_options={"max_model_len": 64} | engine_options,
            weights="merged",
            weights_options=options,
        )
        engines.append(HybridEngine(model, character_tokenizer(), max_tokens=8, config=config, seed=seed))
        return engines[-1].session

    yield start
    for engine in engines:
        engine.close()


def held(session):
    """The engine's memory of each parameter of the policy, by name."""
    places = session.live_engine.places(session.policy)
    return {name: places.view(name).clone() for name in places.found}


def adapted(session):
    """The base weights that an adapter changes."""
    modules = dict(session.policy.base.named_modules())
    return {
        name: p
        for name, p in session.policy.base_parameters().items()
        if hasattr(modules[name.rpartition(".")[0]], "scaling")
    }


class Syncs:
    """The bytes of every sync, and whether it left the trainer's weights as they were."""

    def __init__(self):
        self.bytes, self.before = [], {}

    @hookimpl
    def trlx_sync_start(self, session):
        self.before = {name: p.detach().clone() for name, p in session.policy.module.named_parameters()}

    @hookimpl
    def trlx_sync_end(self, session, report):
        self.bytes.append(report.bytes)
        assert all(torch.equal(p, self.before[name]) for name, p in session.policy.module.named_parameters())


# --- in float32, nothing is lost --------------------------------------------------------------------------------------

CASES = {
    "qwen2-tied": ("qwen2", {"tied": True}, {}),
    "qwen3-rslora": ("qwen3", {}, {"use_rslora": True, "lora_alpha": 4}),
    "qwen3-tied": (
        "qwen3",
        {"tied": True},
        {"layers_to_transform": [1], "target_modules": ["k_proj", "o_proj", "up_proj"]},
    ),
    "llama-embeddings": ("llama", {}, {"target_modules": ["embed_tokens", "q_proj", "lm_head"]}),
    "llama-biases": ("llama", {"attention_bias": True}, {"bias": "all", "target_modules": ["q_proj", "o_proj"]}),
    "llama-whole-modules": ("llama", {}, {"modules_to_save": ["norm", "lm_head"], "target_modules": ["q_proj"]}),
    "gemma2": ("gemma2", {"tied": True}, {"rank_pattern": {"down_proj": 8}, "alpha_pattern": {"k_proj": 16}}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_engine_holds_the_bits_of_gather_and_computes_what_the_unmerged_model_does(serve, case):
    architecture, shape, config = CASES[case]
    model = tiny_model(architecture, **shape)
    model.set_attn_implementation("eager")  # sdpa leaves out Gemma 2's soft-capping of attention, vLLM does not
    model = adapt(model, **config)
    session = serve(model)
    for _ in range(2):
        perturb(model)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        assert gap(session) < 1e-5
        assert session.live_engine.differing(session.policy.full_weights()) == []
        assert session.weights.check(full=True) == len(session.policy.base_parameters())
        assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert session.weights.name == "merged"
    assert session.metrics[SHARE] == pytest.approx(1, abs=1e-4)


def test_several_active_adapters_add_up_and_the_adapters_state_is_minded(serve):
    model = adapt(tiny_model())
    model.add_adapter("other", LoraConfig(r=8, lora_alpha=4, target_modules=["q_proj", "up_proj"]))
    model.base_model.set_adapter(["default", "other"])
    perturb(model)
    session = serve(model)
    base = {name: p.detach().clone() for name, p in adapted(session).items()}

    def bits_of_gather():
        session.weights_changed()
        assert gap(session) < 1e-5
        assert session.live_engine.differing(session.policy.full_weights()) == []
        return {name: tensor for name, tensor in held(session).items() if name in base}

    both = bits_of_gather()
    model.base_model.set_adapter("other")
    other = bits_of_gather()
    model.base_model.set_adapter("default")
    first = bits_of_gather()
    with model.disable_adapter():
        none = bits_of_gather()
    model.merge_adapter()
    merged = bits_of_gather()
    assert all(torch.equal(none[name], base[name]) for name in base)
    assert all(torch.equal(merged[name], first[name]) for name in base)
    assert all(not torch.equal(both[name], first[name]) for name in base if "q_proj" in name or "up_proj" in name)
    assert {name for name in base if torch.equal(other[name], base[name])} == {
        name for name in base if not ("q_proj" in name or "up_proj" in name)
    }


def test_layers_that_get_an_adapter_or_lose_it_are_noticed_without_a_word(serve):
    """Nobody calls `weights_changed`: bits that differ start the sync, which looks for adapted layers anew."""
    model = adapt(tiny_model(), target_modules=["q_proj"])
    perturb(model)
    session = serve(model)
    assert gap(session) < 1e-5
    model.add_adapter("wider", LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"]))
    model.base_model.set_adapter("wider")
    perturb(model)
    assert gap(session) < 1e-5
    assert session.live_engine.differing(session.policy.full_weights()) == []


def test_modules_trained_as_a_whole_count_only_while_the_adapter_is_enabled(serve):
    model = adapt(tiny_model(), target_modules=["q_proj"], modules_to_save=["lm_head"])
    perturb(model)
    session = serve(model)
    assert gap(session) < 1e-5
    with model.disable_adapter():
        session.weights_changed()
        assert gap(session) < 1e-5


def test_a_product_is_float32_under_autocast_and_of_some_rows_the_same():
    a, b = torch.randn(4, 32), torch.randn(48, 4)
    for factors, exact in ((Factors(a, b, 2.0, False), b @ a), (Factors(a, b, 2.0, True), (b @ a).T)):
        with torch.autocast("cpu", torch.bfloat16):
            product = factors.product()
        assert torch.equal(product, exact)
        assert torch.allclose(factors.product(slice(7)), exact[:7], atol=1e-6)


def test_another_scaling_is_rounded_once_where_peft_rounds_twice():
    generator = torch.Generator().manual_seed(0)
    weight, a, b = (torch.randn(shape, generator=generator) for shape in ((64, 48), (4, 48), (64, 4)))
    scaling, out = 1.1, torch.empty(64, 48)
    merge(weight, [Factors(a, b, scaling, False)], out)
    scaled = (b @ a) * scaling
    bound = torch.finfo(torch.float32).eps * (scaled.abs() / 2 + out.abs())
    assert bool(((out - (weight + scaled)).abs() <= bound).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("adapter", [torch.float32, torch.bfloat16])
def test_a_merge_into_bfloat16_rounds_the_exact_sum_to_its_nearest_neighbour(dtype, adapter):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(64, 48, generator=generator).to(dtype)
    a, b = (torch.randn(shape, generator=generator).mul(0.1).to(adapter) for shape in ((4, 48), (64, 4)))
    out = torch.empty(64, 48, dtype=torch.bfloat16)
    merge(weight, [Factors(a, b, 2.0, False)], out)
    exact = weight.double() + 2 * (b.double() @ a.double())
    neighbours = torch.stack([out.nextafter(torch.full_like(out, end)) for end in (-torch.inf, torch.inf)]).double()
    nearest = (out.double() - exact).abs()
    assert bool((nearest <= (neighbours - exact).abs().min(0).values + 1e-6 * exact.abs()).all())


# --- a whole training -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sleep", [False, True], ids=["awake", "sleep"])
def test_a_training_is_that_of_gathered_weights_and_only_what_changed_moves(run, capfd, sleep):
    def train(path):
        syncs = Syncs()
        finished = run(
            trlx_hybrid.GRPOTrainer,
            peft_config=LoraConfig(**ADAPTER, init_lora_weights="gaussian", modules_to_save=["norm"]),
            use_vllm=True,
            vllm_enable_sleep_mode=sleep,
            hybrid={"weights": path, "verify_every": 2},
            plugins=[syncs],
            max_steps=4,
        )
        session = finished.trainer.session
        sizes = [
            sum(p.nbytes for p in session.policy.base_parameters().values()),
            sum(p.nbytes for p in (*adapted(session).values(), session.policy.base_parameters()["model.norm.weight"])),
        ]
        shares = [log[SHARE] for log in finished.trainer.state.log_history if SHARE in log]
        layers = model_of(session.live_engine.llm).modules()
        assert not any(adapter_slots_of(layer) for layer in layers)  # vLLM computes no adapter
        finished.close()
        return finished, syncs.bytes, sizes, shares

    merged, moved, (whole, changed), shares = train("merged")
    assert "merged: the sum of base and adapter is rounded to float32" in capfd.readouterr().err
    gathered, *_ = train("gather")
    assert merged.recorder.completions == gathered.recorder.completions
    assert merged.logs == gathered.logs
    assert all(torch.equal(w, gathered.weights()[name]) for name, w in merged.weights().items())
    assert moved == [whole] * 4 if sleep else [whole, changed, changed, changed]
    assert 0 < changed < whole
    assert shares == pytest.approx([1] * 3, abs=1e-3)  # before the first step B is zero


def test_auto_serves_the_adapter_and_does_not_ask(run, capfd):
    finished = run(trlx_hybrid.GRPOTrainer, peft_config=LoraConfig(**ADAPTER), use_vllm=True, max_steps=1)
    assert finished.trainer.session.weights.name == "lora"
    finished.close()
    unserved = LoraConfig(**ADAPTER, modules_to_save=["lm_head"])
    finished = run(trlx_hybrid.GRPOTrainer, peft_config=unserved, use_vllm=True, max_steps=1)
    assert finished.trainer.session.weights.name == "gather"
    assert "not merged" not in capfd.readouterr().err


# --- rounding ---------------------------------------------------------------------------------------------------------


def test_what_an_adapter_loses_in_bfloat16_is_measured_logged_and_warned_of(serve, caplog):
    model = adapt(tiny_model().to(torch.bfloat16).float())
    session = serve(model, dtype="bfloat16")
    assert gap(session) < 0.2
    assert SHARE not in session.metrics  # an adapter that is zero loses nothing
    perturb(model, scale=1e-4)  # as after a few steps
    assert gap(session) < 0.2
    assert session.live_engine.differing(session.policy.full_weights()) == []
    small = session.metrics[SHARE]
    assert small < 0.3
    perturb(model, scale=1e-4)
    gap(session)
    assert caplog.text.count("of the adapter survives rounding to bfloat16") == 1
    assert "weights='lora'" in caplog.text
    perturb(model, scale=0.1)
    assert gap(session) < 0.2
    assert session.metrics[SHARE] > 0.99


def test_the_share_is_the_projection_of_what_changed_on_the_adapter(serve):
    model = adapt(tiny_model(num_hidden_layers=1), target_modules=["q_proj"])
    model.to(torch.bfloat16)
    perturb(model, scale=0.02)
    session = serve(model)
    gap(session)
    (name,) = adapted(session)
    layer = session.policy.base.get_submodule(name.removesuffix(".weight"))
    delta = (layer.lora_B["default"].weight.double() @ layer.lora_A["default"].weight.double()) * 2
    change = held(session)[name].double() - layer.base_layer.weight.double()
    assert session.metrics[SHARE] == pytest.approx(
        float(((change * delta).sum() / (delta * delta).sum()).detach()), rel=1e-4
    )
    assert 0 < session.metrics[SHARE] < 2


def test_stochastic_rounding_keeps_the_adapter_on_average_and_repeats(serve):
    def sampled(seed):
        model = adapt(tiny_model().to(torch.bfloat16).float())
        perturb(model, scale=1e-3)
        session = serve(model, {"rounding": "stochastic"}, seed=seed, dtype="bfloat16", enable_sleep_mode=True)
        assert gap(session) < 0.2
        share = session.metrics[SHARE]
        with session.rollout_phase(True):  # woken, and written anew
            first = held(session)
            assert session.weights.check(full=True)
        perturb(model, scale=1e-6)
        with session.rollout_phase(True):
            second = held(session)
        session.release_engine()
        return share, first, second

    share, first, second = sampled(0)
    assert share == pytest.approx(1, abs=0.1)
    _, again, _ = sampled(0)
    _, other, _ = sampled(1)
    weights = [name for name in first if "proj" in name]
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in weights)
    assert not any(torch.equal(first[name], second[name]) for name in weights)  # another version draws anew


def test_a_training_with_stochastic_rounding_logs_what_survives_and_repeats(run):
    def train():
        finished = run(
            trlx_hybrid.GRPOTrainer,
            model=tiny_model().to(torch.bfloat16).float(),
            peft_config=LoraConfig(**ADAPTER),
            use_vllm=True,
            hybrid={
                "weights": "merged",
                "weights_options": {"rounding": "stochastic"},
                "engine_options": {"dtype": "bfloat16"},
            },
        )
        finished.close()
        shares = [log[SHARE] for log in finished.trainer.state.log_history if SHARE in log]
        return finished.recorder.completions, finished.logs, shares

    first = train()
    assert first[2] == pytest.approx([1, 1], abs=0.1)  # before the first step B is zero
    assert train() == first


def test_stochastic_rounding_takes_neighbours_and_its_mean_is_the_value():
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(256, generator=generator) * torch.logspace(-6, 6, 256)
    below = torch.minimum(*_neighbours(values))
    above = torch.maximum(*_neighbours(values))
    draws = 4000
    drawn = torch.stack([rounded_at_random(values.clone(), generator) for _ in range(draws)]).double()
    assert bool(((drawn == below) | (drawn == above)).all())
    upward = (values.double() - below) / (above - below).clamp(min=1e-300)
    error = (drawn.mean(0) - values.double()).abs()
    deviation = (upward * (1 - upward)).sqrt() * (above - below) / draws**0.5
    assert bool((error <= 4.5 * deviation + 1e-12 * values.abs()).all())
    kept = torch.tensor([0.0, -0.0, 1.5, -2.0, torch.inf, -torch.inf])
    assert torch.equal(rounded_at_random(kept.clone(), generator), kept)
    nan = torch.full((64,), -1, dtype=torch.int32).bitwise_and(0x7FFFFFFF).view(torch.float32)  # as GPUs make it
    assert bool(rounded_at_random(nan, generator).isnan().all())


def _neighbours(values):
    """Of float32 values in bfloat16, in double: towards zero, and away from it where that is no value of its own."""
    inner = values.view(torch.int32).bitwise_and(-1 << 16)
    outer = torch.where(inner == values.view(torch.int32), inner, inner + (1 << 16))
    return inner.view(torch.float32).double(), outer.view(torch.float32).double()


# --- proof and refusals -----------------------------------------------------------------------------------------------


def test_bits_that_differ_are_named_by_a_full_check_at_once_and_by_the_others_in_turn(serve):
    model = adapt(tiny_model())
    perturb(model)
    session = serve(model)
    gap(session)
    name = "model.layers.1.mlp.down_proj.weight"
    session.live_engine.places(session.policy).view(name)[3, 5] += 1
    with pytest.raises(SyncError, match=rf"other bits than the policy in {name}\."):
        session.weights.check(full=True)
    found = []
    for _ in range(4):  # 25 weights, eight at a time
        session.versions.changed()
        try:
            session.weights.check(full=False)
        except SyncError as error:
            found.append(str(error))
    assert len(found) == 1
    assert f"other bits than the policy in {name}." in found[0]


REFUSED = {
    r"computes a variant of LoRA \(DoraLinearVariant\), which is merged as a whole \(`gather`\)": {"use_dora": True},
    "q_proj.weight has a bias": {"lora_bias": True, "bias": "none", "init_lora_weights": True},
    "TrainableTokensLayer layer": {"trainable_token_indices": [3, 4]},
    "part the output head": {"target_modules": ["q_proj", "embed_tokens"]},
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_is_no_sum_of_base_and_product_is_refused_with_its_reason(serve, reason):
    model = tiny_model("llama", tied=reason.startswith("part"), attention_bias=True, mlp_bias=True)
    session = serve(adapt(model, **REFUSED[reason]))
    with pytest.raises(ComponentError, match=rf"weights='merged' cannot serve this run: .*{reason}"):
        session.open()


def test_a_model_without_an_adapter_another_rounding_and_another_dtype_are_refused(serve):
    with pytest.raises(ComponentError, match=r"no adapter that changes a weight\. Or let"):
        serve(tiny_model()).open()
    adapted = adapt(tiny_model())
    with pytest.raises(ComponentError, match=r"rounding='stochastic' is for engines in bfloat16.*float32"):
        serve(adapted, {"rounding": "stochastic"}).open()
    with pytest.raises(ConfigError, match=r"no rounding 'nearst'. Did you mean 'nearest'\?"):
        serve(adapted, {"rounding": "nearst"})


def test_ranks_round_alike_and_slices_and_shards_are_refused(tmp_path):
    script = Path(__file__).parent / "scripts" / "merged_distributed.py"
    first, second = rank_reports(script, tmp_path, count=2)
    assert first == second
    assert len(first["digest"]) == 64
    assert "each of the 2 ranks of an engine holds a part of the weights" in first["sliced"]
    assert "the policy is sharded (model." in first["sharded"]
