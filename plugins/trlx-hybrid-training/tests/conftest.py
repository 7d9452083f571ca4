"""What tests of scoring share: two runs held against each other."""

import sys
from pathlib import Path

import pytest
import torch
from trlx_hybrid.session import Session
from trlx_hybrid_training.options import BEFORE
from trlx_hybrid_training.scoring import Packed

sys.path.insert(0, str(Path(__file__).parent))
from scripted import SCRIPTED, Gradients, Offer, Scripted


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
    """`compared(trainer, scoring_options, **arguments)`: a run with TRL's scoring and one with ours, how many forward
    passes TRL's own method was asked for in each, without and with gradients, and the gradients of each step. Joined
    passes and other options that a user gets without asking are on where the test asks.

    Each step must train something, but for the first `untrained` ones: zeros are alike however they are computed."""
    import trl

    counted = []
    for trainer in (trl.GRPOTrainer, trl.RLOOTrainer):

        def counting(self, *args, stock=trainer._get_per_token_logps_and_entropies, **kwargs):
            counted[-1][torch.is_grad_enabled()] += 1
            return stock(self, *args, **kwargs)

        monkeypatch.setattr(trainer, "_get_per_token_logps_and_entropies", counting)

    def start(trainer, options, hybrid=None, plugins=(), untrained=0, **given):
        runs = []
        given.setdefault("max_steps", 2)
        for scoring in ({"scoring": "padded"}, {"scoring": "packed", "scoring_options": BEFORE | options}):
            counted.append([0, 0])
            made = {name: make() for name, make in given.items() if name in ("model", "peft_config", "reward_funcs")}
            made |= {"plugins": [Offer(), *plugins], "callbacks": [kept := Gradients()]}
            runs.append(run(trainer, hybrid=(hybrid or {}) | scoring, **(given | made)))
            runs[-1].close()
            runs[-1].forwards, runs[-1].gradients = tuple(counted[-1]), kept.steps
            norms = [log["grad_norm"] for log in runs[-1].logs if "grad_norm" in log]
            assert len(norms) == len(kept.steps) == given["max_steps"]
            assert all(norm > 0 for norm in norms[untrained:]), norms
        return runs

    return start


@pytest.fixture
def passes(monkeypatch):
    """How many micro-batches each forward pass with gradients computed; memory is as free as `passes.free` says."""

    class Passes(list):
        free = 1 << 60

    seen = Passes()

    def joined(self, tokens, stock=Packed.joined):
        seen.append(stock(self, tokens))
        return seen[-1]

    monkeypatch.setattr(Packed, "joined", joined)
    monkeypatch.setattr(Session, "free_bytes", lambda self: seen.free)
    return seen
