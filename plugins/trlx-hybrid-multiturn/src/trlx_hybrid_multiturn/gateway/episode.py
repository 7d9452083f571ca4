"""One episode: an agent asks the model, as often as it likes, and its requests are answered by the trainer's engine."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trlx_hybrid.contract.conversation import Conversation, Limits, Message, RequestMaker, images_of
from trlx_hybrid.contract.types import Completion, Request
from trlx_hybrid.episodes.answers import described
from trlx_hybrid.errors import EngineError

from ..episode import Episode, rendered
from ..loop import CallTool, Outcome, Start
from ..tokens import TemplateTokens
from ..tool_calls import LostCallError
from .asked import Asked, Said
from .branch import Branch, joined
from .errors import RefusedError
from .host import Begun, Host
from .parsing import Parser
from .seat import CUT, Answers, Ended, Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """The tokens that the model is shown for a request.

    Attributes:
        branch: the branch that it continues; None where it begins one.
        context: token ids of all that the model is shown.
        new: the tokens that the request adds to the row's completion, and that are not sampled.
    """

    branch: Branch | None
    context: list[int]
    new: list[int]


class AgentEpisode(Episode):
    """An episode of one row, whose agent asks the model over HTTP.

    Args:
        index: number of the row in this rank's batch.
        row: the dataset's row.
        prompt: messages of the row's prompt.
        host: runs its agent, and takes the agent's requests.
        tokens: returns the encoder of prompts and observations, with the tools that the model is offered.
        parser: turns what was sampled into messages.
        limits: limits of tokens and turns.
        request: makes the engine's request for one turn.
        failed: called with the conversation if it breaks off; raises if too many have.
        overridden: called with the parameters of each request whose place the run's own settings take.
        branching: whether the episode may have several branches.
        logprobs: whether the run samples with log-probs.
        sees_images: whether the model takes images. An episode then has one branch.
        generate: samples a request to its end.

    Attributes:
        reward: the agent's reward; None where it gave none, or the episode broke off.
        branches: for each later branch, where it begins in the completion, and the number of its prompt's tokens.
        images: the images of the prompt and of all that the model was shown after it.
    """

    def __init__(
        self,
        index: int,
        row: Mapping[str, Any],
        prompt: list[Message],
        host: Host,
        tokens: Callable[[Sequence[Mapping[str, Any]]], TemplateTokens],
        parser: Parser,
        limits: Limits,
        request: RequestMaker,
        failed: Callable[[Conversation], None],
        overridden: Callable[[Mapping[str, Any]], None],
        branching: bool,
        logprobs: bool,
        sees_images: bool,
        generate: Callable[[Request], Awaitable[Completion]],
    ) -> None:
        super().__init__(index, [], limits, request, failed, generate)
        self.reward: float | None = None
        self.branches: list[tuple[int, int]] = []
        self.images: list[object] = []
        self._images: dict[tuple[int, int], list[object]] = {}  # before each message of the model, by `Said.place`
        self._overridden, self._logprobs, self._sees_images = overridden, logprobs, sees_images
        self._branches: dict[int, Branch] = {}  # those in which the model has spoken, by their numbers
        self._first: int | None = None  # the number of the branch whose prompt is the row's
        self._open = 0  # requests that are being sampled
        self._promised = 0  # the tokens that these add and do not sample
        self._row, self._prompt, self._host, self._tokens, self._parser = row, prompt, host, tokens, parser
        self._branching = branching
        self._seat: Answers

    def give_up(self) -> None:
        """Set `prompt_ids` and `images` to those of the row's prompt where the agent has not asked, and remove the
        reward."""
        self.reward = None
        if not self.prompt_ids:
            self.prompt_ids, self.images = self._tokens(()).prompt(self._prompt), images_of(self._prompt)

    async def run(self) -> None:
        """Play the whole episode, then end its agent."""
        begun = Begun(self._row, self._prompt, self._branching, self._parser.count)
        self._seat = self._host.begin(begun)
        try:
            await super().run()
        finally:
            self._host.end(self._seat)

    async def play(self) -> None:
        """Answer the agent's requests, several at a time, until the agent has ended."""
        try:
            while isinstance(event := await self._next(), Turn):
                await Start(self._answered(event))
        finally:
            branches = [branch.until_heard(self._seat.heard) for branch in self._branches.values()]
            if heard := [branch for branch in branches if branch is not None]:
                self.prompt_ids, self.branches = joined(heard, self.conversation)
                self.images = self._images[heard[0].number, len(heard[0].ends) - 1]  # there is one branch, or no image
        if event.failure is not None:
            raise LostCallError(event.failure)
        if not heard:
            raise LostCallError("the agent has not asked the model, or has not waited for an answer.")
        self.reward = event.reward

    async def _next(self) -> Turn | Ended:
        def start(report: Callable[[Outcome], None]) -> Callable[[str], None]:
            self._seat.take(lambda event: report(Outcome(value=event)))
            return lambda reason: None  # `run` ends the agent

        outcome: Outcome = await CallTool("agent", start)
        if outcome.lost is not None:
            raise LostCallError(outcome.lost)
        event: Turn | Ended = outcome.value
        return event

    async def _answered(self, turn: Turn) -> None:
        """Sample the model's next message, and answer with it; refuse the request where there is no room.

        Requests that are open at a time share the room. The message that ends when it is used up is cut."""
        asked = turn.asked
        try:
            opened = self._opened(turn)
            room = self._room(opened)
            if asked.max_tokens is not None:
                room = asked.max_tokens if room is None else min(room, asked.max_tokens)
            self._overridden(asked.overridden)
            images = images_of(asked.messages)
            request = self._request(self._index, turn.place.draw, opened.context, images or None, room)
            self._open, self._promised = self._open + 1, self._promised + len(opened.new)
            try:
                completion = await self._generate(request)
            finally:
                self._open, self._promised = self._open - 1, self._promised - len(opened.new)
            left = self._room(opened)
            if left is not None and len(completion.token_ids) > left:
                completion = dataclasses.replace(first_tokens(completion, left), finish_reason="length")
            self._seat.answer(turn, self._said(turn, opened, completion))
        except RefusedError as error:
            self._seat.refuse(turn, error)
        except LostCallError as lost:
            self._seat.ended(None, str(lost))
        if self._turns > self.limits.tool_turns:
            self._seat.end(RefusedError("The episode has no further turns.", code=CUT))

    def _said(self, turn: Turn, opened: Opened, completion: Completion) -> Said:
        """Record the model's message, and return it as an answer."""
        asked, context = turn.asked, opened.context
        stopped = self._parser.stopped(completion.token_ids, asked.stop)
        if stopped is not None:
            completion = first_tokens(completion, stopped[0])
        if asked.raw is None:
            message = self._message(completion.token_ids, context, asked.tools)
        else:
            message = {"role": "assistant", "content": self._parser.text(completion.token_ids, context)}
        if stopped is not None:
            message["content"] = message["content"].partition(stopped[1])[0]
        branch = opened.branch
        if branch is None:
            number = turn.place.branch
            branch = self._branches[number] = Branch(number, context, list(turn.place.new))
        else:
            branch.shown(opened.new, turn.place.new)
        cut = stopped is not None or completion.finish_reason == "length"
        branch.said(completion, len(context), message, cut)
        place = branch.number, len(branch.ends) - 1
        self._images[place] = images_of(asked.messages)
        return Said(
            message=message,
            length=completion.finish_reason == "length",
            prompt_ids=context,
            token_ids=completion.token_ids,
            stop=None if stopped is None else stopped[1],
            place=place,
            logprobs=self._parser.listed(completion) if asked.logprobs else None,
        )

    @property
    def _turns(self) -> int:
        """The number of turns of all branches."""
        return sum(len(branch.ends) for branch in self._branches.values())

    def _opened(self, turn: Turn) -> Opened:
        """Return what the model is shown for a request.

        Raises:
            RefusedError: the episode has no turn left, tools cannot be told from text, or the run has no log-probs.
        """
        asked, place = turn.asked, turn.place
        if asked.logprobs and not self._logprobs:
            raise RefusedError("This run samples without log-probs.", parameter="logprobs")
        if self._turns + self._open > self.limits.tool_turns:
            raise RefusedError("The episode has no further turns.", code=CUT)
        if images_of(asked.messages) and not self._sees_images:
            raise RefusedError("This run's model takes no images.", parameter="messages")
        if asked.tools and not self._parser.finds_calls:
            raise RefusedError(
                "TRL knows no schema for this chat template, so tool calls could not be told from text. Set the "
                "tokenizer's response_schema.",
                parameter="tools",
            )
        if place.after is None:
            prompt = self._prompt_of(asked)
            if self._first is None:
                self._first = place.branch
            first = place.branch == self._first
            if first and len(prompt) >= self.limits.model_tokens:
                raise EngineError(
                    f"The first request of row {self._index}'s agent has {len(prompt)} tokens; the engine's context "
                    f"holds {self.limits.model_tokens}, prompt and completion together. Raise vllm_max_model_length."
                )
            return Opened(branch=None, context=prompt, new=[] if first else prompt)
        number, spoken = place.after
        before, cut = self._branches[number].until(spoken)
        if asked.raw is None:
            render = functools.partial(self._tokens(asked.tools).observation, cut=cut)
            shown = rendered(render, list(place.new), before[-1])
        else:
            shown = self._parser.ids(place.new[0]["content"], begins=False)
        if number == place.branch:
            return Opened(branch=self._branches[number], context=[*before, *shown], new=shown)
        return Opened(branch=None, context=[*before, *shown], new=[*before, *shown])

    def _prompt_of(self, asked: Asked) -> list[int]:
        """Return the token ids of a request that begins a conversation."""
        if asked.raw is None:
            return rendered(self._tokens(asked.tools).prompt, list(asked.messages))
        return self._parser.ids(asked.raw, begins=True)

    def _room(self, opened: Opened) -> int | None:
        """Return how many tokens of the row's completion are left for the model's next message; None for as many as the
        run allows.

        Args:
            opened: what the model is shown before it.

        Raises:
            RefusedError: none is left.
        """
        if not self._branches and not opened.new:
            return None
        used = self._promised + len(opened.new)
        for branch in self._branches.values():
            used += len(branch.conversation.completion_ids)
            used += 0 if branch.number == self._first else len(branch.prompt_ids)
        room, context = self.limits.completion_tokens - used, len(opened.context)
        if room <= 0 or context >= self.limits.model_tokens:
            raise RefusedError(
                f"The conversation has {context} tokens with these messages, and no room for an answer.", code=CUT
            )
        return room

    def _message(self, token_ids: list[int], context: list[int], tools: Sequence[Mapping[str, Any]]) -> Message:
        """Return a turn as a message. It is plain text where the parser raises, because what the model sampled may have
        caused the error."""
        try:
            return self._parser.message(token_ids, context, tools)
        except Exception as error:
            self.conversation.unparsed = described(error)
            return self._parser.message(token_ids, context, ())


def first_tokens(completion: Completion, tokens: int) -> Completion:
    """Return the first tokens of a completion, as one that ended there."""
    return dataclasses.replace(
        completion,
        token_ids=completion.token_ids[:tokens],
        logprobs=completion.logprobs and completion.logprobs[:tokens],
        logprob_token_ids=completion.logprob_token_ids and completion.logprob_token_ids[:tokens],
        support=None if completion.support is None else completion.support[:tokens],
        weight_versions=completion.weight_versions and completion.weight_versions[:tokens],
        finish_reason="stop",
    )
