"""One trajectory with tools: the model speaks, its tools answer, until it calls none or a limit is reached.

Source of every rule: trl 1.16, `GRPOTrainer._tool_call_loop`. One thing is cheaper here with the same result: TRL lets
each turn sample up to the whole completion budget and cuts it to what is left; here what is left is the limit.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

from trlx_hybrid.rollout.conversation import Conversation, Dialogue, Limits, Message, RequestMaker, Turn
from trlx_hybrid.types import Completion

from .calls import LostCallError, run_calls
from .runners import Runners
from .waits import OutOfTimeError, Sampling

_NOTHING: tuple[list[Message], list[int]] = ([], [])
"""Answers that were rendered ahead, and their ids."""


class Episode:
    """A dialogue, and the conversation that comes of it.

    Args:
        index: row of this rank's batch.
        failed: called when the conversation breaks off; raises where too many have.
    """

    def __init__(
        self,
        index: int,
        dialogue: Dialogue,
        limits: Limits,
        request: RequestMaker,
        runners: Runners,
        failed: Callable[[Conversation], None],
    ) -> None:
        self.conversation = Conversation()
        self._index, self._dialogue, self._limits = index, dialogue, limits
        self._request, self._runners, self._failed = request, runners, failed
        self._ahead = _NOTHING

    async def run(self) -> None:
        """The whole trajectory. Ends well where time runs out after the first turn: what there is by then is kept."""
        conversation = self.conversation
        try:
            try:
                await self._converse()
            except OutOfTimeError:
                if not conversation.turns:
                    raise LostCallError("its time was over before the first turn was sampled.") from None
        except LostCallError as lost:
            conversation.failure = str(lost)
            self._dialogue.discard()
            self._mask()
            self._failed(conversation)

    async def _converse(self) -> None:
        conversation, dialogue, limits = self.conversation, self._dialogue, self._limits
        message = await self._sample(dialogue.prompt_ids, None)
        while message.get("tool_calls") and len(conversation.turns) <= limits.tool_turns:
            started = time.perf_counter()
            try:
                answers = await run_calls(
                    message["tool_calls"], dialogue, conversation, self._runners, self._look_ahead
                )
            except OutOfTimeError:
                dialogue.discard()  # a call of it may still run
                raise
            finally:
                conversation.turns[-1].tool_seconds = time.perf_counter() - started
            observed, images = self._observe(answers)
            length = len(conversation.completion_ids) + len(observed)
            prompt = [*dialogue.prompt_ids, *conversation.completion_ids, *observed]
            if length > limits.completion_tokens or len(prompt) >= limits.model_tokens:
                return  # the answers are dropped, and the completion stays as it is
            conversation.observed(observed)
            conversation.turns[-1].observed = len(observed)
            conversation.messages += answers
            conversation.images += images
            if length == limits.completion_tokens:
                return  # TRL samples another turn and cuts all of it
            message = await self._sample(prompt, limits.completion_tokens - length)

    def _look_ahead(self, answers: list[Message]) -> None:
        """Render answers in the thread of the tool that gave them: the engine's thread need not do it then."""
        with contextlib.suppress(Exception):  # it will be done there, and raise there if it must
            self._ahead = answers, self._dialogue.observe(answers)

    def _observe(self, answers: list[Message]) -> tuple[list[int], list[object]]:
        """Ids and images of what tools answered. A tool's text or blocks can be such that no template takes them."""
        (seen, ids), self._ahead = self._ahead, _NOTHING
        try:
            return ids if seen == answers else self._dialogue.observe(answers), _images(answers)
        except Exception as error:
            names = ", ".join(repr(answer["name"]) for answer in answers)
            raise LostCallError(
                f"what {names} returned cannot be shown to the model: {type(error).__name__}: {error}."
            ) from error

    async def _sample(self, prompt: list[int], room: int | None) -> Message:
        """One turn; its message, empty where nothing was sampled."""
        conversation, turn = self.conversation, len(self.conversation.turns)
        images = [*(self._dialogue.images or []), *conversation.images] or None
        started = time.perf_counter()
        completion = self._dialogue.first if turn == 0 else None
        if completion is None:
            completion = await Sampling(self._request(self._index, turn, prompt, images, room))
        conversation.sampled(completion)
        seconds, sampled = time.perf_counter() - started, len(completion.token_ids)
        conversation.turns.append(Turn(prompt=len(prompt), sampled=sampled, sampling_seconds=seconds))
        if turn > 0 and not completion.token_ids:
            return {}
        message = self._dialogue.parse(completion.token_ids, prompt)
        conversation.messages.append(message)
        return message

    def _mask(self) -> None:
        """Nothing is learned from a conversation that broke off. TRL needs a first turn of at least one token."""
        conversation = self.conversation
        if not conversation.turns:
            placeholder = self._dialogue.prompt_ids[-1]
            conversation.sampled(Completion(token_ids=[placeholder], logprobs=[[0.0]]))
            conversation.turns.append(Turn(prompt=len(self._dialogue.prompt_ids), sampled=1, sampling_seconds=0.0))
            conversation.messages.append({"role": "assistant", "content": ""})
        conversation.loss_mask = [0] * len(conversation.completion_ids)


def _images(messages: list[Message]) -> list[object]:
    """Images among the content blocks that tools returned."""
    return [
        part["image"]
        for message in messages
        if isinstance(message["content"], list)
        for part in message["content"]
        if isinstance(part, dict) and part.get("type") == "image"
    ]
