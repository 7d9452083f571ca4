"""With no component chosen, training is stock TRL bit for bit: plugins installed, an observer watching."""

import pytest
import torch
import trl
import trlx_hybrid
from peft import LoraConfig
from trlx_hybrid import hookimpl
from trlx_hybrid.errors import ConfigError


class Observer:
    """Implements every observing hook and keeps what it saw."""

    def __init__(self):
        self.trajectories, self.batches, self.events = [], [], []

    @hookimpl
    def trlx_configure(self, session):
        self.events.append("configure")

    @hookimpl
    def trlx_unconfigure(self, session):
        self.events.append("unconfigure")

    @hookimpl
    def trlx_rollout_end(self, session, trajectories):
        self.trajectories += trajectories

    @hookimpl
    def trlx_advantages(self, session, batch):
        self.batches.append(batch)

    @hookimpl
    def trlx_report_header(self, session):
        return "watched by a test"


def lora():
    return LoraConfig(r=4, target_modules="all-linear", init_lora_weights=True)


@pytest.mark.parametrize("adapter", [None, lora], ids=["full", "lora"])
def test_hybrid_grpo_without_components_is_stock_trl_bit_for_bit(run, adapter, capsys):
    observer = Observer()
    arguments = {"max_steps": 5, "num_iterations": 2, "beta": 0.1 if adapter else 0.0}
    stock = run(trl.GRPOTrainer, peft_config=adapter and adapter(), **arguments)
    ours = run(trlx_hybrid.GRPOTrainer, peft_config=adapter and adapter(), plugins=[observer], **arguments)

    assert ours.logs == stock.logs  # losses, rewards, entropies, gradient norms, KL: every number of every step
    assert len([log for log in ours.logs if "loss" in log]) == 5
    assert ours.recorder.completions == stock.recorder.completions
    assert ours.recorder.kwargs == stock.recorder.kwargs
    weights, expected = ours.weights(), stock.weights()
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)

    assert [t.completion_ids for t in observer.trajectories] == ours.recorder.completions
    assert all(t.reward is not None and t.loss_mask == [1] * len(t.completion_ids) for t in observer.trajectories)
    assert observer.batches[0]["rewards_per_func"].shape == (8, 1)
    assert "watched by a test" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["RLOO", "Distillation"])
def test_the_other_generating_trainers_are_stock_as_well(run, name):
    from trlx_hybrid.testing.models import tiny_model

    config = getattr(trl, f"{name}Config")
    given = {"teacher_model": tiny_model(seed=1)} if name == "Distillation" else {"beta": 0.0}
    stock = run(getattr(trl, f"{name}Trainer"), config_class=config, **given)
    given = {"teacher_model": tiny_model(seed=1)} if name == "Distillation" else {"beta": 0.0}
    observer = Observer()
    ours = run(getattr(trlx_hybrid, f"{name}Trainer"), config_class=config, plugins=[observer], **given)
    assert ours.logs == stock.logs
    assert all(torch.equal(w, stock.weights()[name]) for name, w in ours.weights().items())
    assert observer.trajectories


def test_a_plugin_may_replace_the_advantages(run):
    class NoLearning:
        @hookimpl
        def trlx_advantages(self, batch):
            return torch.zeros_like(batch["advantages"])

    ours = run(trlx_hybrid.GRPOTrainer, plugins=[NoLearning()], max_steps=1)
    assert all(log["grad_norm"] == 0 for log in ours.logs if "grad_norm" in log)


def test_configure_and_unconfigure_frame_a_session(run):
    observer = Observer()
    ours = run(trlx_hybrid.GRPOTrainer, plugins=[observer], train=False)
    assert observer.events == ["configure"]
    ours.trainer.session.close()
    ours.trainer.session.close()
    assert observer.events == ["configure", "unconfigure"]


def test_classes_are_true_subclasses_made_once():
    assert issubclass(trlx_hybrid.GRPOTrainer, trl.GRPOTrainer)
    assert trlx_hybrid.GRPOTrainer.__name__ == "GRPOTrainer"
    assert trlx_hybrid.hybrid(trl.GRPOTrainer) is trlx_hybrid.GRPOTrainer
    assert trlx_hybrid.hybrid(trlx_hybrid.GRPOTrainer) is trlx_hybrid.GRPOTrainer

    class Mine(trl.GRPOTrainer):
        """A user's own trainer."""

    assert issubclass(trlx_hybrid.hybrid(Mine), Mine)


@pytest.mark.parametrize("module", ["sdpo.SDPO", "sdft.SDFT", "gold.GOLD", "iw_opd.IWOPD"])
def test_trainers_that_build_their_own_engine_are_refused_by_name(module):
    import importlib

    package, name = module.split(".")
    trainer = getattr(importlib.import_module(f"trl.experimental.{package}"), f"{name}Trainer")
    with pytest.raises(ConfigError, match=f"{name}Trainer builds a vLLM of its own"):
        trlx_hybrid.hybrid(trainer)


def test_trainers_that_do_not_generate_are_refused():
    with pytest.raises(ConfigError, match="SFTTrainer does not generate"):
        trlx_hybrid.hybrid(trl.SFTTrainer)
