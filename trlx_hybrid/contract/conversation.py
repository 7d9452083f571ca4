"""Data types for conversations with tools: what the trainer gives a rollout for each row, and what the rollout returns.

The trainer knows chat templates, tools and limits; the rollout decides when each turn is sampled and each tool is run.
These types are the interface between them.
"""

from __future__ import annotations

from asyncio import AbstractEventLoop
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from .types import Completion, Request

if TYPE_CHECKING:  # it imports numpy, which the host does not need
    from .support import Support

Message = dict[str, Any]
"""A chat message, as transformers' templates take it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits at which a conversation ends, as in TRL.

    Attributes:
        completion_tokens: largest number of tokens after the prompt, sampled by the model or observed (tool results);
            an observation that exceeds it is dropped.
        model_tokens: the model's context length; after an observation, prompt and completion must be shorter than this.
        tool_turns: largest number of turns in which tools are run.
    """

    completion_tokens: int
    model_tokens: int
    tool_turns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialogue:
    """The input of one conversation: the prompt of one row of a batch, its tools, and functions that parse and render
    turns.

    Attributes:
        prompt_ids: token ids of the rendered prompt.
        parse: takes the sampled ids of one turn, and all ids before them; returns the assistant's message, whose
            "tool_calls" are to be run. Called from the trainer's thread only, as is `observe`. Where it raises, the
            turn counts as plain text without tool calls.
        decode: takes the sampled ids of one turn; returns its text.
        observe: takes the tool messages of one turn; returns the token ids that follow the turn: the rendered messages,
            up to where the model's next turn begins.
        sync_tools, async_tools: the tools that may be called, by name: functions, and coroutine functions.
        run_tools: the synchronous tools of all rows of the run by name, including those of other rows' environments.
        images: images of the prompt, or None.
        first: the completion of the first turn, where it is sampled already.
        event_loop: the loop that runs asynchronous tools. It is the trainer's own, because a client that tools share
            with reward functions works in one loop only. None where the trainer has no event loop.
        environment: the environment whose methods are among the tools, or None.
        discard: a function to call if a call of the environment never returned, so that no other row uses the
            environment.
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
    """The token counts of one turn.

    Attributes:
        prompt: number of tokens before the turn.
        sampled: number of tokens that the model sampled.
        observed: number of tokens that the model was shown after that (tool results).
    """

    prompt: int
    sampled: int
    observed: int = 0


@dataclass(slots=True, kw_only=True)
class Conversation:
    """The result of running a dialogue to its end: its tokens, messages and counts.

    Attributes:
        completion_ids: every token after the prompt.
        loss_mask: 1 where a token was sampled, 0 where it was observed; all 0 where the conversation failed.
        logprobs: log-prob of each token, 0.0 where it was observed; None where none were asked for.
        support: the ids from which each token was sampled (`Completion.support`); None where no completion lists them.
        messages: messages after the prompt, of the model and its tools.
        images: images that tools returned, or that an environment showed after the prompt.
        turns: one entry per turn.
        calls, failed_calls: number of tool calls, and number of those whose result was an error.
        mended_answers: number of tool answers from which lone surrogates were removed before the model saw them.
        unparsed: why the last turn is plain text: the exception of `Dialogue.parse`; None where the turn was parsed.
        failure: why the conversation broke off, or None.
        finish_reason: how the last turn ended, see `Completion`.
        weight_versions: the version of the weights that sampled each token; observed tokens have that of the token
            before them. Empty where one version sampled all.
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
    weight_versions: list[int] = field(default_factory=list)

    def sampled(self, completion: Completion) -> None:
        """Append a completion that the model sampled."""
        self._go_on(completion.support, len(completion.token_ids))
        self.completion_ids += completion.token_ids
        self.finish_reason = completion.finish_reason
        self.loss_mask += [1] * len(completion.token_ids)
        self.weight_versions += completion.weight_versions or []
        if completion.logprobs is not None:
            self.logprobs = (self.logprobs or []) + [candidates[0] for candidates in completion.logprobs]

    def observed(self, token_ids: list[int]) -> None:
        """Append tokens that the model was shown and did not sample, such as tool results."""
        self._go_on(None, len(token_ids))
        self.completion_ids += token_ids
        self.loss_mask += [0] * len(token_ids)
        self.weight_versions += self.weight_versions[-1:] * len(token_ids)
        if self.logprobs is not None:
            self.logprobs += [0.0] * len(token_ids)

    def _go_on(self, support: Support | None, tokens: int) -> None:
        """Append to `self.support` (for each token, the ids that it could be sampled from) the support of the next
        tokens.

        Args:
            support: the support of these tokens; None where they were not sampled, or their support is not known.
            tokens: the number of these tokens.
        """
        known = self.support if support is None else support
        if known is None:
            return
        if self.support is None:
            self.support = known.unsampled(len(self.completion_ids), known.vocabulary)
        self.support += known.unsampled(tokens, known.vocabulary) if support is None else support


