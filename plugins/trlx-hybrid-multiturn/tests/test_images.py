"""Tools that answer with pictures."""

import copy

import pytest
import trlx_hybrid
from datasets import Dataset
from trl import GRPOConfig
from trlx_hybrid.testing.launched import tiny_grpo
from trlx_hybrid.testing.vision import chatty_vision_model, picture

NEEDED = "the processors of vision-language models need torchvision"
CALL = '<tool_call>\n{"name": "look", "arguments": {"n": %d}}\n</tool_call>'
TURNS = [CALL % 1, CALL % 3, "that is all"]


def look(n: int) -> list:
    """Look.

    Args:
        n: how many squares to see.
    """
    return [{"type": "image", "image": picture("qwen3_vl", n)}, {"type": "text", "text": "so many"}]


def trained(folder, rollout):
    """(what each rollout generated, logs) of two steps."""
    pytest.importorskip("torchvision", reason=NEEDED)
    model, processor = chatty_vision_model(TURNS)
    batches = []

    class Recording(trlx_hybrid.GRPOTrainer):
        def _generate(self, prompts):
            batches.append(copy.copy(super()._generate(prompts)))
            return batches[-1]

    settings = {"max_completion_length": 300, "max_tool_calling_iterations": 3, "max_steps": 2, "learning_rate": 1e-4}
    # TRL's default weighs a row by all its tokens at once: the rounding of up to 300 log-probs, which differs by batch
    settings["vllm_importance_sampling_mode"] = "token_mask"
    questions = [[{"role": "user", "content": f"what is {number * 37}?"}] for number in range(16)]
    trainer = Recording(
        model=model,
        reward_funcs=lambda completion_ids, **_: [float(len(ids)) for ids in completion_ids],
        tools=[look],
        processing_class=processor,
        train_dataset=Dataset.from_dict({"prompt": questions}),
        args=GRPOConfig(**tiny_grpo(folder, **settings | {"vllm_max_model_length": 2048})),
        hybrid={"rollout": rollout},
    )
    try:
        trainer.train()
        assert trainer.session.rollout.name == rollout
        return batches, [log for log in trainer.state.log_history if "loss" in log]
    finally:
        trainer.session.close()


def test_pictures_from_tools_are_those_of_trls_loop(tmp_path):
    """Same tokens, same masks, same pictures, and the engine saw them as the loss does."""
    ours, logs = trained(tmp_path / "ours", "multi_turn")
    theirs, others = trained(tmp_path / "theirs", "single_turn")
    for mine, other in zip(ours, theirs, strict=True):
        prompt_ids, completion_ids, mask, *_, images = zip(mine, other, strict=True)
        for pair in (prompt_ids, completion_ids, mask, images):
            assert pair[0] == pair[1]
    seen = [len(images or []) for batch in ours for images in batch[-1]]
    assert len(set(seen)) > 2
    assert sum(seen) > 8
    for mine, other in zip(logs, others, strict=True):
        assert mine["loss"] == pytest.approx(other["loss"], abs=1e-6)
        assert mine["sampling/sampling_logp_difference/max"] < 1e-5
