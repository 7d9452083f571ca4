"""An agent's request for a message, and the model's answer, in a form that no API has for itself."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]
"""A chat message, as transformers' chat templates take it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One request for the model's next message.

    Attributes:
        messages: the conversation so far.
        tools: the tools that the model is offered, as JSON schemas.
        max_tokens: the largest number of tokens of the message; None for as many as the run allows.
        stop: texts at the first of which the message ends.
        choices: the number of messages that are asked for, each sampled by itself.
        logprobs: whether the answer lists the sampled tokens with their log-probs.
        overridden: parameters of the request whose place the run's own settings take.
    """

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] = ()
    max_tokens: int | None = None
    stop: Sequence[str] = ()
    choices: int = 1
    logprobs: bool = False
    overridden: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """The model's message, and how many tokens it took.

    Attributes:
        message: the message, with "tool_calls" where it has some.
        length: whether the message ended at a limit of tokens.
        stop: the text of `Asked.stop` at which the message ended, which is not part of it; None where it did not.
        prompt_tokens, completion_tokens: the tokens before it, and its own.
        logprobs: text and log-prob of each of its tokens, after temperature; None where the request does not ask.
    """

    message: Message
    length: bool
    prompt_tokens: int
    completion_tokens: int
    stop: str | None = None
    logprobs: Sequence[tuple[str, float]] | None = None


def compared(message: Mapping[str, Any]) -> Any:
    """Return what of a message is compared between two requests. Clients strip texts, leave out reasoning, and write
    the arguments of tool calls anew; none of that makes it another message."""
    calls = [
        (call["function"]["name"], _parsed(call["function"].get("arguments")))
        for call in message.get("tool_calls") or ()
    ]
    content = message.get("content") or ""
    return message["role"], content.strip() if isinstance(content, str) else content, calls


def _parsed(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments
