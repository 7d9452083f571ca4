"""Prompts with images: the engine sees what the trainer scores, with the weights of now."""

import pytest
import torch
import trlx_hybrid
from peft import LoraConfig
from trl import GRPOConfig
from trlx_hybrid import HybridConfig, HybridEngine, hookimpl
from trlx_hybrid.contract.types import Request, Sampling
from trlx_hybrid.errors import EngineError
from trlx_hybrid.testing.models import MARKS, PATCHES, tiny_grpo, tiny_vision_model
from trlx_hybrid_vllm.sampling import refuse_another_prompt

from tests.support.vision import counted_squares, picture

NEEDED = "the processors of vision-language models need torchvision"
SAMPLING = Sampling(max_tokens=8, logprobs=0, extra={"ignore_eos": True})


@pytest.fixture(params=sorted(PATCHES))
def vision(request):
    """A tiny model, its processor, and an image of four tokens."""
    pytest.importorskip("torchvision", reason=NEEDED)
    return *tiny_vision_model(request.param), picture(request.param, squares=5)


def gap(model, processor, prompt, image, completion):
    """Largest difference between engine and policy log-probs, in nats."""
    seen = processor.image_processor([image], return_tensors="pt")
    ids = torch.tensor([[*prompt, *completion.token_ids]])
    with torch.no_grad():
        logits = model(input_ids=ids, mm_token_type_ids=(ids == processor.image_token_id).int(), **seen).logits
    logits[..., [processor.image_token_id, processor.video_token_id]] = float("-inf")  # are never sampled
    log_probs = logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    ours = log_probs.gather(-1, ids[0, len(prompt) :, None])[:, 0]
    return float((torch.tensor([p[0] for p in completion.logprobs]) - ours).abs().max())


def test_a_prompt_of_which_vllm_tells_no_tokens_is_not_said_to_have_none():
    request = Request(prompt_ids=[1, 2, 3], seed=0, images=["picture"])
    with pytest.raises(EngineError, match="has 3 tokens, and vLLM does not say which it makes of it"):
        refuse_another_prompt(request, None)
    with pytest.raises(EngineError, match="has 3 tokens, and vLLM makes 0 of it"):
        refuse_another_prompt(request, [])
    refuse_another_prompt(request, (1, 2, 3))
    refuse_another_prompt(Request(prompt_ids=[1], seed=0), None)


@pytest.mark.parametrize("sleep", [False, True], ids=["awake", "sleep"])
def test_an_image_is_seen_alike_before_and_after_the_vision_tower_was_trained(vision, sleep, started_once):
    """vLLM expands no image token twice, knows the scale of the pixels, and forgets embeddings with the weights."""
    model, processor, image = vision
    text = f"{MARKS['vision_start']}{MARKS['image_pad']}{MARKS['vision_end']}what is it"
    prompt = list(processor(text=[text], images=[image])["input_ids"][0])
    assert prompt.count(processor.image_token_id) == 4
    options = {"enable_sleep_mode": sleep, "max_num_seqs": 8}
    with HybridEngine(model, processor, sampling=SAMPLING, engine_options=options) as engine:

        def sampled(prompt):
            with engine.rollout_context():
                return engine.session.generate([prompt], [[image]])[0]

        assert gap(model, processor, prompt, image, sampled(prompt)) < 1e-5
        with engine.train_context(), torch.no_grad():
            for p in model.model.visual.parameters():
                p.add_(0.1 * torch.randn_like(p))
        assert gap(model, processor, prompt, image, sampled(prompt)) < 1e-5
        unexpanded = [token for i, token in enumerate(prompt) if token != prompt[i - 1]]
        with pytest.raises(EngineError, match=f"has {len(unexpanded)} tokens, and vLLM makes"):
            sampled(unexpanded)


class Syncs:
    def __init__(self):
        self.seen = []

    @hookimpl
    def trlx_sync_end(self, session, report):
        self.seen.append((report.weights, report.verified, report.logprob_gap))


