"""An agent's request for a message, and the model's answer, in a form that no API has for itself."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]
"""A chat message, as transformers' chat templates take it."""

Raw = str | list[int]
"""A prompt without a chat template: a text, or token ids."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """One request for the model's next message.

    Attributes:
        messages: the conversation so far; none where it is `raw`.
        raw: the conversation so far as a prompt without a chat template; None where it consists of messages.
        tools: the tools that the model is offered, as JSON schemas.
        max_tokens: the largest number of tokens of the message; None for as many as the run allows.
        stop: texts at the first of which the message ends.
        choices: the number of messages that are asked for, each sampled by itself.
        logprobs: whether the answer lists the texts and log-probs of the sampled tokens.
        overridden: parameters of the request whose place the run's own settings take.
    """

    messages: Sequence[Message] = ()
    raw: Raw | None = None
    tools: Sequence[Mapping[str, Any]] = ()
    max_tokens: int | None = None
    stop: Sequence[str] = ()
    choices: int = 1
    logprobs: bool = False
    overridden: Mapping[str, Any] = field(default_factory=dict)

    @functools.cached_property
    def compared(self) -> list[Any]:
        """The conversation as a list whose beginnings are compared with what was said: of its messages, of the
        characters of a text, or of token ids."""
        if self.raw is not None:
            return [*self.raw]
        return [compared(message) for message in self.messages]

    def after(self, begun: int) -> Sequence[Message]:
        """Return what follows the first elements of `compared`, as messages. Of a prompt without a chat template, it is
        one message of the user's, whose content is a text or token ids."""
        if self.raw is None:
            return self.messages[begun:]
        return [{"role": "user", "content": self.raw[begun:]}]

    @property
    def form(self) -> list[Any]:
        """The parts that all requests of one conversation have in common: the tools, and how prompts are given."""
        return [type(self.raw).__name__, *self.tools]


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """The model's message, and how many tokens it took.

    Attributes:
        message: the message, with "tool_calls" where it has some.
        length: whether the message ended at a limit of tokens.
        stop: the text of `Asked.stop` at which the message ended, which is not part of it; None where it did not.
        prompt_ids, token_ids: the tokens before it, and its own.
        place: the number of its branch, and its number among the model's messages there.
        logprobs: text and log-prob of each of its tokens, after temperature; None where the request does not ask.
    """

    message: Message
    length: bool
    prompt_ids: Sequence[int]
    token_ids: Sequence[int]
    stop: str | None = None
    place: tuple[int, int] = (0, 0)
    logprobs: Sequence[tuple[str, float]] | None = None

    @property
    def prompt_tokens(self) -> int:
        """The number of tokens before it."""
        return len(self.prompt_ids)

    @property
    def completion_tokens(self) -> int:
        """The number of its tokens."""
        return len(self.token_ids)

    def compared(self, asked: Asked) -> list[Any]:
        """Return the message as the elements that follow those of a request's `Asked.compared`.

        A text without a chat template that ended at a `stop` gets a last element that no request has. A client would
        send the stop again, which is among the tokens already, so nothing can continue these.

        Args:
            asked: the request that it answers.
        """
        if asked.raw is None:
            return [compared(self.message)]
        if isinstance(asked.raw, list):
            return [*self.token_ids]
        return [*self.message["content"], *([] if self.stop is None else [None])]


def compared(message: Mapping[str, Any]) -> Any:
    """Return the parts of a message that are compared between two requests. Clients strip texts, leave out reasoning,
    and write the arguments of tool calls anew; none of that makes it another message."""
    calls = [
        (call["function"]["name"], _parsed(call["function"].get("arguments")))
        for call in message.get("tool_calls") or ()
    ]
    content = message.get("content") or ""
    parts = [_part(block) for block in content] if isinstance(content, list) else [content.strip()]
    return message["role"], parts, calls


def _part(block: Mapping[str, Any]) -> Any:
    """Return a block of a content as it is compared: a text, or an image's size and the hash of its pixels."""
    if block.get("type") != "image":
        return str(block.get("text", "")).strip()
    image = block["image"].convert("RGB")
    return [*image.size, hashlib.blake2b(image.tobytes(), digest_size=16).hexdigest()]


def _parsed(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments
