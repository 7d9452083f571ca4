"""What tests of scoring share: an engine that costs nothing, and two runs held against each other."""

import math
import random

import pytest
import torch
from trlx_hybrid import hookimpl
from trlx_hybrid.protocols import Engine
from trlx_hybrid.types import Completion, LoadReport

EOS, FIRST, LAST = 1, 3, 97


class Scripted(Engine):
    """Writes random tokens of ragged lengths, with the policy's log-probs of them, off by what `noise` says."""

    max_model_len, dtype, quantized, weights_lost, peers_lost, sleeps, asleep_bytes = (
        64,
        torch.float32,
        False,
        True,
        False,
        False,
        0,
    )
    noise = 0.0

    def __init__(self, session):
        self.session = session

    def generate(self, requests, sampling):
        return [self.complete(request, sampling) for request in requests]

    def complete(self, request, sampling):
        draw = random.Random(request.seed)
        probe = bool(sampling.extra)
        length = sampling.max_tokens if probe else draw.randint(1, sampling.max_tokens)
        ids = [draw.randint(FIRST, LAST) for _ in range(length)]
        if length < sampling.max_tokens:
            ids[-1] = EOS
        scores = self.session.policy.log_probs(request.prompt_ids, ids, sampling.temperature).tolist()
        noise = 0.0 if probe else self.noise
        return Completion(
            token_ids=ids,
            logprobs=None if sampling.logprobs is None else [[s + draw.uniform(-noise, noise)] for s in scores],
            logprob_token_ids=[[i] for i in ids],
        )

    def load_weights(self, weights):
        self.weights_lost = False
        return LoadReport(tensors=len(list(weights)), bytes=0)

    def differing(self, weights):
        return [] if list(weights) else ["all"]

    def sleep(self, keep_weights=False):
        pass

    def wake(self, what):
        pass

    def resident(self, what):
        return []

    def close(self):
        pass


class Offer:
    @hookimpl
    def trlx_register(self, registry):
        registry.offer("engine", "scripted", lambda session, options: Scripted(session))


SCRIPTED = {"engine": "scripted", "max_logprob_gap": math.inf}


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


def difference(one, other):
    """The largest difference of all that two runs logged, and of their weights."""
    assert [log.keys() for log in one.logs] == [log.keys() for log in other.logs]
    gaps = [
        abs(value - log[name]) if value is not None and log[name] is not None else float(value is not log[name])
        for mine, log in zip(one.logs, other.logs, strict=True)
        for name, value in mine.items()
        if not (value is not None and math.isnan(value) and math.isnan(log[name]))
    ]
    theirs = other.weights()
    return max(gaps), max(float((w - theirs[name]).abs().max()) for name, w in one.weights().items())
