"""Prompts with images: the engine sees what the trainer scores, with the weights of now."""

import pytest
import torch
import trlx_hybrid
from trlx_hybrid import HybridEngine
from trlx_hybrid.errors import EngineError
from trlx_hybrid.testing.models import character_tokenizer
from trlx_hybrid.types import Sampling

MARKS = {name: f"<|{name}|>" for name in ("vision_start", "vision_end", "image_pad", "video_pad")}
SIZE = {"shortest_edge": 56 * 56, "longest_edge": 56 * 56}
SAMPLING = Sampling(max_tokens=8, logprobs=0, extra={"ignore_eos": True})


@pytest.fixture
def vision():
    """A tiny Qwen2.5-VL, its processor, and an image of four tokens."""
    pytest.importorskip("torchvision", reason="the processors of vision-language models need torchvision")
    from PIL import Image
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLProcessor
    from transformers import Qwen2VLImageProcessor as Images
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor as Videos

    tokenizer = character_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(MARKS.values())})
    settings = {"size": SIZE, "patch_size": 14, "merge_size": 2}
    processor = Qwen2_5_VLProcessor(Images(**settings), tokenizer, Videos(**settings))
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": 128,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.1,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]},
    }
    tower = {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_heads": 2,
        "out_hidden_size": 128,
        "window_size": 56,
        "fullatt_block_indexes": [1],
        "initializer_range": 0.1,
    }
    ids = {
        "image_token_id": "image_pad",
        "video_token_id": "video_pad",
        "vision_start_token_id": "vision_start",
        "vision_end_token_id": "vision_end",
    }
    ids = {key: tokenizer.convert_tokens_to_ids(MARKS[mark]) for key, mark in ids.items()}
    torch.manual_seed(0)
    model = Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=tower, **ids)).eval()
    return model, processor, Image.effect_noise((56, 56), 90).convert("RGB")


def gap(model, processor, prompt, image, completion):
    """Largest difference between engine and policy log-probs, in nats."""
    seen = processor.image_processor([image], return_tensors="pt")
    ids = torch.tensor([[*prompt, *completion.token_ids]])
    with torch.no_grad():
        logits = model(input_ids=ids, mm_token_type_ids=(ids == processor.image_token_id).int(), **seen).logits
    log_probs = logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    ours = log_probs.gather(-1, ids[0, len(prompt) :, None])[:, 0]
    return float((torch.tensor([p[0] for p in completion.logprobs]) - ours).abs().max())


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
