"""Checks that the output of an engine or a rollout can be trained on: one completion per request, in order, with the
log-probs that were asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..contract.conversation import Conversation
from ..contract.types import Completion, Request, Sampling


def wrong_completions(sampled: Any, requests: Sequence[Request], sampling: Sampling) -> str | None:
    """Check the output of an engine or a rollout, and return what is wrong with it, or None.

    Args:
        sampled: the output.
        requests: requests of this rank.
        sampling: says whether log-probs are required.

    Returns:
        The end of a message that begins with "… returned", with a sentence on how to fix it; None where all is right.
    """
    problem = _wrong_list(sampled, len(requests), Completion, "request")
    if problem is not None:
        return problem
    for index, completion in enumerate(sampled):
        problem = _wrong_tokens(completion) or _wrong_log_probs(completion, sampling)
        if problem is not None:
            return f"completion {index} with {problem}"
    return _wrong_order(sampled, requests)


def wrong_conversations(returned: Any, dialogues: int) -> str | None:
    """Check a rollout's conversations, and return what is wrong with them, worded as in `wrong_completions`, or None.

    Args:
        returned: what the rollout returned.
        dialogues: how many dialogues it was given, and so how many conversations are expected.
    """
    problem = _wrong_list(returned, dialogues, Conversation, "dialogue")
    if problem is not None:
        return problem
    for index, conversation in enumerate(returned):
        tokens, mask, log_probs = len(conversation.completion_ids), conversation.loss_mask, conversation.logprobs
        for name, values in (("loss_mask", mask), ("logprobs", log_probs)):
            if values is not None and len(values) != tokens:
                return f"conversation {index} with {len(values)} values of `{name}` for {tokens} tokens: one for each."
    return None


def _wrong_list(found: Any, wanted: int, kind: type, given: str) -> str | None:
    """Check that an object is a list of `wanted` items of the class `kind`. Return a message that says what it is
    instead, or None where it is such a list.

    Args:
        given: what each item belongs to ("request", "dialogue"), for the message.
    """
    others = [one for one in found if not isinstance(one, kind)] if isinstance(found, list) else []
    if isinstance(found, list) and not others and len(found) == wanted:
        return None
    what = type(found).__name__ if not isinstance(found, list) else f"list of {len(found)}"
    if others:
        what = f"list with a {type(others[0]).__name__} in it"
    return f"a {what} for {wanted} {given}s, where a list with one {kind.__name__} for each was expected."


def _wrong_tokens(completion: Completion) -> str | None:
    ids: Any = completion.token_ids
    kinds = set(map(type, ids)) if isinstance(ids, list) else {type(ids)}
    if isinstance(ids, list) and kinds <= {int}:
        return None
    other = next(iter(kinds - {int}))
    return f"{other.__name__} as `token_ids`{' in a list' if isinstance(ids, list) else ''}. They are a list of int."


def _wrong_log_probs(completion: Completion, sampling: Sampling) -> str | None:
    """Return what is wrong with a completion's log-probs, or None. TRL's importance-sampling correction uses them, so
    that the loss would fail without them, and be wrong with those of other tokens."""
    if sampling.logprobs is None:
        return None
    asked = "Sampling.logprobs asks for them: keep those of the engine's completions, one list for each token"
    tokens, found = len(completion.token_ids), completion.logprobs
    if found is None:
        return f"logprobs=None. {asked}."
    if len(found) != tokens:
        return f"{len(found)} logprobs for {tokens} tokens. {asked}."
    if not all(isinstance(candidates, list) and candidates for candidates in found):
        return f"logprobs that are no list for each token. {asked}, the sampled token's first."
    return None


def _wrong_order(sampled: Sequence[Completion], requests: Sequence[Request]) -> str | None:
    """Return which completion is out of order, or None. This is known only where the engine sets `Completion.row`. A
    rollout may make its own requests, with other rows, so only the same rows in another order are reported."""
    given, expected = [completion.row for completion in sampled], [request.row for request in requests]
    rows = [row for row in given if row is not None]
    if len(rows) < len(given) or rows == expected or sorted(rows) != sorted(expected):
        return None
    place = next(place for place, row in enumerate(rows) if row != expected[place])
    return (
        f"the completion of request {expected.index(rows[place])} in place {place}: completions belong in the "
        "order of the requests, or a prompt is trained with another one's."
    )
