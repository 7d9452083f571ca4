"""Conversations with tools: what a trainer says about one, and what a rollout makes of it.

The trainer knows chat templates, tools and limits; the rollout knows clocks. They meet in this data.
"""

from __future__ import annotations

from asyncio import AbstractEventLoop
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..types import Completion, Request

if TYPE_CHECKING:  # numpy comes with it, and not with the host
    from ..support import Support

Message = dict[str, Any]
"""A chat message, as transformers' templates take it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Where a conversation ends, as in TRL.

    Attributes:
        completion_tokens: sampled and observed tokens together; one observation that leads beyond is dropped.
        model_tokens: an observation must leave prompt and completion shorter than this.
        tool_turns: how often tools are run.
    """

    completion_tokens: int
    model_tokens: int
    tool_turns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialogue:
    """One row of a batch, before its conversation.

    Attributes:
        prompt_ids: token ids of the rendered prompt.
        parse: from the sampled ids of one turn, and all ids before them, the assistant's message; its "tool_calls"
            are what to run. Called from the trainer's thread only, as `observe` is. Where it raises, the turn is plain
            text.
        decode: from the sampled ids of one turn, its text.
        observe: from the tool messages of one turn, the ids between the end of the turn that called and the next.
        sync_tools, async_tools: what may be called, by name; functions, and coroutine functions.
        run_tools: the synchronous tools of the whole run: of other rows' environments, too.
        images: of the prompt, or None.
        first: the first turn, where something else has sampled it.
        event_loop: where asynchronous tools run: the trainer's, so that clients they share with its reward functions
            keep working. None where it has none.
        environment: whose methods some of its tools are, or None.
        discard: a call of the environment never came back: it must not be used for another row.
    """

    prompt_ids: list[int]
    parse: Callable[[list[int], list[int]], Message]
    observe: Callable[[list[Message]], list[int]]
    sync_tools: Mapping[str, Callable[..., Any]]
    async_tools: Mapping[str, Callable[..., Any]]
    images: list[Any] | None = None
    run_tools: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    first: Completion | None = None
    event_loop: AbstractEventLoop | None = None
    environment: Any = None
    discard: Callable[[], None] = lambda: None
    decode: Callable[[list[int]], str] = lambda token_ids: ""


@dataclass(slots=True, kw_only=True)
class Turn:
    """One turn: what was sampled, and what came back for it.

    Attributes:
        sampled, observed: tokens.
        prompt: tokens before the sampled ones.
    """

    prompt: int
    sampled: int
    observed: int = 0


@dataclass(slots=True, kw_only=True)
class Conversation:
    """What became of a dialogue.

    Attributes:
        completion_ids: every token after the prompt.
        loss_mask: 1 where a token was sampled, 0 where it was observed; all 0 where the conversation failed.
        logprobs: of each token, 0.0 where it was observed; None where none were asked for.
        support: of each token the ids that it was sampled from, as far as completions say; None where none does.
        messages: what was said after the prompt, by the model and its tools.
        images: those that tools returned, or an environment showed after the prompt.
        turns: one entry per turn.
        calls, failed_calls: tool calls, and those among them that the model was shown an error for.
        mended_answers: answers of tools that the model was shown without the lone surrogates in them.
        unparsed: why the last turn is plain text: the exception of `Dialogue.parse`; None where it was parsed.
        failure: why the conversation broke off, or None.
        finish_reason: how the last turn ended, see `Completion`.
    """

    completion_ids: list[int] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    logprobs: list[float | None] | None = None
    support: Support | None = None
    messages: list[Message] = field(default_factory=list)
    images: list[Any] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    calls: int = 0
    failed_calls: int = 0
    mended_answers: int = 0
    unparsed: str | None = None
    failure: str | None = None
    finish_reason: str | None = None

    def sampled(self, completion: Completion) -> None:
        """Append what the model sampled."""
        self._go_on(completion.support, len(completion.token_ids))
        self.completion_ids += completion.token_ids
        self.finish_reason = completion.finish_reason
        self.loss_mask += [1] * len(completion.token_ids)
        if completion.logprobs is not None:
            self.logprobs = (self.logprobs or []) + [candidates[0] for candidates in completion.logprobs]

    def observed(self, token_ids: list[int]) -> None:
        """Append what the model was shown."""
        self._go_on(None, len(token_ids))
        self.completion_ids += token_ids
        self.loss_mask += [0] * len(token_ids)
        if self.logprobs is not None:
            self.logprobs += [0.0] * len(token_ids)

    def _go_on(self, support: Support | None, tokens: int) -> None:
        """Append the support of so many tokens; None where they have none."""
        known = self.support if support is None else support
        if known is None:
            return
        if self.support is None:
            self.support = known.unsampled(len(self.completion_ids), known.vocabulary)
        self.support += known.unsampled(tokens, known.vocabulary) if support is None else support


RequestMaker = Callable[[int, int, list[int], list[Any] | None, int | None], Request]
"""Makes the request of a row of this rank (by index) in a turn, which decide its seed; from the prompt's ids, its
images, and the most to sample, where that is less than the run's limit."""


def images_of(messages: Iterable[Message]) -> list[Any]:
    """Those among the content blocks of chat messages, in their order.

    Raises:
        KeyError: a block of an image has none.
    """
    return [
        part["image"]
        for message in messages
        if isinstance(message.get("content"), list)
        for part in message["content"]
        if isinstance(part, dict) and part.get("type") == "image"
    ]


def opening(prompt: list[Message], observation: str | list[Message] | None) -> list[Message]:
    """The prompt of an episode: the dataset's, and what `reset` showed."""
    if observation is None:
        return prompt
    if isinstance(observation, list):
        return [*prompt, *observation]
    last = prompt[-1]
    content = last["content"]
    if isinstance(content, list):
        return [*prompt[:-1], {**last, "content": [*content, {"type": "text", "text": observation}]}]
    return [*prompt[:-1], {**last, "content": content + observation}]