@dataclass(slots=True, eq=False)
class PooledRow:
    """One completion that is sampled in one or several rollouts, finished or not.

    Attributes:
        token_ids, logprobs: the sampled tokens, and their log-probs.
        versions: for each token, the version of the weights that sampled it.
        rollouts: the number of rollouts in which it was sampled.
        finish_reason: why it ended ("stop" or "length"); None until then.
    """

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    rollouts: int = 0
    finish_reason: str | None = None

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> PooledRow:
        """Return the row that a checkpoint holds as plain data."""
        return cls(**state)

    @property
    def over(self) -> bool:
        """True where it has ended."""
        return self.finish_reason is not None

    @property
    def tokens(self) -> int:
        """The number of its tokens so far, without the prompt."""
        return len(self.token_ids)

    def extend(self, sampled: Completion, version: int) -> None:
        """Append the tokens that one rollout has sampled.

        Args:
            sampled: these tokens with their log-probs; its `finish_reason` is None if the row is interrupted.
            version: the version of the weights that sampled them.
        """
        self.token_ids += sampled.token_ids
        self.logprobs += [of_token[0] for of_token in sampled.logprobs or [[None]] * len(sampled.token_ids)]
        self.versions += [version] * len(sampled.token_ids)
        self.finish_reason = sampled.finish_reason
        self.rollouts += 1

    def completion(self) -> Completion:
        """Return all of its tokens as one completion."""
        return Completion(
            token_ids=self.token_ids,
            logprobs=[[logprob] for logprob in self.logprobs],
            logprob_token_ids=[[token] for token in self.token_ids],
            finish_reason=self.finish_reason,
            weight_versions=self.versions,
        )


@dataclass(slots=True, eq=False)
class PooledConversation:
    """One conversation that is played in one or several rollouts, over or not, with all that is needed to go on.

    Attributes:
        conversation: the conversation so far, without the turn that is being sampled.
        turn: the turn that is being sampled.
        requests: the number of requests by which it was sampled: of turns, and of the parts of turns that were
            interrupted. Seeds are made from it.
        counts: the numbers of calls, of failed calls and of mended answers before the calls that are being made. Where
            the conversation goes on in another process, it counts from these, and these calls are made again.
        seconds: wall time of its rollouts so far, in seconds; tools may have worked for longer.
        over: whether it has ended.
    """

    conversation: Conversation = field(default_factory=Conversation)
    turn: PooledRow = field(default_factory=PooledRow)
    requests: int = 0
    counts: tuple[int, int, int] = (0, 0, 0)
    seconds: float = 0.0
    over: bool = False

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> PooledConversation:
        """Return the conversation that a checkpoint holds as plain data."""
        conversation, turn = _restored(state["conversation"]), PooledRow(**state["turn"])
        return cls(**{**state, "conversation": conversation, "turn": turn})

    @property
    def tokens(self) -> int:
        """The number of its tokens so far, without the prompt."""
        return len(self.conversation.completion_ids) + self.turn.tokens


