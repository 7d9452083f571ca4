"""Conversations and episodes that stay in flight over several rollouts. Requests are interrupted between rollouts and
go on from their tokens; calls of tools go on while the trainer trains, and their answers wait for the next rollout."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

from trlx_hybrid.contract.conversation import (
    Conversation,
    ConversationPool,
    Dialogue,
    Limits,
    Message,
    PooledConversation,
    PooledEpisode,
    PooledRow,
    RowPool,
)
from trlx_hybrid.contract.protocols import Run, Stream
from trlx_hybrid.contract.types import Completion, Request
from trlx_hybrid.rollout.seeding import rest

from .episode import ToolEpisode, broken
from .loop import Generate, Loop, TrajectoryCoroutine
from .options import MultiTurnOptions
from .progress import Progress
from .tool_calls import check_tools
from .tools.runner import ToolRunner
from .tools.threads import CLOSE_SECONDS

logger = logging.getLogger(__name__)

Play = Callable[[], TrajectoryCoroutine]
"""A coroutine function that plays a row of a pool, from where it is to its end."""

Trajectories = Callable[[Sequence[Any]], Sequence[Play]]
"""A function that returns, for each of some rows of a pool, the coroutine function that plays it."""


class RowsInFlight:
    """The rows of a pool, with a loop that outlives a rollout.

    Args:
        pool: the rows.
        options: the rollout's options.
        trajectories: plays rows.

    Attributes:
        pool: the rows.
    """

    def __init__(self, pool: RowPool[Any], options: MultiTurnOptions, trajectories: Trajectories) -> None:
        self.pool, self._options, self._trajectories = pool, options, trajectories
        self._loop: Loop | None = None
        self._known: set[Any] = set()  # rows that the loop has
        self._ended = 0

    def play(self, stream: Stream, progress: Progress) -> Sequence[Any]:
        """Play until the rows of a batch are over, and return these.

        Args:
            stream: the stream of this rollout.
            progress: is told of each step.
        """
        pool, options = self.pool, self._options
        if self._loop is None:
            width = min(pool.in_flight, options.max_trajectories or pool.in_flight)
            self._loop = Loop(stream, progress, width=width, seconds=options.max_seconds)
        self._loop.add(self._begun([row for row in pool.unfinished() if row not in self._known]))
        try:
            self._loop.go_on(stream, progress, lambda: self._begun(pool.begin()), _Complete(self), leave=pool.goes_on)
        except BaseException:
            self._known.clear()  # the loop has ended them; the pool keeps what they had
            raise
        batch = pool.batch()  # asked again: tools that answered at the end may have completed an older group
        assert batch is not None
        return batch

    def interrupt(self) -> None:
        """Interrupt the requests that `play` has left to the engine."""
        assert self._loop is not None
        try:
            self._loop.interrupt()
        except BaseException:
            self._known.clear()
            raise

    def close(self) -> None:
        """End the trajectories. Calls that are under way are waited for, so that environments can be closed, and those
        that take longer than `CLOSE_SECONDS` are abandoned. The pool keeps what the trajectories have."""
        if self._loop is not None:
            try:
                self._loop.settle(CLOSE_SECONDS)
            except Exception as error:  # the run is over, and nobody trains on this trajectory
                logger.info("A trajectory broke off at the end of the run: %s", error)
            self._loop.close()
        self._known.clear()

    @property
    def ended(self) -> int:
        """The number of trajectories that have ended so far."""
        return self._ended

    def _begun(self, rows: Sequence[Any]) -> list[tuple[TrajectoryCoroutine, Any]]:
        """Return the coroutines that play rows, with these rows, which record their time."""
        self._known.update(rows)
        played = self._trajectories(rows) if rows else ()
        return [(self._to_its_end(play, row), row) for play, row in zip(played, rows, strict=True)]

    async def _to_its_end(self, play: Play, row: Any) -> None:
        await play()
        self._known.discard(row)
        self._ended += 1


class _Complete:
    """A function that returns whether the batch is complete. It asks the pool only when a trajectory has ended."""

    def __init__(self, rows: RowsInFlight) -> None:
        self._rows, self._seen, self._complete = rows, -1, False

    def __call__(self) -> bool:
        if self._rows.ended != self._seen:
            self._seen = self._rows.ended
            self._complete = self._rows.pool.batch() is not None
        return self._complete


async def over_rollouts(row: PooledEpisode, pool: RowPool[Any], most: int, request: Request) -> Completion:
    """Sample a request of an episode in as many rollouts as it takes.

    Args:
        row: the episode, which counts its tokens.
        pool: knows the version of the weights.
        most: the largest number of tokens of one turn.
        request: the request.

    Returns:
        The completion, with the versions of the weights that sampled its tokens.
    """
    turn, room = PooledRow(), most if request.max_tokens is None else min(most, request.max_tokens)
    first = left = dataclasses.replace(request, max_tokens=room)
    while True:
        sampled = await Generate(left)
        turn.extend(sampled, pool.version)
        row.sampled += len(sampled.token_ids)
        if turn.over:
            return turn.completion()
        left = rest(first, turn.token_ids, turn.rollouts)


def conversations(
    session: Run,
    pool: ConversationPool,
    options: MultiTurnOptions,
    runner: ToolRunner,
    rows: Sequence[PooledConversation],
) -> list[Play]:
    """Return the coroutine functions that play conversations with tools.

    Args:
        session: the run.
        pool: the conversations.
        options: the rollout's options.
        runner: runs the tools.
        rows: the conversations to play.
    """
    dialogues = [pool.dialogue(row) for row in rows]
    check_tools(dialogues, runner)
    limits, most = options.limited(pool.limits), session.sampling.max_tokens
    episodes = [
        PooledToolEpisode(row, dialogue, limits, pool, runner, most)
        for row, dialogue in zip(rows, dialogues, strict=True)
    ]
    return [functools.partial(_conversed, episode, row, pool) for episode, row in zip(episodes, rows, strict=True)]


async def _conversed(episode: PooledToolEpisode, row: PooledConversation, pool: ConversationPool) -> None:
    await episode.run()
    fill_versions(row.conversation, pool.version)
    row.over = True


class PooledToolEpisode(ToolEpisode):
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
            prompt, left = [*context, *row.turn.token_ids], room - row.turn.tokens
            sampled = await Generate(self._request(self._index, turns, prompt, images, left))
            row.turn.extend(sampled, self._pool.version)
            row.requests += 1
        completion = row.turn.completion()
        self.sampled(completion, len(context))
        return completion

    def sampled(self, completion: Completion, prompt: int) -> None:
        """Record a turn that the model has sampled; the next one begins.

        Args:
            completion: the sampled turn.
            prompt: the number of tokens before it.
        """
        self._row.turn = PooledRow()
        super().sampled(completion, prompt)

    async def _speak(self) -> Message:
        conversation = self.conversation
        self._row.counts = (conversation.calls, conversation.failed_calls, conversation.mended_answers)
        return await super()._speak()


def fill_versions(conversation: Conversation, version: int) -> None:
    """Give the last tokens of a conversation a version of the weights where they have none, such as the token that
    takes the place of a turn where a conversation broke off."""
    missing = len(conversation.completion_ids) - len(conversation.weight_versions)
    conversation.weight_versions += [version] * missing
