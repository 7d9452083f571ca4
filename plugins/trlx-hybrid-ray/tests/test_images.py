"""Pictures in prompts, with engines in Ray actors."""

import pytest
import trlx_hybrid
from trl import GRPOConfig
from trlx_hybrid import HybridConfig, HybridEngine
from trlx_hybrid.errors import EngineError
from trlx_hybrid.testing.models import PATCHES, tiny_grpo, tiny_vision_model

from tests.support.vision import counted_squares, other_vision_model, picture

NEEDED = "the processors of vision-language models need torchvision"


def trained(architecture, folder, **hybrid):
    """(completions, losses, weight paths, largest log-prob gap) of three steps, in which tower and text are trained."""
    pytest.importorskip("torchvision", reason=NEEDED)
    model, processor = tiny_vision_model(architecture)
    seen = []

    def reward(completion_ids, **_):
        seen.append(completion_ids)
        return [float(sum(ids) % 7) for ids in completion_ids]

    trainer = trlx_hybrid.GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=GRPOConfig(**tiny_grpo(folder, learning_rate=1e-2)),
        train_dataset=counted_squares(architecture),
        processing_class=processor,
        hybrid=HybridConfig(verify_every=1, **hybrid),
    )
    try:
        trainer.train()
        logs = [log for log in trainer.state.log_history if "loss" in log]
        gap = max(log["sampling/sampling_logp_difference/max"] for log in logs)
        return seen, [log["loss"] for log in logs], trainer.session.weights.name, gap
    finally:
        trainer.session.close()


@pytest.mark.parametrize("architecture", sorted(PATCHES))
def test_training_on_pictures_is_that_of_the_engine_inside(architecture, session_cluster, tmp_path):
    completions, losses, *_ = trained(architecture, tmp_path / "inside", engine="vllm", weights="gather")
    found, theirs, path, gap = trained(architecture, tmp_path / "remote", engine="remote")
    assert path == "transfer"
    assert found == completions
    assert theirs == pytest.approx(losses, abs=1e-5)
    assert gap < 1e-5


def test_pictures_that_the_engine_would_compute_otherwise_are_refused(session_cluster):
    """Gemma 3's tokens of a picture see each other, not so in vLLM's attention on CPUs. Text alone is sampled; the loop
    has no trainer."""
    pytest.importorskip("torchvision", reason=NEEDED)
    model, processor = other_vision_model("gemma3")
    shown = [picture("qwen2_5_vl", squares=5)]
    (prompt,) = processor(text=[f"{processor.boi_token}what is it"], images=[shown])["input_ids"]
    with (
        HybridEngine(model, processor, max_tokens=4, config=HybridConfig(engine="remote")) as engine,
        engine.rollout_context(),
    ):
        with pytest.raises(EngineError, match="the tokens of a picture see each other, and vLLM's attention here"):
            engine.session.generate([list(prompt)], [shown])
        (completion,) = engine.generate([processor.tokenizer("what is it")["input_ids"]])
        assert len(completion.token_ids) > 0
