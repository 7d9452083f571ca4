"""One episode: an agent asks the model, as often as it likes, and its requests are answered by the trainer's engine."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trlx_hybrid.contract.conversation import Conversation, Limits, Message, RequestMaker
from trlx_hybrid.contract.conversation import Turn as TurnSize
from trlx_hybrid.contract.types import Completion
from trlx_hybrid.episodes.answers import described
from trlx_hybrid.errors import EngineError
from trlx_hybrid.interprocess.deadline import in_thread

from ..episode import Episode, rendered
from ..loop import CallTool, Generate, Outcome
from ..tokens import TemplateTokens
from ..tool_calls import LostCallError
from .asked import Said
from .errors import RefusedError
from .parsing import Parser
from .seat import CUT, Ended, Seat, Turn
from .server import Gateway

Agent = Callable[[str, Mapping[str, Any]], Any]
"""A coroutine function or a function of the base URL and the dataset's row; returns the reward, or None."""


@dataclass(slots=True, eq=False)
class Branch:
    """One conversation of an episode.

    Attributes:
        prompt_ids: token ids of the first request.
        conversation: all that was said after it.
        cut: whether the model's last message was cut, so that no token ends it.
    """

    prompt_ids: list[int]
    conversation: Conversation
    cut: bool = False


class AgentEpisode(Episode):
    """An episode of one row, whose agent asks the model over HTTP.

    Args:
        index: number of the row in this rank's batch.
        row: the dataset's row.
        prompt: messages of the row's prompt; used only where the agent never asks.
        agent: the agent.
        gateway: takes its requests.
        agents: the event loop of all agents.
        tokens: returns the encoder of prompts and observations, with the tools that the model is offered.
        parser: turns what was sampled into messages.
        limits: limits of tokens and turns.
        request: makes the engine's request for one turn.
        failed: called with the conversation if it breaks off; raises if too many have.
        overridden: called with the parameters of each request whose place the run's own settings take.
        branching: whether the episode may have several branches.

    Attributes:
        reward: the agent's reward; None where it gave none, or the episode broke off.
        branches: for each later branch, where it begins in the completion, and the number of its prompt's tokens.
        images: none; text only.
    """

    images: tuple[object, ...] = ()

    def __init__(
        self,
        index: int,
        row: Mapping[str, Any],
        prompt: list[Message],
        agent: Agent,
        gateway: Gateway,
        agents: asyncio.AbstractEventLoop,
        tokens: Callable[[Sequence[Mapping[str, Any]]], TemplateTokens],
        parser: Parser,
        limits: Limits,
        request: RequestMaker,
        failed: Callable[[Conversation], None],
        overridden: Callable[[Mapping[str, Any]], None],
        branching: bool,
    ) -> None:
        super().__init__(index, [], limits, request, failed)
        self.reward: float | None = None
        self.branches: list[tuple[int, int]] = []
        self._overridden = overridden
        self._branches: dict[int, Branch] = {}
        self._row, self._prompt, self._agent = row, prompt, agent
        self._gateway, self._agents, self._tokens, self._parser = gateway, agents, tokens, parser
        self._seat = Seat(gateway.loop, parser.count, branching=branching)

    def give_up(self) -> None:
        """Set `prompt_ids` to the row's prompt where the agent has not asked, and remove the reward."""
        self.reward = None
        self.prompt_ids = self.prompt_ids or self._tokens(()).prompt(self._prompt)

    async def run(self) -> None:
        """Play the whole episode, then end its agent."""
        secret, url = self._gateway.open(self._seat)
        end = self._start_agent(url)
        try:
            await super().run()
            if self.conversation.failure is None:
                self._join()
        finally:
            self._seat.end(RefusedError("The episode is over.", status=410))
            end()
            self._gateway.close(secret)

    def _start_agent(self, url: str) -> Callable[[], object]:
        """Start the agent: a coroutine on the event loop of all agents, a function in a thread of its own. Returns a
        function that ends it; one that runs in a thread cannot be ended."""
        if asyncio.iscoroutinefunction(self._agent):
            return asyncio.run_coroutine_threadsafe(self._await_agent(url), self._agents).cancel
        in_thread(functools.partial(self._call_agent, url), "trlx-hybrid-agent")
        return lambda: None

    async def _await_agent(self, url: str) -> None:
        try:
            self._rewarded(await self._agent(url, self._row))
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self._raised(error)

    def _call_agent(self, url: str) -> None:
        try:
            self._rewarded(self._agent(url, self._row))
        except BaseException as error:
            self._raised(error)

    def _rewarded(self, reward: Any) -> None:
        self._seat.ended(None if reward is None else float(reward))

    def _raised(self, error: BaseException) -> None:
        self._seat.ended(None, f"the agent raised {type(error).__name__}: {error}")

    async def play(self) -> None:
        """Answer the agent's requests until the agent has ended."""
        while True:
            event = await self._next()
            if isinstance(event, Ended):
                break
            await self._answered(event)
        if event.failure is not None:
            raise LostCallError(event.failure)
        if not self.conversation.turns:
            raise LostCallError("the agent has not asked the model.")
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
        """Sample the model's next message, and answer with it; refuse the request where there is no room."""
        asked = turn.asked
        if self._turns > self.limits.tool_turns:
            return  # it has been refused
        try:
            branch, room = self._branch(turn)
        except RefusedError as error:
            self._seat.refuse(turn, error)
            return
        if asked.max_tokens is not None:
            room = asked.max_tokens if room is None else min(room, asked.max_tokens)
        self._overridden(asked.overridden)
        conversation = branch.conversation
        context = [*branch.prompt_ids, *conversation.completion_ids]
        completion = await Generate(self._request(self._index, self._turns, context, None, room))
        stopped = self._parser.stopped(completion.token_ids, asked.stop)
        if stopped is not None:
            completion = first_tokens(completion, stopped[0])
        branch.cut = stopped is not None or completion.finish_reason == "length"
        conversation.sampled(completion)
        conversation.turns.append(TurnSize(prompt=len(context), sampled=len(completion.token_ids)))
        message = self._message(completion.token_ids, context, asked.tools)
        if stopped is not None:
            message["content"] = message["content"].partition(stopped[1])[0]
        conversation.messages.append(message)
        conversation.calls += 1
        said = Said(
            message=message,
            length=completion.finish_reason == "length",
            prompt_tokens=len(context),
            completion_tokens=len(completion.token_ids),
            stop=None if stopped is None else stopped[1],
        )
        self._seat.answer(turn, said)
        if self._turns > self.limits.tool_turns:
            self._seat.end(RefusedError("The episode has no further turns.", code=CUT))

    @property
    def _turns(self) -> int:
        """The number of turns of all branches."""
        return sum(len(branch.conversation.turns) for branch in self._branches.values())

    def _branch(self, turn: Turn) -> tuple[Branch, int | None]:
        """Show the model the new messages of a request. Returns the branch that they belong to, and how many tokens the
        model's next message may have; None for as many as the run allows.

        Raises:
            RefusedError: there is no room for a message.
        """
        if turn.asked.tools and not self._parser.finds_calls:
            raise RefusedError(
                "TRL knows no schema for this chat template, so tool calls could not be told from text. Set the "
                "tokenizer's response_schema.",
                parameter="tools",
            )
        tokens = self._tokens(turn.asked.tools)
        if turn.branch in self._branches:
            branch = self._branches[turn.branch]
            spoken = branch.conversation.completion_ids
            render = functools.partial(tokens.observation, cut=branch.cut)
            shown = rendered(render, list(turn.new), spoken[-1])
            room = self._room(len(shown), len(branch.prompt_ids) + len(spoken) + len(shown))
            branch.conversation.observed(shown)
            branch.conversation.turns[-1].observed = len(shown)
            branch.conversation.messages += turn.new
            return branch, room
        prompt = rendered(tokens.prompt, list(turn.asked.messages))
        if self._branches:
            left = self._room(len(prompt), len(prompt))
            self._branches[turn.branch] = Branch(prompt, Conversation(messages=list(turn.new)))
        else:
            left = None
            if len(prompt) >= self.limits.model_tokens:
                raise EngineError(
                    f"The first request of row {self._index}'s agent has {len(prompt)} tokens; the engine's context "
                    f"holds {self.limits.model_tokens}, prompt and completion together. Raise vllm_max_model_length."
                )
            self.prompt_ids = prompt
            self._branches[turn.branch] = Branch(prompt, self.conversation)
        return self._branches[turn.branch], left

    def _room(self, shown: int, context: int) -> int:
        """Return how many tokens of the row's completion are left for the model's next message.

        Args:
            shown: the number of tokens that the model is shown before it.
            context: the number of all tokens before it, in its branch.

        Raises:
            RefusedError: none is left.
        """
        branches = [*self._branches.values()]
        used = sum(len(branch.conversation.completion_ids) for branch in branches)
        used += sum(len(branch.prompt_ids) for branch in branches[1:])
        room = self.limits.completion_tokens - used - shown
        if room <= 0 or context >= self.limits.model_tokens:
            raise RefusedError(
                f"The conversation has {context} tokens with these messages, and no room for an answer.", code=CUT
            )
        return room

    def _join(self) -> None:
        """Put the later branches behind the first one, each with its prompt before it."""
        first = self.conversation
        for branch in [*self._branches.values()][1:]:
            spoken = branch.conversation
            if spoken.turns:
                self.branches.append((len(first.completion_ids), len(branch.prompt_ids)))
                first.observed(branch.prompt_ids)
                first.completion_ids += spoken.completion_ids
                first.loss_mask += spoken.loss_mask
                if first.logprobs is not None and spoken.logprobs is not None:
                    first.logprobs += spoken.logprobs
                first.messages += spoken.messages
                first.turns += spoken.turns
                first.calls += spoken.calls
                first.finish_reason = spoken.finish_reason

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
        finish_reason="stop",
    )
