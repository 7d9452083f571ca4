"""What tests of scoring share: two runs held against each other."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from scripted import SCRIPTED, Offer, Scripted


@pytest.fixture
def scripted():
    """The plugin that offers it."""
    return Offer()


@pytest.fixture
def noisy(monkeypatch):
    """An engine whose log-probs are off by up to 0.3 nats, and run arguments that choose it."""
    monkeypatch.setattr(Scripted, "noise", 0.3)
    return SCRIPTED


@pytest.fixture
def compared(run, monkeypatch):
    """`compared(trainer, scoring_options, **arguments)`: a run with TRL's scoring and one with ours, and how many
    forward passes TRL's own method was asked for in each, without and with gradients."""
    import trl

    counted = []
    for trainer in (trl.GRPOTrainer, trl.RLOOTrainer):

        def counting(self, *args, stock=trainer._get_per_token_logps_and_entropies, **kwargs):
            counted[-1][torch.is_grad_enabled()] += 1
            return stock(self, *args, **kwargs)

        monkeypatch.setattr(trainer, "_get_per_token_logps_and_entropies", counting)

    def start(trainer, options, hybrid=None, plugins=(), **given):
        runs = []
        given.setdefault("max_steps", 2)
        for scoring in ({}, {"scoring": "packed", "scoring_options": options}):
            counted.append([0, 0])
            made = {name: make() for name, make in given.items() if name in ("model", "peft_config", "reward_funcs")}
            runs.append(run(trainer, hybrid=(hybrid or {}) | scoring, plugins=[Offer(), *plugins], **(given | made)))
            runs[-1].close()
            runs[-1].forwards = tuple(counted[-1])
        return runs

    return start
