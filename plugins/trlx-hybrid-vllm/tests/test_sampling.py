"""The trainer scores tokens at the temperature that the engine samples them at."""

import pytest
import trlx_hybrid
from trl import RLOOConfig

GAP = "sampling/sampling_logp_difference/max"


@pytest.mark.parametrize(
    "settings",
    [
        {"generation_kwargs": {"temperature": 0.6}},
        {"temperature": 0.8, "generation_kwargs": {"temperature": 1.7}},
        # vLLM samples at 0.01, and TRL would score at 0.002.
        {"temperature": 0.002},
    ],
    ids=str,
)
def test_engine_and_trainer_agree_at_any_temperature(run, settings):
    logs = [log for log in run(trlx_hybrid.GRPOTrainer, use_vllm=True, **settings).logs if GAP in log]
    assert len(logs) == 3
    # At 0.01 the logits, and the rounding in them, are 100 times as large.
    assert max(log[GAP] for log in logs) < 1e-3
    assert min(log["sampling/importance_sampling_ratio/min"] for log in logs) == pytest.approx(1, abs=1e-2)


def test_rloo_scores_at_the_temperature_it_samples_at(run):
    settings = {"config_class": RLOOConfig, "use_vllm": True, "beta": 0.0, "train": False}
    trainer = run(trlx_hybrid.RLOOTrainer, generation_kwargs={"temperature": 0.6}, **settings).trainer
    assert trainer.temperature == 0.6
