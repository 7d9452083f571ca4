"""An engine that costs nothing, arguments of runs, and how far apart two runs are."""

import math
import random

import torch
from peft import LoraConfig
from transformers import TrainerCallback
from trlx_hybrid import hookimpl
from trlx_hybrid.contract.protocols import Engine
from trlx_hybrid.contract.types import Completion, LoadReport

EOS, FIRST, LAST = 1, 3, 97
STEPS = {
    "optim": "sgd",
    "learning_rate": 0.05,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 4,
    "max_steps": 3,
}
"""Of a run: several micro-batches in each optimizer step, whose weights differ by what gradients differ by."""


class Scripted(Engine):
    """Writes random tokens of ragged lengths, or one of `turns`; the policy's log-probs of them are off by `noise`."""

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
    turns = ()

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
        if self.turns and not probe:
            ids = list(draw.choice(self.turns))
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


def lora(**given):
    """Makes a config of adapters: TRL takes each for one trainer only."""
    return lambda: LoraConfig(r=4, target_modules="all-linear", init_lora_weights=True, **given)


def masked(prompts, trainer):
    """A rollout of the user's that masks what an environment said, and knows not every log-prob; every other row is
    truncated."""
    ids = [
        [5 + len(prompt) % 7, *range(10, 13 + index % 3), 13 if index % 2 else EOS]
        for index, prompt in enumerate(prompts)
    ]
    return {
        "prompt_ids": [trainer.processing_class(prompt)["input_ids"] for prompt in prompts],
        "completion_ids": ids,
        "logprobs": [[-4.5] * (len(row) - 1) + [None] for row in ids],
        "env_mask": [[1, 0, 0] + [1] * (len(row) - 3) for row in ids],
    }


class Gradients(TrainerCallback):
    """Keeps those of each optimizer step, as the optimizer takes them."""

    def __init__(self):
        self.steps = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        trained = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        self.steps.append({name: gradient.clone() for name, gradient in trained.items()})


def gradients(one, other):
    """Of each optimizer step, how far apart two runs' gradients are at most, and how large at most: `compared` keeps
    them."""
    assert [step.keys() for step in one.gradients] == [step.keys() for step in other.gradients]
    return [
        (
            max(float((gradient - theirs[name]).abs().max()) for name, gradient in mine.items()),
            max(float(gradient.abs().max()) for gradient in mine.values()),
        )
        for mine, theirs in zip(one.gradients, other.gradients, strict=True)
    ]


def difference(one, other):
    """The largest difference of all that two runs logged, relative above 1, and of their weights."""
    assert [log.keys() for log in one.logs] == [log.keys() for log in other.logs]
    gaps = [
        0.0 if value == log[name] else abs(value - log[name]) / max(1, abs(value))
        for mine, log in zip(one.logs, other.logs, strict=True)
        for name, value in mine.items()
    ]
    theirs = other.weights()
    return max(gaps), max(float((w - theirs[name]).abs().max()) for name, w in one.weights().items())
