"""Helpers of the conformance checks: errors that say what was found, and a check that log-probs belong to the sampled
tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...types import Completion, Request

if TYPE_CHECKING:
    from torch import Tensor

    from ...weights.policy import Policy


class ConformanceError(AssertionError):
    """A component does something else than its protocol says."""


def require(fulfilled: bool, found: str, mend: str) -> None:
    """Raise ConformanceError unless a requirement is fulfilled.

    Args:
        found: what was found where the requirement is not fulfilled.
        mend: what to do about it.

    Raises:
        ConformanceError: the requirement is not fulfilled; the message has both texts.
    """
    if not fulfilled:
        raise ConformanceError(f"{found} {mend}")


def require_completions(found: object, requests: Sequence[Request], of: str) -> list[Completion]:
    """Return what was sampled; raise ConformanceError unless it is one completion per request.

    Args:
        of: what returned it, for the message.
    """
    require(
        isinstance(found, list) and all(isinstance(one, Completion) for one in found),
        f"{of} returned a {type(found).__name__} that is no list of completions.",
        "Return a list of trlx_hybrid.types.Completion.",
    )
    assert isinstance(found, list)
    require(
        len(found) == len(requests),
        f"{of} returned {len(found)} completions for {len(requests)} requests.",
        "Return one for each request, in their order: TRL's batches have no other row to put it into.",
    )
    return found


def require_log_probs(
    policy: Policy,
    requests: Sequence[Request],
    completions: Sequence[Completion],
    allowed: float,
    *,
    of: str,
    temperature: float = 1.0,
    before: Policy | None = None,
) -> None:
    """Compare the log-probs of sampled tokens with the policy's; raise ConformanceError where they differ.

    Args:
        allowed: nats that rounding explains.
        of: what sampled the tokens, for the message.
        before: the policy as it was before its weights changed; an engine with stale weights would still sample from
            it.
    """
    for index, (request, completion) in enumerate(zip(requests, completions, strict=True)):
        ids = completion.token_ids
        require(bool(ids), f"{of} returned an empty completion for request {index}.", "Sample one token at least.")
        require(
            completion.logprobs is not None and len(completion.logprobs) == len(ids) and all(completion.logprobs),
            f"{of} returned {len(completion.logprobs or [])} log-probs for {len(ids)} tokens of request {index}, with "
            "Sampling(logprobs=0).",
            "Give each sampled token a list with its own log-prob.",
        )
        expected = policy.log_probs(request.prompt_ids, ids, temperature)
        given = _given(completion, expected)
        if _near(given, expected, allowed):
            continue
        gap = float((given - expected).abs().max())
        found = f"{of} gave request {index} log-probs {gap:.3g} nats from the policy's ({allowed:g} are allowed)."
        if len(ids) > 2 and (_near(given[1:], expected[:-1], allowed) or _near(given[:-1], expected[1:], allowed)):
            require(False, found, "They fit when moved by one token: logprobs[i] belongs to token_ids[i].")
        if before is not None and _near(given, before.log_probs(request.prompt_ids, ids, temperature), allowed):
            mend = "They are those of the weights before the last change: load the new ones, also after waking up, and "
            require(False, found, mend + "drop every cache that depends on weights (prefixes, CUDA graphs, encoders).")
        if temperature != 1.0 and _near(given, policy.log_probs(request.prompt_ids, ids), allowed):
            require(False, found, f"They are those at temperature 1, not at {temperature:g}, at which was sampled.")
        for other, theirs in enumerate(requests):
            if theirs.prompt_ids != request.prompt_ids and _near(
                given, policy.log_probs(theirs.prompt_ids, ids, temperature), allowed
            ):
                mend = f"They fit the prompt of request {other}: completions belong in the order of the requests."
                require(False, found, mend)
        require(False, found, "It computes something else than the model, or holds other weights.")


def _given(completion: Completion, like: Tensor) -> Tensor:
    assert completion.logprobs is not None
    return like.new_tensor([float("nan") if of_token[0] is None else of_token[0] for of_token in completion.logprobs])


def _near(given: Tensor, expected: Tensor, allowed: float) -> bool:
    return bool(((given - expected).abs() <= allowed).all())  # a NaN is not near
