"""Weights in float16, which Adam's state does not survive in, and other optimizers do."""

import pytest
import torch
import trlx_hybrid
from trlx_hybrid.testing.models import tiny_model


@pytest.mark.parametrize("rate", [1e-3, 1e-5])
def test_a_step_that_moves_weights_further_than_its_learning_rate_can_ends_the_run(run, rate):
    started = run(
        trlx_hybrid.GRPOTrainer,
        model=tiny_model(dtype=torch.float16),
        learning_rate=rate,
        use_vllm=True,
        max_steps=4,
        train=False,
    )
    with pytest.raises(trlx_hybrid.errors.SyncError) as raised:
        started.trainer.train()
    raised.match(
        r"Step 2 of the optimizer \(AdamW\) moved weights further than .*% of those.*In float16 the squares of small"
    )
    assert max(float(p.abs().max()) for p in started.trainer.model.parameters()) < 1e4


HEALTHY = {
    "sgd": {"optim": "sgd", "learning_rate": 1.0},
    "adafactor": {"optim": "adafactor"},
    "larger epsilon": {"adam_epsilon": 1e-4},
    "bfloat16": {"model": tiny_model(dtype=torch.bfloat16)},
    "float32": {"model": tiny_model()},
}


@pytest.mark.parametrize("case", HEALTHY)
def test_optimizers_that_train_such_weights_do(run, case):
    given = {"model": tiny_model(dtype=torch.float16), "learning_rate": 1e-3} | HEALTHY[case]
    finished = run(trlx_hybrid.GRPOTrainer, use_vllm=True, max_steps=4, **given)
    assert finished.trainer.state.global_step == 4
