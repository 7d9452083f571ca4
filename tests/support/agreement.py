"""A measure of how far engine and policy are apart in the log-probs of what the engine samples."""

from __future__ import annotations

from typing import Any

PROMPTS = [[5, 6, 7, 40], list(range(10, 43)), [90]]
"""Prompts of several lengths: a single token, and more tokens than one KV block of 32."""


def gap(session: Any) -> float:
    """Return the largest difference, in nats, between the log-probs that the engine samples with and those of the
    policy as it is, its adapters unmerged. NaN where one of them is. Runs a rollout phase of its own, which syncs
    first."""
    import torch
    from trlx_hybrid.contract.types import Request, Sampling

    sampling = Sampling(max_tokens=8, logprobs=0, extra={"ignore_eos": True})
    with session.rollout_phase(True):
        requests = [Request(prompt_ids=p, seed=i) for i, p in enumerate(PROMPTS)]
        completions = session.live_engine.generate(requests, sampling)
    differences = [
        torch.tensor([p[0] for p in c.logprobs]) - session.policy.log_probs(prompt, c.token_ids)
        for prompt, c in zip(PROMPTS, completions, strict=True)
    ]
    return float(torch.cat(differences).abs().max())  # NaN if any value is NaN
