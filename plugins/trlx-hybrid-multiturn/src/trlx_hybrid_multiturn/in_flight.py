"""Conversations that stay in flight over several rollouts. Requests are interrupted between rollouts and go on from
their tokens; tool calls go on while the trainer trains, and their answers wait for the next rollout."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from trlx_hybrid.contract.conversation import (
    ConversationPool,
    Dialogue,
    Limits,
    Message,
    PooledConversation,
    PooledRow,
)
from trlx_hybrid.contract.protocols import Run, Stream
from trlx_hybrid.contract.types import Completion

from .episode import ToolEpisode, broken
from .loop import Generate, Loop, TrajectoryCoroutine
from .options import MultiTurnOptions
from .progress import Progress
from .tool_calls import check_tools
from .tools.runner import ToolRunner


class ConversationsInFlight:
    """The conversations of a pool, with a loop that outlives a rollout.

    Args:
        pool: the conversations.
        options: the rollout's options.
        runner: runs the tools.

    Attributes:
        pool: the conversations.
    """

    def __init__(self, pool: ConversationPool, options: MultiTurnOptions, runner: ToolRunner) -> None:
        self.pool, self._options, self._runner = pool, options, runner
        self._loop: Loop | None = None
        self._known: set[PooledConversation] = set()  # conversations that the loop has
        self._ended = 0

    def play(self, session: Run, stream: Stream, progress: Progress) -> Sequence[PooledConversation]:
        """Play until the conversations of a batch are over, and return these.

        Args:
            session: the run.
            stream: the stream of this rollout.
            progress: is told of each step.
        """
        pool, options = self.pool, self._options
        if self._loop is None:
            width = min(pool.in_flight, options.max_trajectories or pool.in_flight)
            self._loop = Loop(stream, progress, width=width, seconds=options.max_seconds)
        make = functools.partial(self._trajectories, session)
        self._loop.add(make([row for row in pool.unfinished() if row not in self._known]))
        try:
            self._loop.go_on(stream, progress, lambda: make(pool.begin()), _Complete(self))
        except BaseException:
            self._known.clear()  # the loop has ended them; the pool keeps what they had
            raise
        batch = pool.batch()  # asked again: tools that answered at the end may have completed an older group
        assert batch is not None
        return batch

    def close(self) -> None:
        """End the conversations, and abandon their tool calls. The pool keeps what they have."""
        if self._loop is not None:
            self._loop.close()
        self._known.clear()

    @property
    def ended(self) -> int:
        """The number of conversations that have ended so far."""
        return self._ended

    def _trajectories(
        self, session: Run, rows: Sequence[PooledConversation]
    ) -> list[tuple[TrajectoryCoroutine, PooledConversation]]:
        """Return the coroutines that play conversations, from where they are to their end."""
        if not rows:
            return []
        self._known.update(rows)
        dialogues = [self.pool.dialogue(row) for row in rows]
        check_tools(dialogues, self._runner)
        limits, most = self._options.limited(self.pool.limits), session.sampling.max_tokens
        episodes = [
            PooledEpisode(row, dialogue, limits, self.pool, self._runner, most)
            for row, dialogue in zip(rows, dialogues, strict=True)
        ]
        return [(self._played(episode, row), row) for episode, row in zip(episodes, rows, strict=True)]

    async def _played(self, episode: PooledEpisode, row: PooledConversation) -> None:
        await episode.run()
        row.over = True
        self._known.discard(row)
        self._ended += 1


class _Complete:
    """A function that returns whether the batch is complete. It asks the pool only when a conversation has ended."""

    def __init__(self, conversations: ConversationsInFlight) -> None:
        self._conversations, self._seen, self._complete = conversations, -1, False

    def __call__(self) -> bool:
        if self._conversations.ended != self._seen:
            self._seen = self._conversations.ended
            self._complete = self._conversations.pool.batch() is not None
        return self._complete


class PooledEpisode(ToolEpisode):
    """An episode with tools whose turns may be sampled over several rollouts. All that it needs to go on later, in this
    process or another, is in its row of the pool.

    Args:
        row: the conversation, which may have begun.
        dialogue: its prompt, its tools, and how messages are parsed and rendered.
        limits: limits of tokens and turns.
        pool: makes its requests, and knows the version of the weights.
        runner: runs the tools.
        most: the largest number of tokens of one turn.
    """

    def __init__(
        self,
        row: PooledConversation,
        dialogue: Dialogue,
        limits: Limits,
        pool: ConversationPool,
        runner: ToolRunner,
        most: int,
    ) -> None:
        super().__init__(0, dialogue, limits, pool.request(row), runner, broken)
        self.conversation = conversation = row.conversation
        conversation.calls, conversation.failed_calls, conversation.mended_answers = row.counts
        self._row, self._pool, self._most = row, pool, most

    async def sample(self, context: list[int], images: list[object] | None, room: int | None) -> Completion:
        """Sample the next turn, or the rest of it, in as many rollouts as it takes; record it, and return it.

        Args:
            context: token ids of the prompt and of everything after it, without this turn.
            images: images in the context, or None.
            room: the largest number of tokens of the turn; None for as many as the run allows.
        """
        row, turns = self._row, len(self.conversation.turns)
        room = self._most if room is None else min(room, self._most)
        while not row.turn.over:
            prompt, rest = [*context, *row.turn.token_ids], room - row.turn.tokens
            sampled = await Generate(self._request(self._index, turns, prompt, images, rest))
            row.turn.extend(sampled, self._pool.version)
            row.requests += 1
        completion = row.turn.completion()
        self.sampled(completion, len(context))
        return completion

    def sampled(self, completion: Completion, prompt: int) -> None:
        """Record a turn that the model has sampled, with the versions of the weights.

        Args:
            completion: the sampled turn.
            prompt: the number of tokens before it.
        """
        super().sampled(completion, prompt)
        turn, self._row.turn = self._row.turn, PooledRow()
        whole = turn.over  # else its time was over, and the conversation is masked
        self.conversation.weight_versions += (
            turn.versions if whole else [self._pool.version] * len(completion.token_ids)
        )

    def observed(self, ids: list[int], messages: list[Message]) -> None:
        """Record what the model is shown between two turns, with the version of the weights.

        Args:
            ids: what the model is shown, as token ids that are added to the context.
            messages: what the model is shown, as chat messages.
        """
        super().observed(ids, messages)
        self.conversation.weight_versions += [self._pool.version] * len(ids)

    async def _speak(self) -> Message:
        conversation = self.conversation
        self._row.counts = (conversation.calls, conversation.failed_calls, conversation.mended_answers)
        return await super()._speak()
