"""The engine computes what the policy computes, before training and after every optimizer step."""

import pytest
import torch
import trlx_hybrid
from peft import LoraConfig, get_peft_model
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import TrainerCallback
from trlx_hybrid import HybridEngine, hookimpl
from trlx_hybrid.contract.protocols import WeightSync
from trlx_hybrid.contract.types import Request, Sampling
from trlx_hybrid.errors import ConfigError, EngineError, StaleWeightsError, SyncError
from trlx_hybrid.rollout.seeding import request_seed
from trlx_hybrid.testing.models import character_tokenizer, tiny_model
from trlx_hybrid_vllm.private.engine import model_of
from trlx_hybrid_vllm.weights.loader import WeightLoader

from tests.support.agreement import gap


class Gaps(TrainerCallback):
    """Measures at the start of training and after every optimizer step."""

    def __init__(self):
        self.seen = []

    def on_train_begin(self, *args, **kwargs):
        self.measure = True

    def on_step_begin(self, *args, **kwargs):
        if not self.seen:
            self.seen.append(gap(self.session))

    def on_step_end(self, *args, **kwargs):
        self.seen.append(gap(self.session))


@pytest.mark.parametrize("adapter", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "llama"])
def test_engine_and_policy_agree_before_and_after_every_step(run, architecture, tied, adapter):
    callback = Gaps()
    finished = run(
        trlx_hybrid.GRPOTrainer,
        model=tiny_model(architecture, tied=tied),
        peft_config=LoraConfig(r=4, target_modules="all-linear", init_lora_weights="gaussian") if adapter else None,
        callbacks=[callback],
        use_vllm=True,
        max_steps=5,
        learning_rate=1e-2,
        train=False,
    )
    callback.session = finished.trainer.session
    start = finished.weights()
    finished.trainer.train()
    assert len(callback.seen) == 6
    assert max(callback.seen) < 1e-5
    moved = [name for name, w in finished.weights().items() if not torch.equal(w, start[name])]
    assert moved  # agreeing about weights that never changed would show nothing
    assert finished.trainer.session.versions.version == 5


