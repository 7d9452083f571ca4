"""The error that all conformance checks raise, and their common checks of completions and log-probs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...contract.types import Completion, Request

if TYPE_CHECKING:
    from torch import Tensor

    from ...policy.policy import Policy


class ConformanceError(AssertionError):
    """Raised by a conformance check where a component does something else than its protocol says."""


def require(fulfilled: bool, found: str, mend: str) -> None:
    """Raise ConformanceError if a requirement is not met.

    Args:
        fulfilled: whether the requirement is met.
        found: text that says what was found instead.
        mend: text that says how to fix it.

    Raises:
        ConformanceError: the requirement is not met; the message consists of both texts.
    """
    if not fulfilled:
        raise ConformanceError(f"{found} {mend}")


def require_completions(found: object, requests: Sequence[Request], of: str) -> list[Completion]:
    """Check that `found` is a list with one completion per request, and return it.

    Args:
        found: what an engine or a rollout has returned.
        requests: the requests.
        of: name of that component, for messages.

    Raises:
        ConformanceError: `found` is something else.
    """
    require(
        isinstance(found, list) and all(isinstance(one, Completion) for one in found),
        f"{of} returned a {type(found).__name__} that is no list of completions.",
        "Return a list of trlx_hybrid.contract.types.Completion.",
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
    """Check that the completions' log-probs are those of the policy for the sampled tokens.

    If not, the error names the likely mistake: log-probs of another position, of another request, of older weights, or
    at another temperature.

    Args:
        policy: the policy that the component should have sampled from.
        requests: the requests.
        completions: their completions, sampled with `Sampling(logprobs=0)`.
        allowed: the difference that rounding may cause, in nats.
        of: what sampled the tokens, for messages.
        temperature: the temperature of the sampling.
        before: a copy of the policy before its weights last changed, to recognise an engine that still samples from old
            weights.

    Raises:
        ConformanceError: a completion is empty, or log-probs are missing or differ.
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
