"""Proof that the engine samples from the policy: its memory holds the policy's bits, and it computes the same numbers.

Both are needed. Equal log-probs do not show a corrupted row of a large embedding, and equal bits do not show an
engine that repacked or derived matrices from them (a tied head left stale was 0.24 nats off with equal parameters).
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .errors import SyncError, listed
from .types import Completion, Request, Sampling

if TYPE_CHECKING:
    from .policy import Policy
    from .protocols import Engine
    from .registry import Component

PROBE_TOKENS = 8
SAMPLED_TENSORS = 8
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.5, torch.float16: 0.1}
"""Largest allowed log-prob difference of one token, in nats. Healthy runs stay far below: 1e-6 in fp32 on CPU, about
0.05 in bf16, where kernels differ in rounding. Stale or misplaced weights of a trained model exceed it at once."""

QUANTIZED_TOLERANCE = 2.0
"""The same for an engine that quantises: its numbers are others by design (fp8: 0.53 on random weights of 1.5B)."""


def check_bits(engine: Engine, policy: Policy, only: Set[str] | None = None) -> int:
    """Compare the engine's memory with the policy's weights, bit for bit in the engine's dtype.

    Args:
        only: checkpoint names to compare; None compares all.

    Returns:
        How many checkpoint tensors were compared.

    Raises:
        SyncError: names each tensor that differs.
    """
    compared = 0

    def counted() -> Iterator[tuple[str, Tensor]]:
        nonlocal compared
        for name, tensor in policy.full_weights(only):
            compared += 1
            yield name, tensor

    differing = engine.differing(counted())
    if differing:
        raise SyncError(
            f"After the weight sync the engine holds other bits than the policy in {listed(differing)}. Sampling would "
            "be off policy without a trace, so the run stops. Report it with `trlx-hybrid env`; another path may serve "
            "meanwhile (HybridConfig.weights)."
        )
    return compared


def sample_probe(engine: Engine, policy: Policy, component: Component) -> tuple[list[int], Completion]:
    """A short prompt and what the engine samples from it. Collective."""
    vocabulary = policy.base.config.get_text_config().vocab_size
    prompt = [(7919 * i + 11) % vocabulary for i in range(1, PROBE_TOKENS + 1)]
    sampling = Sampling(max_tokens=PROBE_TOKENS, logprobs=0, extra={"ignore_eos": True})
    sampled = engine.generate([Request(prompt_ids=prompt, seed=0)], sampling)
    return prompt, component.completions(sampled, 1)[0]


def check_log_probs(engine: Engine, policy: Policy, prompt: list[int], completion: Completion) -> float:
    """Score what the engine sampled with the policy. Collective.

    The engine's dtype decides how much rounding is allowed.

    Returns:
        The largest absolute difference, in nats.

    Raises:
        SyncError: the difference exceeds what rounding explains.
    """
    ours = torch.tensor([float("nan") if p[0] is None else p[0] for p in completion.logprobs or []])
    theirs = policy.log_probs(prompt, completion.token_ids)
    gap = float((ours - theirs).abs().max())
    allowed = QUANTIZED_TOLERANCE if engine.quantized else TOLERANCE[engine.dtype]
    if not gap <= allowed:  # a NaN must not pass
        raise SyncError(
            f"Engine and policy disagree by {gap:.3g} nats on a probe sequence after the weight sync "
            f"(allowed in {engine.dtype}: {allowed}). The weights are in place, so the engine computes something "
            "else with them: a layer it repacks or derives from its weights, or another model definition. "
            "Report it with `trlx-hybrid env`."
        )
    return gap


def sampled_names(names: list[str], version: int) -> set[str]:
    """A few checkpoint names that change from sync to sync, so that every tensor's turn comes."""
    start = (version * SAMPLED_TENSORS) % max(1, len(names))
    return {names[(start + i) % len(names)] for i in range(min(SAMPLED_TENSORS, len(names)))}
