"""One trajectory: the model samples turns and tools or an environment answer, until the end or a limit is reached.

Source of every rule for tools: trl 1.16, `GRPOTrainer._tool_call_loop`. The length of a turn is limited in another way,
with the same tokens and less sampling. TRL lets each turn sample up to the whole completion budget, and then cuts the
turn to the budget that is left. Here the request for a turn has the budget that is left as its limit.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Awaitable, Callable

from trlx_hybrid.contract.conversation import Conversation, Dialogue, Limits, Message, RequestMaker, Turn, images_of
from trlx_hybrid.contract.types import Completion, Request
from trlx_hybrid.episodes.answers import described

from .loop import Generate, OutOfTimeError
from .tool_calls import LostCallError, run_calls
from .tools.runner import ToolRunner

logger = logging.getLogger(__name__)

_NOTHING: tuple[list[Message], list[int]] = ([], [])
"""The value of `ToolEpisode._early` while no tool messages have been rendered in advance: no messages, no token ids."""


class Episode:
    """One conversation, while it is played. Subclasses implement `play`: tools or an environment answer the model.

    Args:
        index: number of the row in this rank's batch.
        prompt_ids: the prompt's token ids; empty if they are known only after the episode has begun.
        limits: limits of tokens and turns.
        request: makes the engine's request for one turn.
        failed: called with the conversation if it breaks off; raises if too many have.
        generate: samples a request to its end.

    Attributes:
        conversation: the result, extended turn by turn.
    """

    def __init__(
        self,
        index: int,
        prompt_ids: list[int],
        limits: Limits,
        request: RequestMaker,
        failed: Callable[[Conversation], None],
        generate: Callable[[Request], Awaitable[Completion]] = Generate,
    ) -> None:
        self.conversation = Conversation()
        self.prompt_ids, self.limits = prompt_ids, limits
        self._index, self._request, self._failed, self._generate = index, request, failed, generate

    async def play(self) -> None:
        """Play the conversation to its end.

        Raises:
            LostCallError: the conversation breaks off.
        """
        raise NotImplementedError

    def give_up(self) -> None:
        """Clean up after the episode broke off. Subclasses may override this, and must leave `prompt_ids` not empty."""

    async def run(self) -> None:
        """Play the whole episode. If its time runs out after the first turn, the turns so far are kept.

        If it breaks off, `conversation` gets the reason as `failure` and a loss mask of zeros, and `failed` is called.
        """
        conversation = self.conversation
        try:
            try:
                await self.play()
            except OutOfTimeError:
                if not conversation.turns:
                    raise LostCallError("its time was over before the first turn was sampled.") from None
        except LostCallError as lost:
            conversation.failure = str(lost)
            self.give_up()
            if not conversation.turns:  # TRL needs a first turn of at least one token
                self.sampled(Completion(token_ids=[self.prompt_ids[-1]], logprobs=[[0.0]]), len(self.prompt_ids))
                conversation.messages.append({"role": "assistant", "content": ""})
            conversation.loss_mask = [0] * len(conversation.completion_ids)  # nothing is learned from it
            self._failed(conversation)

    async def sample(self, context: list[int], images: list[object] | None, room: int | None) -> Completion:
        """Sample the next turn, record it, and return it.

        Args:
            context: token ids of the prompt and of everything after it.
            images: images in the context, or None.
            room: the largest number of tokens of the turn; None for as many as the run allows.
        """
        turn = len(self.conversation.turns)
        completion = await self._generate(self._request(self._index, turn, context, images, room))
        self.sampled(completion, len(context))
        return completion

    def sampled(self, completion: Completion, prompt: int) -> None:
        """Record a turn that the model has sampled.

        Args:
            completion: the sampled turn.
            prompt: the number of tokens before it.
        """
        self.conversation.sampled(completion)
        self.conversation.turns.append(Turn(prompt=prompt, sampled=len(completion.token_ids)))

    def observed(self, ids: list[int], messages: list[Message]) -> None:
        """Record what the model is shown between two turns.

        Args:
            ids: what the model is shown, as token ids that are added to the context.
            messages: what the model is shown, as chat messages.
        """
        self.conversation.observed(ids)
        self.conversation.turns[-1].observed = len(ids)
        self.conversation.messages += messages


class ToolEpisode(Episode):
    """An episode of one row, in which the model calls tools and is shown their results.

    Args:
        index: number of the row in this rank's batch.
        dialogue: the row's prompt, its tools, and how messages are parsed and rendered.
        limits: limits of tokens and turns.
        request: makes the engine's request for one turn.
        runner: runs the tools.
        failed: called with the conversation if it breaks off; raises if too many have.
    """

    def __init__(
        self,
        index: int,
        dialogue: Dialogue,
        limits: Limits,
        request: RequestMaker,
        runner: ToolRunner,
        failed: Callable[[Conversation], None],
    ) -> None:
        super().__init__(index, dialogue.prompt_ids, limits, request, failed)
        self._dialogue, self._runner = dialogue, runner
        self._early = _NOTHING

    def give_up(self) -> None:
        """Take the row's environment out of use, because a call of one of its methods may still be running."""
        self._dialogue.discard()

    async def play(self) -> None:
        """Play until the model calls no tool, or a limit is reached. A conversation that has begun goes on: with the
        model's turn, or with the calls of its last message."""
        conversation, dialogue, limits = self.conversation, self._dialogue, self.limits
        calling = conversation.messages and conversation.messages[-1]["role"] == "assistant"
        message = conversation.messages[-1] if calling else await self._speak()
        while message.get("tool_calls") and len(conversation.turns) <= limits.tool_turns:
            try:
                answers = await run_calls(
                    message["tool_calls"], dialogue, conversation, self._runner, self._render_early
                )
            except (OutOfTimeError, GeneratorExit):  # GeneratorExit: the whole rollout ends early
                self.give_up()
                raise
            observed, images = self._rendered(answers)
            length = len(conversation.completion_ids) + len(observed)
            prompt = [*dialogue.prompt_ids, *conversation.completion_ids, *observed]
            if length > limits.completion_tokens or len(prompt) >= limits.model_tokens:
                return  # the answers are dropped, and the completion stays as it is
            self.observed(observed, answers)
            conversation.images += images
            if length == limits.completion_tokens:
                return  # TRL samples another turn and cuts all of it
            message = await self._speak()

    async def _speak(self) -> Message:
        """Sample one turn, and return it as an assistant's message; after the first turn, an empty dict if no token was
        sampled. The first turn may be sampled already, in `dialogue.first`, and may have as many tokens as the run
        allows."""
        conversation, dialogue, first = self.conversation, self._dialogue, not self.conversation.turns
        prompt = [*dialogue.prompt_ids, *conversation.completion_ids]
        room = None if first else self.limits.completion_tokens - len(conversation.completion_ids)
        if first and dialogue.first is not None:
            completion = dialogue.first
            self.sampled(completion, len(prompt))
        else:
            completion = await self.sample(prompt, [*(dialogue.images or []), *conversation.images] or None, room)
        if not first and not completion.token_ids:
            return {}
        message = self._parsed(completion.token_ids, prompt)
        conversation.messages.append(message)
        return message

    def _parsed(self, token_ids: list[int], prompt: list[int]) -> Message:
        """Return a turn as an assistant's message, with the tool calls in it.

        Where the parser raises, the message is plain text, because what the model sampled may have caused the error.

        Args:
            token_ids: the sampled tokens of the turn.
            prompt: all tokens before them.
        """
        try:
            return self._dialogue.parse(token_ids, prompt)
        except Exception as error:
            self.conversation.unparsed = described(error)
            return {"role": "assistant", "content": self._dialogue.decode(token_ids)}

    def _render_early(self, answers: list[Message]) -> None:
        """Render tool messages to token ids in the tool's thread, while the engine's thread takes steps, and store both
        in `_early`. `_rendered` then need not render these messages.

        Args:
            answers: the tool messages of one turn.
        """
        with contextlib.suppress(Exception):  # the engine's thread will then do it, and raise if need be
            self._early = answers, self._dialogue.observe(answers)

    def _rendered(self, answers: list[Message]) -> tuple[list[int], list[object]]:
        """Return the token ids that tool messages add to the context, and the images in them.

        Args:
            answers: the tool messages of one turn.

        Raises:
            LostCallError: the chat template cannot render what a tool returned.
        """
        (seen, ids), self._early = self._early, _NOTHING
        try:
            return ids if seen == answers else self._dialogue.observe(answers), images_of(answers)
        except Exception as error:
            names = ", ".join(repr(answer["name"]) for answer in answers)
            raise LostCallError(
                f"what {names} returned cannot be shown to the model: {type(error).__name__}: {error}."
            ) from error


def rendered(render: Callable[..., list[int]], *given: object) -> list[int]:
    """Return messages as token ids, rendered by a chat template.

    Args:
        render: renders them, such as `TemplateTokens.prompt`.
        given: its arguments.

    Raises:
        LostCallError: the template cannot render them.
    """
    try:
        return render(*given)
    except Exception as error:  # a template may raise anything
        raise LostCallError(
            f"its messages cannot be rendered by the chat template: {type(error).__name__}: {error}"
        ) from error


def broken(conversation: Conversation) -> None:
    """Warn that a conversation broke off."""
    logger.warning("A trajectory broke off and is masked: %s", conversation.failure)