def trained(architecture, folder, peft_config=None, frozen="nothing", **hybrid):
    """(logs, syncs, names of the weights that changed) of three GRPO steps on pictures."""
    pytest.importorskip("torchvision", reason=NEEDED)
    model, processor = tiny_vision_model(architecture)
    for name, p in model.named_parameters():
        p.requires_grad_(frozen not in name)
    syncs = Syncs()
    trainer = trlx_hybrid.GRPOTrainer(
        model=model,
        reward_funcs=lambda completion_ids, **_: [float(sum(ids) % 7) for ids in completion_ids],
        args=GRPOConfig(**tiny_grpo(folder, learning_rate=1e-2)),
        train_dataset=counted_squares(architecture),
        processing_class=processor,
        peft_config=peft_config,
        hybrid=HybridConfig(verify_every=1, **hybrid),
        plugins=[syncs],
    )
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    try:
        trainer.train()
        own = ("time", "hybrid/")
        logs = [
            {key: value for key, value in log.items() if not any(text in key for text in own)}
            for log in trainer.state.log_history
            if "loss" in log
        ]
        assert max(log["sampling/sampling_logp_difference/max"] for log in logs) < 1e-5
        changed = {name for name, p in trainer.model.named_parameters() if not torch.equal(p, before[name])}
    finally:
        trainer.session.close()
    return logs, syncs.seen, changed


@pytest.mark.parametrize("architecture", sorted(PATCHES))
def test_grpo_trains_tower_and_text_alike_on_shared_copied_and_gathered_weights(architecture, tmp_path):
    logs, syncs, changed = trained(architecture, tmp_path / "alias")
    assert {weights for weights, *_ in syncs} == {"alias"}
    for path in ("copy", "gather"):
        same, others, _ = trained(architecture, tmp_path / path, weights=path)
        assert {weights for weights, *_ in others} == {path}
        assert logs == same
        syncs += others
    for _, verified, gap in syncs:
        assert verified
        assert gap < 1e-5
    assert any("visual" in name for name in changed)
    assert any("language_model" in name for name in changed)


@pytest.mark.parametrize("weights", ["alias", "copy"])
@pytest.mark.parametrize("architecture", sorted(PATCHES))
def test_a_frozen_tower_stays_and_the_text_model_is_trained(architecture, weights, tmp_path):
    _, syncs, changed = trained(architecture, tmp_path, frozen="visual", weights=weights)
    assert {path for path, *_ in syncs} == {weights}
    assert max(gap for *_, gap in syncs) < 1e-5
    assert changed
    assert not any("visual" in name for name in changed)


TEXT = {"target_modules": r".*language_model.*_proj"}
TOWER_TOO = {"qwen2_5_vl": TEXT | {"modules_to_save": ["visual"]}, "qwen3_vl": {"target_modules": "all-linear"}}
"""The tower is trained whole, or adapted."""


@pytest.mark.parametrize("weights", ["lora", "merged", "gather"])
@pytest.mark.parametrize("architecture", sorted(PATCHES))
def test_an_adapter_of_the_text_model_reaches_the_engine_beside_the_tower(architecture, weights, tmp_path):
    """The tower is frozen; it is trained as well where the adapter is merged, which `auto` does by itself then."""
    tower = weights == "gather"
    adapter = LoraConfig(r=4, **(TOWER_TOO[architecture] if tower else TEXT))
    logs, syncs, changed = trained(architecture, tmp_path, adapter, weights="auto" if tower else weights)
    assert {path for path, *_ in syncs} == {weights}
    assert max(gap for *_, gap in syncs) < 1e-5
    assert max(log["grad_norm"] for log in logs) > 0
    assert any("visual" in name for name in changed) == tower
    assert all("lora_" in name or "modules_to_save" in name for name in changed)
    assert any("language_model" in name for name in changed)


def test_a_sync_drops_the_embeddings_of_images(run, monkeypatch):
    session = run(trlx_hybrid.GRPOTrainer, use_vllm=True, train=False).trainer.session
    with session.rollout_phase(True):
        engine = session.live_engine.llm.llm_engine
    dropped = []
    monkeypatch.setattr(type(engine.model_config), "is_multimodal_model", property(lambda _: True))
    monkeypatch.setattr(engine, "reset_encoder_cache", lambda: dropped.append(session.versions.engine_version))
    session.weights_changed()
    with session.rollout_phase(True):
        assert dropped