def test_a_merge_leaves_base_and_adapter_bitwise_alone_and_matches_peft(run):
    adapter = LoraConfig(r=4, target_modules="all-linear", use_dora=True, modules_to_save=["norm"])
    finished = run(trlx_hybrid.GRPOTrainer, peft_config=adapter, use_vllm=True, train=False)
    for p in finished.trainer.model.parameters():
        if p.requires_grad:
            p.data.add_(torch.randn_like(p) * 0.1)
    before = finished.weights()
    ours = dict(finished.trainer.session.policy.full_weights())
    assert all(torch.equal(w, before[name]) for name, w in finished.weights().items())
    expected = finished.trainer.model.merge_and_unload().state_dict()
    assert ours.keys() == expected.keys()
    assert all(torch.equal(ours[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    "adapter",
    [
        {"modules_to_save": ["embed_tokens"]},
        {"modules_to_save": ["embed_tokens", "lm_head"]},
        {"target_modules": ["q_proj", "embed_tokens"]},
        {"target_modules": ["q_proj", "lm_head"]},
        {"trainable_token_indices": [5, 6, 7, 40]},
    ],
    ids=str,
)
def test_a_tied_head_that_adapters_part_from_the_embeddings_is_served_as_it_is(adapter):
    model = get_peft_model(tiny_model(tied=True), LoraConfig(r=4, **{"target_modules": ["q_proj"]} | adapter))
    with HybridEngine(model, character_tokenizer(), max_tokens=8, engine_options={"max_model_len": 64}) as engine:
        assert gap(engine.session) < 1e-5
        with torch.no_grad():
            for p in model.parameters():
                if p.requires_grad:
                    p.add_(torch.randn_like(p) * 0.1)
        assert gap(engine.session) < 1e-5
        assert engine.session.weights.check(full=True) is None
        assert engine.session.live_engine.differing(engine.session.policy.full_weights()) == []


class Corrupt(WeightSync):
    """A weight sync that spoils one tensor on its way."""

    name = "corrupt"

    def __init__(self, session):
        self.session = session

    def refuses(self):
        return None

    def spoil(self, name, tensor):
        if name == "model.layers.1.self_attn.k_proj.weight":
            tensor = tensor.clone()
            tensor[3, 5] += 1e-3
        return tensor

    def sync(self):
        weights = self.session.policy.full_weights()
        return self.session.live_engine.load_weights((n, self.spoil(n, t)) for n, t in weights)


class Drop(Corrupt):
    """A weight sync that loses one tensor."""

    def sync(self):
        weights = self.session.policy.full_weights()
        return self.session.live_engine.load_weights((n, t) for n, t in weights if "layers.0.mlp.up_proj" not in n)


def plugin_with(sync):
    class Plugin:
        @hookimpl
        def trlx_register(self, registry):
            registry.offer("weights", "mine", lambda session, options: sync(session))

    return Plugin()


def test_a_corrupted_tensor_is_named(run):
    with pytest.raises(SyncError, match=r"other bits.*model\.layers\.1\.self_attn\.k_proj\.weight"):
        run(trlx_hybrid.GRPOTrainer, use_vllm=True, plugins=[plugin_with(Corrupt)], hybrid={"weights": "mine"})


def test_a_parameter_that_no_tensor_was_written_to_is_named(run):
    with pytest.raises(SyncError, match=r"unwritten: model\.layers\.0\.mlp\.gate_up_proj\.weight"):
        run(trlx_hybrid.GRPOTrainer, use_vllm=True, plugins=[plugin_with(Drop)], hybrid={"weights": "mine"})


def test_the_first_load_keeps_no_gathered_tensor_alive(run):
    """It is watched, and the later ones are not: where weights are gathered, it would hold the whole model."""
    finished = run(trlx_hybrid.GRPOTrainer, use_vllm=True, train=False)
    session = finished.trainer.session
    with session.rollout_phase(True):
        loader = WeightLoader(model_of(session.live_engine.llm))

    def peak():
        """Of a load whose tensors have memory of their own, as `full_tensor()` or a merged adapter make them."""
        given, peaks = [], []

        def gathered():
            for name, tensor in session.policy.full_weights():
                copy = tensor.clone()
                given.append((StorageWeakRef(copy.untyped_storage()), copy.nbytes))
                yield name, copy
                del copy
                peaks.append(sum(size for storage, size in given if not storage.expired()))

        loader.load(gathered())
        return max(peaks)

    assert not loader.routes
    first = peak()
    assert loader.routes
    assert first == peak()


def test_corruption_in_the_engine_between_syncs_is_found_by_the_sampled_check(run):
    """Every tensor's turn comes, so damage that persists cannot hide for long."""
    finished = run(trlx_hybrid.GRPOTrainer, use_vllm=True, max_steps=1, hybrid={"weights": "gather"})
    session = finished.trainer.session
    names = session.policy.checkpoint_names()
    with session.rollout_phase(True):
        pass
    engine = session.live_engine
    route = engine._loader.routes["model.layers.1.mlp.down_proj.weight"][0]
    route.destination.of(engine._loader.parameters[route.parameter].data)[0, 0] += 1
    differing = engine.differing(session.policy.full_weights())
    assert [d.split(" ")[0] for d in differing] == ["model.layers.1.mlp.down_proj.weight"]
    from trlx_hybrid.weights.verify import sampled_names

    for apart in (1, 2, 4, 7, 8):  # optimizer steps between two syncs
        assert set().union(*(sampled_names(names, apart * sync) for sync in range(len(names)))) == set(names)


def test_weights_changed_by_hand_are_noticed(run):
    """No optimizer step, no callback, no version: only the bits tell."""
    finished = run(trlx_hybrid.GRPOTrainer, use_vllm=True, max_steps=1)
    session = finished.trainer.session
    assert gap(session) < 1e-5
    version = session.versions.version
    with torch.no_grad():
        for p in finished.trainer.model.parameters():
            p.mul_(1.1)
    assert gap(session) < 1e-5
    assert session.versions.version == version + 1


def test_an_adapter_loaded_by_hand_is_noticed(run, tmp_path):
    adapter = LoraConfig(r=4, target_modules="all-linear", init_lora_weights="gaussian")
    finished = run(trlx_hybrid.GRPOTrainer, peft_config=adapter, use_vllm=True, max_steps=1, learning_rate=0.1)
    session, model = finished.trainer.session, finished.trainer.model
    model.save_pretrained(tmp_path / "trained")
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_(0.1)
    assert gap(session) < 1e-5
    version = session.versions.version
    model.load_adapter(tmp_path / "trained", "default")
    assert gap(session) < 1e-5
    assert session.versions.version == version + 1


def test_sampling_with_stale_weights_or_outside_a_rollout_is_an_error(run):
    finished = run(trlx_hybrid.GRPOTrainer, use_vllm=True, max_steps=1)
    session = finished.trainer.session
    with pytest.raises(StaleWeightsError, match="phase is train"):
        session.generate([[5, 6]])
    with session.rollout_phase(True):
        session.weights_changed()
        with pytest.raises(StaleWeightsError, match="holds weight version 1, the policy is at 2"):
            session.generate([[5, 6]])
    with session.rollout_phase(True):
        assert len(session.generate([[5, 6]])[0].token_ids) <= 12


def test_an_exception_inside_a_phase_leaves_a_usable_engine(run):
    finished = run(trlx_hybrid.GRPOTrainer, use_vllm=True, vllm_enable_sleep_mode=True, max_steps=1)
    session = finished.trainer.session
    with pytest.raises(RuntimeError, match="tool broke"), session.rollout_phase(True):
        raise RuntimeError("tool broke")
    assert session.phase.value == "train"
    assert gap(session) < 1e-5


def test_sleep_frees_memory_and_an_asleep_engine_refuses_work(run):
    finished = run(
        trlx_hybrid.GRPOTrainer,
        use_vllm=True,
        vllm_enable_sleep_mode=True,
        max_steps=2,
        hybrid={"weights": "gather"},  # the others keep what the policy lives in
    )
    session = finished.trainer.session
    engine = session.live_engine
    storages = [p.untyped_storage().nbytes() for p in engine._loader.parameters.values()]
    assert sum(storages) == 0
    with pytest.raises(EngineError, match="asleep"):
        engine.generate([Request(prompt_ids=[5], seed=0)], Sampling(max_tokens=2))
    with pytest.raises(SyncError, match="asleep"):
        engine.load_weights([])
    engine.sleep()  # twice is once
    assert gap(session) < 1e-5


def test_sleep_changes_nothing_that_is_sampled(run):
    awake = run(trlx_hybrid.GRPOTrainer, use_vllm=True)
    asleep = run(trlx_hybrid.GRPOTrainer, use_vllm=True, vllm_enable_sleep_mode=True)
    assert asleep.recorder.completions == awake.recorder.completions
    assert asleep.logs == awake.logs


def test_building_and_calling_the_engine_leaves_the_generators_alone(run):
    import random

    import numpy as np

    def states():
        return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()

    finished = run(trlx_hybrid.GRPOTrainer, use_vllm=True, train=False)
    session = finished.trainer.session
    before = states()
    with session.rollout_phase(True):
        assert states() == before
        session.generate([[5, 6], [7]])
        assert states() == before
    assert states() == before


def test_a_request_depends_on_its_seed_and_not_on_its_company(run):
    finished = run(trlx_hybrid.GRPOTrainer, use_vllm=True, train=False)
    session = finished.trainer.session
    sampling = Sampling(max_tokens=12, logprobs=0)
    requests = [Request(prompt_ids=[5, 6, 7], seed=request_seed(0, "train", 0, 0, g, 0)) for g in range(6)]
    with session.rollout_phase(True):
        together = session.live_engine.generate(requests, sampling)
        reversed_ = session.live_engine.generate(requests[::-1], sampling)[::-1]
        alone = [session.live_engine.generate([r], sampling)[0] for r in requests]
    ids = [c.token_ids for c in together]
    assert ids == [c.token_ids for c in reversed_] == [c.token_ids for c in alone]
    assert len({tuple(i) for i in ids}) == 6  # six draws, not one repeated


class Spoil:
    """Changes the engine's weights behind the proofs, from weight version 2 on."""

    @hookimpl
    def trlx_sync_end(self, session, report):
        if report.version == 2:
            session.live_engine._loader.parameters["model.layers.0.self_attn.qkv_proj.weight"].mul_(1.2)


def test_a_run_stops_at_the_step_at_which_engine_and_trainer_score_tokens_apart(run, caplog):
    given = {"use_vllm": True, "plugins": [Spoil()], "hybrid": {"weights": "copy"}, "max_steps": 4}
    with pytest.raises(SyncError, match=r"At step 2, .* on rank 0, token \d+ of completion 0 \(id \d+\) was sampled"):
        run(trlx_hybrid.GRPOTrainer, **given)
    assert "not compared" not in caplog.text
    with pytest.raises(SyncError, match="At step 2, engine and trainer disagree on what was sampled"):
        run(trlx_hybrid.GRPOTrainer, **given, top_p=0.5)
    assert "not compared" not in caplog.text


def test_log_probs_of_a_users_own_rollout_are_warned_of_and_stop_nothing(run, caplog):
    def invented(prompts, trainer):
        ids = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
        return {"prompt_ids": ids, "completion_ids": [[5, 6, 7]] * len(ids), "logprobs": [[-9.0] * 3] * len(ids)}

    finished = run(trlx_hybrid.GRPOTrainer, use_vllm=True, rollout_func=invented)
    assert finished.trainer.state.global_step == 3
    assert caplog.text.count("The log-probs are those that rollout_func returned") == 1


def test_a_run_whose_optimizer_was_replaced_by_one_of_other_weights_stops(run):
    model = tiny_model()
    others = [torch.nn.Parameter(p.detach().clone()) for p in model.parameters()]
    finished = run(trlx_hybrid.GRPOTrainer, model=model, use_vllm=True, train=False)
    finished.trainer.optimizer = torch.optim.AdamW(others, lr=1e-2)
    with pytest.raises(ConfigError, match=r"\(AdamW\) holds none of the policy's 25 trainable parameters"):
        finished.trainer.train()
