"""Checks of the components that plugins offer: of their members, when a component is built, and of what an engine or a
rollout returns, at each call.

A component must fit the protocol of its kind (`Engine`, `WeightSync` and so on): it has all required members, none is
misspelt, and its methods accept their arguments. This check calls none of its methods. What an engine or a rollout
returns must be fit to train on: one completion per request, in order, with the log-probs that were asked for.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any

from ..contract.conversation import Conversation
from ..contract.protocols import Algorithm, Engine, EnvironmentArguments
from ..contract.types import Completion, Request, Sampling
from ..errors import nearest

OPTIONAL = {
    "Engine": {"peers_lost", "untested", "stream", "regions", "weights_written", "leave"},
    "WeightSync": {"keeps_weights", "open", "note", "put_back", "forget", "check", "release"},
    "Rollout": {"converses", "tells", "converse", "play", "interrupt", "close"},
    "Scoring": {"deferred", "balanced", "joins", "micro_batches", "joined", "note", "state", "load_state", "close"},
    "Algorithm": {name for name in vars(Algorithm) if not name.startswith("_")},
    "EnvironmentArguments": {field.name for field in fields(EnvironmentArguments)},
}
"""Members of each protocol that a component may inherit instead of defining them. An engine need not have its optional
members at all."""

ADDED = {"Rollout": {"play", "interrupt"}, "Scoring": {"state", "load_state"}}
"""Optional members of each protocol that have been added to it since 0.1: no component need have them."""

ACTS = ("draw", "keep", "observe", "rewards", "advantages", "loss")
"""Methods through which an algorithm can have an effect. An algorithm that defines none of them, and does not sample
more, is refused."""

ALIKE = 0.8
"""The similarity, as difflib computes it, from which on an unknown name counts as a misspelt member, for instance with
one letter too many."""


def missing_members(built: object, protocol: type[Any]) -> list[str]:
    """Return the names of the members that a protocol, such as `Engine`, requires and an object lacks. A required
    member that is only inherited from the protocol itself counts as lacking."""
    stubs = _members(protocol)
    optional = OPTIONAL.get(protocol.__name__, set())
    required = {*protocol.__annotations__, *stubs} - optional
    stubbed = {name for name in required & stubs.keys() if not overrides(built, name, protocol)}
    added = ADDED.get(protocol.__name__, set())
    expected = required if protocol is Engine else (required | optional) - added
    return sorted(stubbed | {name for name in expected if not hasattr(built, name)})


def mistaken_members(built: object, protocol: type[Any]) -> str | None:
    """Return a text on what is wrong with the members that an object defines (misspelt, not callable with the
    protocol's arguments, without effect), or None.

    Args:
        built: the object; it has all members that the protocol requires.
    """
    problem = next((p for p in (*_misspelt(built, protocol), *_uncallable(built, protocol))), None)
    if problem is None and protocol is Algorithm and not _acts(built):
        problem = f"none of {', '.join(ACTS)}, so it would change nothing. Write one of these methods"
    return problem


def overrides(built: object, name: str, protocol: type[Any]) -> bool:
    """Return whether an object has its own version of a protocol's member, from its class or set on the object itself,
    and not the one inherited from the protocol."""
    found = getattr(built, name, None)
    return getattr(found, "__func__", found) is not vars(protocol).get(name)


def accepts(function: Any, *given: Any, **named: Any) -> bool:
    """Return whether a function can be called with these arguments; True where Python cannot tell its signature."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return callable(function)
    try:
        signature.bind(*given, **named)
    except TypeError:
        return False
    return True


def described(function: Any) -> str:
    """Return a function's declared arguments as text, for a message."""
    return str(inspect.signature(function))


def _members(protocol: type[Any]) -> dict[str, Any]:
    return {name: value for name, value in vars(protocol).items() if not name.startswith("_")}


def _misspelt(built: object, protocol: type[Any]) -> Iterator[str]:
    """Yield a message for each member of the object that is probably a misspelt member of the protocol: their names are
    similar, and the object does not define the protocol's member."""
    stubs = _members(protocol)
    left = {name for name in stubs if not hasattr(built, name) or not overrides(built, name, protocol)}
    for kind in type(built).__mro__:
        if kind is protocol or kind is object:
            return
        for name, value in vars(kind).items():
            if name.startswith("_") or name in stubs or name in protocol.__annotations__:
                continue
            method = inspect.isroutine(value)
            near = nearest(name, [stub for stub in left if inspect.isroutine(stubs[stub]) == method], ALIKE)
            if near:
                yield (
                    f"{name!r}, which nothing reads, and no {near!r} of its own. Call it {near!r}, or, if it is "
                    f"something else, _{name}"
                )


def _uncallable(built: object, protocol: type[Any]) -> Iterator[str]:
    """Yield a message for each of the object's methods that cannot be called as a run calls it: with the protocol's
    required arguments by position, and the optional ones by name."""
    for name, stub in _members(protocol).items():
        if not inspect.isroutine(stub) or not hasattr(built, name) or not overrides(built, name, protocol):
            continue
        method = getattr(built, name)
        if method is None:  # set to None on purpose
            continue
        if not callable(method):
            yield f"a {name!r} that is a {type(method).__name__}, where a method is called. Write one"
            continue
        parameters = list(inspect.signature(stub).parameters.values())[1:]
        required = [p.name for p in parameters if p.default is p.empty]
        named = {p.name: p.default for p in parameters if p.default is not p.empty}
        if not accepts(method, *required, **named):
            call = ", ".join([*required, *(f"{key}={value!r}" for key, value in named.items())])
            yield f"{name}{described(method)}, which is called as {name}({call}). Take these arguments"


def _acts(algorithm: Any) -> bool:
    samples_more = algorithm.rounds != Algorithm.rounds or algorithm.oversampling != Algorithm.oversampling
    return samples_more or any(overrides(algorithm, method, Algorithm) for method in ACTS)


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
    """Check a rollout's conversations, and return what is wrong with them: the end of a message that begins with "…
    returned"; None where all is right.

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
    """Return what is wrong with a completion's log-probs, or None. TRL's importance-sampling correction needs a
    log-prob for each sampled token. If log-probs are missing, the loss fails; if they belong to other tokens, the loss
    is wrong."""
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
    """Return a text that names the first completion in a wrong place, or None. The order is known only where the engine
    sets `Completion.row`. A rollout may make its own requests, with other rows, so only the same rows in another order
    are reported."""
    given, expected = [completion.row for completion in sampled], [request.row for request in requests]
    rows = [row for row in given if row is not None]
    if len(rows) < len(given) or rows == expected or sorted(rows) != sorted(expected):
        return None
    place = next(place for place, row in enumerate(rows) if row != expected[place])
    return (
        f"the completion of request {expected.index(rows[place])} in place {place}: completions belong in the "
        "order of the requests, or a prompt is trained with another one's."
    )
