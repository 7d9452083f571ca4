"""Micro-batches of equal tokens: another choice of rows, the same optimizer step."""

import sys
from pathlib import Path

import pytest
import trlx_hybrid
from trl import RLOOConfig
from trlx_hybrid.errors import ComponentError
from trlx_hybrid.testing.models import tiny_model
from trlx_hybrid.trl.scoring.micro_batches import regrouped

sys.path.insert(0, str(Path(__file__).parent))
from scripted import STEPS, difference, lora

GRPO, RLOO = trlx_hybrid.GRPOTrainer, trlx_hybrid.RLOOTrainer
EXACT = {
    **{loss: {"loss_type": loss} for loss in ("grpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo")},
    "vespo": {"loss_type": "vespo", "vllm_importance_sampling_mode": "token_truncate"},
    "two iterations": {"num_iterations": 2},
    "KL": {"beta": 0.1, "peft_config": lora(), "num_iterations": 2},
    "two rollouts in a step": {"steps_per_generation": 2},
    "RLOO": {"config_class": RLOOConfig, "beta": 0.0},
}


def experts():
    return tiny_model("qwen3_moe", num_experts=4, num_experts_per_tok=2, output_router_logits=True)


BOUND_TOGETHER = {
    "bnpo": {"loss_type": "bnpo"},
    "high entropy": {"top_entropy_quantile": 0.25},  # no threshold between equal tokens, which rounding parts
    "entropy bonus": {"entropy_coef": 0.1},
    "load balance": {"model": experts},
    "a rollout for several steps": {"gradient_accumulation_steps": 2, "steps_per_generation": 4},
}


@pytest.fixture
def regroupings(monkeypatch):
    """What was put where."""
    from trlx_hybrid.trl.scoring import scoring_call

    seen = []

    def watching(micro_batches, groups, by):
        tokens = [int(n) for m in micro_batches for n in m["prompt_mask"].sum(1) + m["completion_mask"].sum(1)]
        seen.append([sum(tokens[row] for row in group) for group in groups])
        return regrouped(micro_batches, groups, by)

    monkeypatch.setattr(scoring_call, "regrouped", watching)
    return seen


@pytest.mark.parametrize("case", EXACT)
def test_a_step_is_the_same_with_rows_in_other_micro_batches(compared, noisy, regroupings, case):
    trainer = RLOO if "config_class" in EXACT[case] else GRPO
    padded, packed = compared(trainer, {"shared_prompts": False}, noisy, **STEPS | EXACT[case])
    for mine, theirs in zip(packed.logs, padded.logs, strict=True):
        assert mine == pytest.approx(theirs, abs=1e-5, rel=1e-5)  # also what TRL logs of single micro-batches
    assert difference(packed, padded)[1] < 1e-5
    assert regroupings
    assert all(max(sums) - min(sums) <= 6 for sums in regroupings)  # of rows of up to 21 tokens


@pytest.mark.parametrize("rollouts", [1, 2])
def test_rows_stay_as_drawn_once_one_pass_computes_them_all(compared, noisy, regroupings, passes, rollouts):
    """There is nothing to balance then, and TRL's metrics are those of the micro-batches that it drew."""
    given = STEPS | {"max_steps": 4, "steps_per_generation": 4 // rollouts}
    padded, packed = compared(GRPO, {"adaptive_checkpointing": True, "joined": True}, noisy, **given)
    for mine, theirs in zip(packed.logs, padded.logs, strict=True):
        assert mine == pytest.approx(theirs, abs=1e-5, rel=1e-5)
    assert difference(packed, padded)[1] < 1e-5
    assert len(regroupings) == 2  # of the first rollout, which is measured, and of the second, which is compared
    assert packed.trainer.session.scoring.joins == 4 // rollouts


def test_rows_are_balanced_where_memory_holds_no_pass_of_all(compared, noisy, regroupings, passes):
    passes.free = 0
    compared(GRPO, {"adaptive_checkpointing": True, "joined": True}, noisy, **STEPS)
    assert len(regroupings) == 3


@pytest.mark.parametrize("case", BOUND_TOGETHER)
def test_rows_stay_together_where_the_loss_compares_them(compared, noisy, regroupings, case):
    padded, packed = compared(GRPO, {}, noisy, **STEPS | BOUND_TOGETHER[case])
    assert not regroupings
    assert max(difference(packed, padded)) < 1e-5


def test_a_scoring_that_loses_rows_is_named():
    import torch

    micro_batches = [{"prompt_ids": torch.zeros(2, 3)}] * 2
    with pytest.raises(ComponentError, match="4 rows of 2 micro-batches into groups of 1, 2"):
        regrouped(micro_batches, [[0], [1, 2]])
