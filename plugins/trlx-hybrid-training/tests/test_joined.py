"""Several micro-batches in one forward and one backward pass: what TRL computes and logs of each stays the same."""

import itertools
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import trl
import trlx_hybrid
from torch import nn
from transformers import TrainerCallback
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer
from trl import RLOOConfig
from trlx_hybrid.errors import ConfigError
from trlx_hybrid.testing.processes import rank_reports
from trlx_hybrid.trl.scoring.loss import in_training
from trlx_hybrid_training.layer_memory import SHARE, WORKSPACE
from trlx_hybrid_training.options import PackedOptions
from trlx_hybrid_training.scoring import Packed

from tests.support.fsdp import FSDP2

sys.path.insert(0, str(Path(__file__).parent))
from scripted import STEPS, difference, lora, masked

GRPO, RLOO = trlx_hybrid.GRPOTrainer, trlx_hybrid.RLOOTrainer
SCRIPT = Path(__file__).parent / "scripts" / "scoring_distributed.py"
JOINED = {"balanced": False, "adaptive_checkpointing": True, "joined": True}
CASES = {
    **{loss: {"loss_type": loss} for loss in ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo")},
    "vespo": {"loss_type": "vespo", "vllm_importance_sampling_mode": "token_truncate"},
    "two iterations": {"num_iterations": 2},
    "a rollout for several steps": {"gradient_accumulation_steps": 2, "steps_per_generation": 4},
    "two rollouts in a step": {"steps_per_generation": 2},
    "high entropy": {"top_entropy_quantile": 0.25},  # no threshold between equal tokens, which rounding parts
    "entropy bonus": {"entropy_coef": 0.1},
    "tool masks": {"rollout_func": masked},
    "KL": {"beta": 0.1, "peft_config": lora()},
    "RLOO": {"config_class": RLOOConfig, "beta": 0.0},
}


@pytest.mark.parametrize("case", CASES)
def test_micro_batches_that_share_a_pass_are_those_that_do_not(compared, noisy, passes, case):
    trainer = RLOO if "config_class" in CASES[case] else GRPO
    padded, joined = compared(trainer, JOINED, noisy, **STEPS | CASES[case])
    assert max(difference(joined, padded)) < 1e-5
    in_a_rollout = 2 if case in ("a rollout for several steps", "two rollouts in a step") else 4
    assert set(passes[2:]) == {in_a_rollout}  # before that one is compared and counted, others of its step are left


def test_as_many_as_memory_holds_share_a_pass(compared, noisy, passes):
    passes.free = 0
    padded, apart = compared(GRPO, JOINED, noisy, **STEPS)
    assert set(passes) == {1}
    assert max(difference(apart, padded)) < 1e-5


def test_more_memory_lets_more_of_them_share_a_pass(compared, noisy, passes, monkeypatch):
    """One after the other, between nearly none and enough for all."""
    counts, stock = [], Packed.joined

    def tried(self, tokens):
        for more in range(0, 32 << 20, 128 << 10):
            passes.free = int(WORKSPACE / SHARE) + more
            counts.append((len(tokens), passes.free, stock(self, tokens)))
        return 1

    monkeypatch.setattr(Packed, "joined", tried)
    compared(GRPO, JOINED, noisy, **STEPS)
    of_four = [count for number, _, count in counts if number == 4]
    assert sorted(set(of_four)) == [1, 2, 3, 4]
    for _, step in itertools.groupby(counts, key=lambda found: found[0]):
        rising = [count for _, _, count in step]
        assert rising == sorted(rising)


def test_layers_in_training_mode_are_not_put_there_again(compared, noisy, monkeypatch):
    entered, stock = [], Qwen3DecoderLayer.train

    def train(self, mode=True):
        if mode:
            entered.append(self)
        return stock(self, mode)

    monkeypatch.setattr(Qwen3DecoderLayer, "train", train)
    compared(GRPO, JOINED, noisy, **STEPS)
    assert entered == []  # they were built in that mode; TRL puts them there for each micro-batch


def test_a_model_that_left_training_mode_is_put_back_with_all_inside_it():
    model = nn.Sequential(nn.Linear(1, 1))
    modules = [*model.modules()]
    with patch.object(nn.Linear, "train", autospec=True) as put:
        with in_training(model, modules):
            assert model.train() is model
            put.assert_not_called()
            assert "train" not in vars(model)  # or a reward's copy of it would put this one in another mode
            model.train()
            put.assert_called_once_with(model[0], True)
        model[0].training = False
        with in_training(model, modules):
            model.train()
        assert put.call_count == 2
    with in_training(model, modules):
        assert not model.eval()[0].training
    with in_training(model, modules):
        pass
    assert "train" not in vars(model)


@pytest.mark.parametrize(
    "options",
    [["fsdp"], ["fsdp", "lora"], ["fsdp", "empty"], []],
    ids=["FSDP2", "FSDP2 and adapters", "FSDP2, padded on one rank", "DDP"],
)
def test_micro_batches_share_a_pass_in_two_processes(tmp_path, options):
    """Under DDP all but the last one of a step, whose backward pass averages the gradients."""
    environment = FSDP2 if "fsdp" in options else {"ACCELERATE_USE_CPU": "true"}
    reports = rank_reports(SCRIPT, tmp_path, "joined", *options, count=2, environment=environment)
    for padded, packed in reports:
        assert set(packed["joined"][2:]) == ({4} if "fsdp" in options else {3, 1})
        for mine, theirs in zip(packed["logs"], padded["logs"], strict=True):
            assert mine == pytest.approx(theirs, abs=1e-5, rel=1e-5)


@trlx_hybrid.hybrid
class Comparing(trl.GRPOTrainer):
    """Scores its rows in another order first."""

    def _compute_loss(self, model, inputs):
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1).flip(0)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1).flip(0)
        scores = self._get_per_token_logps_and_entropies(model, ids, mask, inputs["completion_ids"].shape[1])
        return super()._compute_loss(model, inputs) - 0.1 * scores[0][0].mean()