@dataclass(slots=True, eq=False)
class PooledEpisode:
    """One episode of a `rollout_func` that is played in one or several rollouts. What its environment or agent knows is
    in this process only, so a checkpoint keeps the episodes that are over, and the others begin anew.

    Attributes:
        prompt_ids: token ids of its prompt; empty until it is over.
        conversation: what was said; None until it is over.
        reward: the reward of its environment or agent; None where there is none.
        branches: for each later branch, where it begins in the completion, and the number of its prompt's tokens.
        sampled: the number of tokens that were sampled so far.
        seconds: wall time of its rollouts so far, in seconds.
    """

    prompt_ids: list[int] = field(default_factory=list)
    conversation: Conversation | None = None
    reward: float | None = None
    branches: list[tuple[int, int]] = field(default_factory=list)
    sampled: int = 0
    seconds: float = 0.0

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> PooledEpisode:
        """Return the episode that a checkpoint holds as plain data, if it is over; else one that begins."""
        if state["conversation"] is None:
            return cls()
        return cls(**{**state, "conversation": _restored(state["conversation"])})

    @property
    def over(self) -> bool:
        """True where it has ended."""
        return self.conversation is not None

    @property
    def tokens(self) -> int:
        """The number of tokens that were sampled so far."""
        return self.sampled


def _restored(state: Mapping[str, Any]) -> Conversation:
    """Return the conversation that a checkpoint holds as plain data."""
    return Conversation(**{**state, "turns": [Turn(**turn) for turn in state["turns"]]})


PooledT = TypeVar("PooledT")
"""The class of a pool's rows."""


class RowPool(Protocol[PooledT]):
    """The rows of this rank that stay in flight over several rollouts. The object is the same in all rollouts of a
    training run, and another one in the next."""

    @property
    def in_flight(self) -> int:
        """The number of rows that are played at a time, those that wait for tools included."""

    @property
    def version(self) -> int:
        """The version of the weights that sample in this rollout."""

    @property
    def goes_on(self) -> bool:
        """True where the engine works while the trainer trains. Then a rollout leaves its unfinished requests to the
        engine, until `Rollout.interrupt` is called."""

    def unfinished(self) -> Sequence[PooledT]:
        """Return the rows that are not over, in the order in which they are to be played."""

    def begin(self) -> Sequence[PooledT]:
        """Begin the rows of the next prompt, and return them; none where no further ones may begin in this rollout."""

    def request(self, row: PooledT) -> RequestMaker:
        """Return a function that makes the engine's requests for a row. For a conversation, it has one seed for each
        value of `PooledConversation.requests`; for an episode, one for each turn."""

    def batch(self) -> Sequence[PooledT] | None:
        """Return the rows of the batch, all over; None where the rollout has to go on. They may be others when further
        rows are over. Those of the moment at which the rollout ends are trained."""


class ConversationPool(RowPool[PooledConversation], Protocol):
    """The conversations of this rank that stay in flight, as a rollout component sees them in `Rollout.play`."""

    @property
    def limits(self) -> Limits:
        """The limits of each conversation."""

    def dialogue(self, row: PooledConversation) -> Dialogue:
        """Return the prompt and the tools of a conversation, for this rollout."""


class EpisodePool(RowPool[PooledEpisode], Protocol):
    """The episodes of this rank that stay in flight, as a `rollout_func` sees them in its method `play`."""

    def given(self, row: PooledEpisode) -> tuple[int, dict[str, Any]]:
        """Return an episode's number in the run, and a copy of its row of the dataset, which has a prompt."""


RequestMaker = Callable[[int, int, list[int], list[Any] | None, int | None], Request]
"""A function that makes the engine's request for one turn. Its arguments: the row's index on this rank; the number of
the turn, which together with the row determines the seed; the ids of the prompt; its images; and the largest number of
tokens to sample, where that is less than the run's limit."""


def images_of(messages: Iterable[Message]) -> list[Any]:
    """Return the images in the content blocks of chat messages, in order.

    Raises:
        KeyError: an image block has no image.
    """
    return [
        part["image"]
        for message in messages
        if isinstance(message.get("content"), list)
        for part in message["content"]
        if isinstance(part, dict) and part.get("type") == "image"
    ]


def opening(prompt: list[Message], observation: str | list[Message] | None) -> list[Message]:
    """Return the first messages of an episode: the dataset's prompt and what the environment's `reset` returned.

    Args:
        prompt: the messages of the dataset's row.
        observation: what `reset` returned: messages, which follow the prompt's; a text, which is added to the last
            message of the prompt; or None, which adds nothing.
    """
    if observation is None:
        return prompt
    if isinstance(observation, list):
        return [*prompt, *observation]
    last = prompt[-1]
    content = last["content"]
    if isinstance(content, list):
        return [*prompt[:-1], {**last, "content": [*content, {"type": "text", "text": observation}]}]
    return [*prompt[:-1], {**last, "content": content + observation}]
