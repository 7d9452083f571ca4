"""One trajectory: the model speaks and is answered, until nothing answers or a limit is reached.

Source of every rule for tools: trl 1.16, `GRPOTrainer._tool_call_loop`. One thing is cheaper here with the same result:
TRL lets each turn sample up to the whole completion budget and cuts the turn to the budget that is left; here the
budget that is left is the limit of the request.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from trlx_hybrid.answers import described
from trlx_hybrid.rollout.conversation import Conversation, Dialogue, Limits, Message, RequestMaker, Turn, images_of
from trlx_hybrid.types import Completion

from .loop import Generate, OutOfTimeError
from .tool_calls import LostCallError, run_calls
from .tools.runner import ToolRunner

_NOTHING: tuple[list[Message], list[int]] = ([], [])
"""The initial value of answers that were rendered early, with their ids."""


class Episode:
    """A conversation in progress. Subclasses implement `play`, which decides who answers the model.

    Args:
        index: row of this rank's batch.
        prompt_ids: the prompt's token ids; empty where they are known only once the episode has begun.
        limits: limits of tokens and turns.
        request: makes the engine's request for one turn.
        failed: called when the conversation breaks off; raises where too many have.
    """

    def __init__(
        self,
        index: int,
        prompt_ids: list[int],
        limits: Limits,
        request: RequestMaker,
        failed: Callable[[Conversation], None],
    ) -> None:
        self.conversation = Conversation()
        self.prompt_ids, self.limits = prompt_ids, limits
        self._index, self._request, self._failed = index, request, failed

    async def play(self) -> None:
        """Play the conversation to its end.

        Raises:
            LostCallError: the conversation breaks off.
        """
        raise NotImplementedError

    def give_up(self) -> None:
        """Clean up after the episode broke off. `prompt_ids` must be set afterwards."""

    async def run(self) -> None:
        """Play the whole episode. If time runs out after the first turn, the turns so far are kept."""
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

    async def sample(self, context: list[int], images: list[Any] | None, room: int | None) -> Completion:
        """Sample the next turn, of at most `room` tokens; None for as many as the run allows."""
        turn = len(self.conversation.turns)
        completion = await Generate(self._request(self._index, turn, context, images, room))
        self.sampled(completion, len(context))
        return completion

    def sampled(self, completion: Completion, prompt: int) -> None:
        """Record a sampled turn, whose context had `prompt` tokens."""
        self.conversation.sampled(completion)
        self.conversation.turns.append(Turn(prompt=prompt, sampled=len(completion.token_ids)))

    def observed(self, ids: list[int], messages: list[Message]) -> None:
        """Record the token ids and the messages that the model is shown."""
        self.conversation.observed(ids)
        self.conversation.turns[-1].observed = len(ids)
        self.conversation.messages += messages


class ToolEpisode(Episode):
    """A dialogue in which the tools that the model calls answer it."""

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
        """Discard the environment, because a call of it may still run."""
        self._dialogue.discard()

    async def play(self) -> None:
        """Play until the model calls no tool, or a limit is reached."""
        conversation, dialogue, limits = self.conversation, self._dialogue, self.limits
        message = await self._speak(dialogue.prompt_ids, None)
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
            message = await self._speak(prompt, limits.completion_tokens - length)

    async def _speak(self, prompt: list[int], room: int | None) -> Message:
        """Sample one turn and return its message, empty where nothing was sampled."""
        conversation, dialogue, first = self.conversation, self._dialogue, not self.conversation.turns
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
        """Return the message of a turn; plain text where the parser raises: the model may have caused the error."""
        try:
            return self._dialogue.parse(token_ids, prompt)
        except Exception as error:
            self.conversation.unparsed = described(error)
            return {"role": "assistant", "content": self._dialogue.decode(token_ids)}

    def _render_early(self, answers: list[Message]) -> None:
        """Render tools' answers in the thread of the tool that gave them, so that the engine's thread need not."""
        with contextlib.suppress(Exception):  # the engine's thread will then do it, and raise if need be
            self._early = answers, self._dialogue.observe(answers)

    def _rendered(self, answers: list[Message]) -> tuple[list[int], list[Any]]:
        """Return token ids and images of tools' answers.

        Raises:
            LostCallError: the chat template cannot render a tool's text or blocks.
        """
        (seen, ids), self._early = self._early, _NOTHING
        try:
            return ids if seen == answers else self._dialogue.observe(answers), images_of(answers)
        except Exception as error:
            names = ", ".join(repr(answer["name"]) for answer in answers)
            raise LostCallError(
                f"what {names} returned cannot be shown to the model: {type(error).__name__}: {error}."
            ) from error
