"""Rows beyond the positions that a model was made for: trainer and engine scale the positions alike."""

import pytest
from trlx_hybrid import GRPOTrainer
from trlx_hybrid.testing.models import tiny_model

NATIVE = 64
SCALED = {
    "yarn": {"factor": 4.0, "original_max_position_embeddings": NATIVE},
    "linear": {"factor": 4.0},
    "llama3": {
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": NATIVE,
    },
}


@pytest.mark.parametrize("kind", SCALED)
def test_log_probs_are_equal_beyond_the_native_length(run, kind):
    rotary = {"rope_type": kind, "rope_theta": 10000.0, **SCALED[kind]}
    done = run(
        GRPOTrainer,
        model=tiny_model(rope_parameters=rotary, max_position_embeddings=4 * NATIVE, initializer_range=0.1),
        hybrid={"engine": "vllm"},
        max_steps=1,
        per_device_train_batch_size=4,
        max_completion_length=2 * NATIVE,
        vllm_max_model_length=4 * NATIVE,
        generation_kwargs={"ignore_eos": True},
    )
    log = done.trainer.state.log_history[0]
    assert log["completions/mean_length"] == 2 * NATIVE
    assert log["sampling/sampling_logp_difference/max"] < 1e-5
    assert done.trainer.session.scoring.name == "packed"
