"""Runs for the conformance checks, with a tiny model; everything else is as in a real run."""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from ...contract.types import Request
from ...policy.policy import Policy

if TYPE_CHECKING:
    from torch import nn

    from ...own_loop.hybrid_engine import HybridEngine
    from ...session import Session

TOKENS = 8
"""The maximal length of a completion, in tokens."""

PROMPTS = [[5, 6, 7, 40], list(range(10, 58)), list(range(10, 58)), [90], list(range(60, 77)), list(range(30, 10, -1))]
"""Prompts as token ids. They differ in length, from a single token to more than one block of an engine's prefix cache;
two are equal."""


class Trainer(Protocol):
    """The part of a trainer of `trlx_hybrid` that conformance checks read; the trainer need not have trained."""

    @property
    def session(self) -> Session:
        """The live objects of the trainer's run: components, policy, ranks and settings."""


@contextmanager
def run_with(
    *, plugins: Sequence[object], model: Any, tokenizer: Any, max_tokens: int = TOKENS, **config: Any
) -> Iterator[HybridEngine]:
    """Return a context with a new `HybridEngine`, which is a run without a trainer. The engine is closed when the
    context ends.

    Args:
        plugins: objects with hook implementations that offer components.
        model, tokenizer: the policy and its tokenizer; if None, a tiny Qwen3 and a tokenizer of characters.
        max_tokens: the maximal length of a completion, in tokens.
        config: fields of `HybridConfig`.
    """
    from ...config import HybridConfig
    from ...own_loop.hybrid_engine import HybridEngine
    from ..models import character_tokenizer, tiny_model

    run = HybridEngine(
        tiny_model() if model is None else model,
        character_tokenizer() if tokenizer is None else tokenizer,
        config=HybridConfig(**config),
        max_tokens=max_tokens,
        plugins=plugins,
    )
    try:
        yield run
    finally:
        run.close()


def requests(first_seed: int = 0) -> list[Request]:
    """Return one request for each of `PROMPTS`. The completion of the last is limited to three tokens.

    Args:
        first_seed: seed of the first request; each further request has the next number.
    """
    count = len(PROMPTS)
    return [
        Request(prompt_ids=prompt, seed=first_seed + i, row=i, max_tokens=3 if i == count - 1 else None)
        for i, prompt in enumerate(PROMPTS)
    ]


def change(policy: Policy, seed: int) -> None:
    """Change every weight that is trained, in place, by so much that the log-probs differ beyond rounding.

    Args:
        policy: the policy.
        seed: seed of the random changes.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.module.parameters():
            if parameter.requires_grad:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_(noise.to(parameter) * 0.03)


def as_it_is(policy: Policy) -> Policy:
    """Return a copy of the policy with copied weights, which later changes of the policy do not affect."""
    model = copy.deepcopy(policy.module)
    for module in model.modules():
        vars(module).pop("forward", None)  # see `with_a_trainers_forward`
    return Policy(lambda: model, policy.processing_class, policy.device)


def with_a_trainers_forward(model: nn.Module) -> None:
    """Put a `forward` on the model object itself, as TRL and accelerate do. It always computes with this model's
    weights, even in a copy that inherits it."""
    forward = model.forward

    def own(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    model.forward = types.MethodType(functools.wraps(forward)(own), model)
