"""Rows beside longer prompts against the same rows alone."""

import copy

import pytest
import torch
import trlx_hybrid
from trl import DistillationConfig
from trlx_hybrid.testing.models import tiny_model

ROWS = [list(range(10, 13)), list(range(20, 31)), list(range(40, 45))]
COMPLETIONS = [list(range(60, 64)), list(range(70, 74)), list(range(80, 84))]
BOUND = 1e-5


def padded():
    """Ids and mask of the rows, (3, P + 4), as TRL pads them."""
    longest = max(map(len, ROWS))
    ids = [[0] * (longest - len(row)) + row + said for row, said in zip(ROWS, COMPLETIONS, strict=True)]
    mask = [
        [0] * (longest - len(row)) + [1] * (len(row) + len(said)) for row, said in zip(ROWS, COMPLETIONS, strict=True)
    ]
    return torch.tensor(ids), torch.tensor(mask)


def alone(model):
    """Log-probs of each row's completion, scored without the others, in float64: (3, 4)."""
    exact, scores = copy.deepcopy(model).double().eval(), []
    for row, said in zip(ROWS, COMPLETIONS, strict=True):
        with torch.no_grad():
            logits = exact(input_ids=torch.tensor([row + said])).logits[0, len(row) - 1 : -1]
        scores.append(logits.log_softmax(-1).gather(-1, torch.tensor(said)[:, None])[:, 0])
    return torch.stack(scores).float()


@pytest.mark.parametrize("scoring", ["padded", "packed"])
@pytest.mark.parametrize("architecture", ["gpt2", "opt", "qwen3"])
def test_a_row_beside_a_longer_prompt_is_scored_as_the_row_alone(run, noisy, scripted, architecture, scoring):
    """GPT-2 counts positions from the beginning of the padded row, OPT from its first token, Qwen3 only distances."""
    given = {"hybrid": noisy | {"scoring": scoring}, "plugins": [scripted], "model": tiny_model(architecture)}
    trainer = run(trlx_hybrid.GRPOTrainer, max_steps=1, **given).trainer
    with torch.no_grad():
        scored = trainer._get_per_token_logps_and_entropies(trainer.model, *padded(), 4)[0]
    assert float((scored - alone(trainer.model)).abs().max()) < BOUND


def test_a_model_that_was_lent_to_a_run_counts_as_before_afterwards(run, noisy, scripted):
    model = tiny_model("gpt2")
    ids, mask = padded()
    before = model(input_ids=ids, attention_mask=mask).logits
    finished = run(trlx_hybrid.GRPOTrainer, hybrid=noisy, plugins=[scripted], model=model, train=False)
    within = model(input_ids=ids, attention_mask=mask).logits
    finished.close()
    assert not torch.equal(within, before)
    assert torch.equal(model(input_ids=ids, attention_mask=mask).logits, before)


def test_student_and_teacher_score_rows_alike_whatever_the_padding(run, noisy, scripted):
    """Distillation calls the models below their heads."""
    student, teacher = tiny_model("gpt2"), tiny_model("gpt2", seed=1)
    given = {"hybrid": noisy, "plugins": [scripted], "config_class": DistillationConfig, "teacher_model": teacher}
    run(trlx_hybrid.DistillationTrainer, model=student, train=False, **given)
    ids, mask = padded()
    for model in (student, teacher):
        beside = model.base_model(input_ids=ids, attention_mask=mask).last_hidden_state[0, -7:]
        single = model.base_model(input_ids=ids[:1, -7:]).last_hidden_state[0]
        assert float((beside - single).detach().abs().max()) < BOUND