class Copying(GRPO):
    """Changes every other micro-batch."""

    def _compute_loss(self, model, inputs):
        if self._step % 2:
            inputs = inputs | {"advantages": 2 * inputs["advantages"]}
        return super()._compute_loss(model, inputs)


class Enduring(GRPO):
    """Goes on after a loss that could not be computed, and comes back to it."""

    failed = False

    def training_step(self, *args, **kwargs):
        try:
            return super().training_step(*args, **kwargs)
        except FloatingPointError:
            return torch.zeros(())

    def get_high_entropy_mask(self, *args, **kwargs):
        if self._step == 5 and not self.failed:
            self.failed = True
            raise FloatingPointError
        return super().get_high_entropy_mask(*args, **kwargs)


@pytest.mark.parametrize("trainer", [Comparing, Copying, Enduring])
def test_a_loss_of_the_users_has_passes_of_its_own(compared, noisy, passes, trainer):
    """It may score other rows, or not those of every micro-batch."""
    padded, packed = compared(trainer, JOINED | {"deferred": False}, noisy, top_entropy_quantile=0.25, **STEPS)
    assert max(difference(packed, padded)) < 1e-5
    assert not passes


class Interrupt(TrainerCallback):
    """After the second micro-batch, or another; optimizer steps end without a call."""

    def __init__(self, at=2):
        self.seen, self.at = 0, at

    def on_substep_end(self, args, state, control, **kwargs):
        self.seen += 1
        if self.seen == self.at:
            raise KeyboardInterrupt


def test_an_interrupted_pass_is_not_taken_up_by_the_next_run(run, noisy, scripted, passes):
    """Its gradients would be those of the step that was interrupted."""
    runs = []
    for scoring in ({"scoring": "padded"}, {"scoring": "packed", "scoring_options": JOINED}):
        given = STEPS | {"callbacks": [Interrupt()], "train": False}
        runs.append(run(GRPO, hybrid=noisy | scoring, plugins=[scripted], **given))
        trainer = runs[-1].trainer
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
        trainer.train()
        runs[-1].close()
    assert passes[0] == 3
    assert max(difference(runs[1], runs[0])) < 1e-5


def test_a_run_that_was_interrupted_within_a_step_resumes_from_its_checkpoint(run, noisy, scripted):
    """What is left of the rollout was sampled by weights that the checkpoint has replaced."""
    given = STEPS | {"max_steps": 5, "save_strategy": "steps", "save_steps": 2}
    given |= {"callbacks": [Interrupt(at=11)], "train": False}  # within the fourth step
    trainer = run(GRPO, hybrid=noisy | {"scoring": "packed"}, plugins=[scripted], **given).trainer
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == trainer.args.max_steps


@pytest.mark.parametrize("checkpointing", [True, False])
def test_the_header_names_shared_passes_where_there_can_be_any(run, noisy, scripted, passes, capsys, checkpointing):
    hybrid = noisy | {"scoring": "packed", "scoring_options": JOINED}
    run(GRPO, hybrid=hybrid, plugins=[scripted], **STEPS | {"gradient_checkpointing": checkpointing})
    assert ("micro-batches share a pass" in capsys.readouterr().err) == (max(passes) > 1) == checkpointing


@pytest.mark.parametrize("without", ["packing", "adaptive_checkpointing"])
def test_what_joining_needs_is_named(without):
    with pytest.raises(ConfigError, match="joined needs packing and adaptive_checkpointing"):
        PackedOptions(**{"packing": True, "adaptive_checkpointing": True, "joined": True} | {without: False})
