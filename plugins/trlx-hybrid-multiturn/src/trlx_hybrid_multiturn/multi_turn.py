"""The rollout `multi_turn`: conversations with tools that advance independently, in the trainer's process."""

from __future__ import annotations

import functools
import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from trlx_hybrid.contract.conversation import (
    Conversation,
    ConversationPool,
    Dialogue,
    Limits,
    RequestMaker,
    RowPool,
)
from trlx_hybrid.contract.protocols import Run, Stream
from trlx_hybrid.episodes.unparsed import UNPARSED, UnparsedTurns
from trlx_hybrid.errors import HybridError
from trlx_hybrid.plugins.builtin import SingleTurn

from .episode import Episode, ToolEpisode, broken
from .in_flight import RowsInFlight, Trajectories, conversations
from .loop import Loop, TrajectoryCoroutine
from .options import MultiTurnOptions
from .progress import Progress, heavy_tools, metrics
from .tool_calls import check_tools
from .tools.runner import ToolRunner

logger = logging.getLogger(__name__)


class TrajectoriesFailedError(HybridError):
    """Raised where more trajectories of a batch broke off than the option `max_failed` allows. The message lists and
    counts the causes."""


class MultiTurn(SingleTurn):
    """The rollout that runs a trainer's multi-turn conversations, all of a batch at once on one engine.

    Rows without tools, and the requests of a user's `rollout_func`, are handled as by the rollout `single_turn`: one
    completion is sampled for each row or request.

    Attributes:
        options: this rollout's options.
        runner: runs the calls of tools and of environments' methods.
    """

    name = "multi_turn"
    converses = True

    def __init__(self, session: Run, options: MultiTurnOptions) -> None:
        self.options = options
        self.runner = ToolRunner(options)
        self._in_flight: RowsInFlight | None = None
        self._left: ExitStack | None = None  # closes the stream of requests that are left to an engine
        self._warned: set[str] = set()
        self._unparsed = UnparsedTurns()
        self._visible = (
            options.progress and session.ranks.rank == 0 and not getattr(session.args, "disable_tqdm", False)
        )

    def converse(
        self, session: Run, dialogues: Sequence[Dialogue], limits: Limits, request: RequestMaker
    ) -> list[Conversation]:
        """Run every dialogue to its end, and return the conversations in the order of the dialogues.

        Args:
            session: the run, with its engine and metrics.
            dialogues: one for each row of the batch: its prompt, and the tools that the model may call.
            limits: tokens and turns at which a conversation ends; the option `max_turns` may lower the turns.
            request: makes the engine's request for one turn.

        Raises:
            TrajectoriesFailedError: more conversations broke off than the option `max_failed` allows.
            ConfigError: a tool cannot run where it is configured to run, or the parser of tool calls fails at the last
                turn of every row.
        """
        check_tools(dialogues, self.runner)
        limits = self.options.limited(limits)
        failed = self.failures(len(dialogues))
        episodes = [ToolEpisode(i, d, limits, request, self.runner, failed) for i, d in enumerate(dialogues)]
        played = [episode.conversation for episode in episodes]
        trajectories = [_told(number, episode, session.on_conversation) for number, episode in enumerate(episodes)]
        self.run_trajectories(session, trajectories, played)
        session.metrics[UNPARSED] = float(self._unparsed.ended([c.unparsed for c in played]))
        return played

    def play(self, session: Run, pool: ConversationPool) -> None:
        """Play a pool's conversations until those of a batch are over. The others stay in flight.

        Args:
            session: the run, with its engine and metrics.
            pool: the conversations, over all rollouts.

        Raises:
            TrajectoriesFailedError: more conversations of the batch broke off than the option `max_failed` allows.
            ConfigError: as in `converse`.
        """
        options, runner = self.options, self.runner
        self.play_in_flight(session, pool, functools.partial(conversations, session, pool, options, runner))

    def play_in_flight(self, session: Run, pool: RowPool[Any], trajectories: Trajectories) -> None:
        """Play a pool's rows until those of a batch are over. The others stay in flight.

        Args:
            session: the run, with its engine and metrics.
            pool: the rows, over all rollouts.
            trajectories: plays rows, in this rollout and in later ones.

        Raises:
            TrajectoriesFailedError: more rows of the batch broke off than the option `max_failed` allows.
        """
        if self._in_flight is None or self._in_flight.pool is not pool:
            self._end_in_flight()
            self._in_flight = RowsInFlight(pool, self.options, trajectories)
        progress = Progress(len(pool.unfinished()), self.runner, self._visible)
        with ExitStack() as opened:
            stream = opened.enter_context(session.live_engine.stream(session.sampling))
            with self._sampling(progress):
                played = [row.conversation for row in self._in_flight.play(stream, progress)]
            if pool.goes_on:
                self._left = opened.pop_all()
        failed = self.failures(len(played), warn=False)
        for conversation in played:
            if conversation.failure is not None:
                failed(conversation)
        self._measure(session, played, progress, stream)
        session.metrics.update(progress.in_flight(pool.in_flight))
        session.metrics[UNPARSED] = float(self._unparsed.ended([c.unparsed for c in played]))

    def run_trajectories(
        self, session: Run, trajectories: Sequence[TrajectoryCoroutine], conversations: Sequence[Conversation]
    ) -> None:
        """Run coroutines over one stream of the engine to their end, and add their statistics to the run's metrics.

        Args:
            session: the run, with its engine and metrics.
            trajectories: coroutines that each run one episode.
            conversations: the results, one for each coroutine. A coroutine fills its conversation, from which the
                statistics are then computed.
        """
        options = self.options
        progress = Progress(len(trajectories), self.runner, self._visible)
        with self._sampling(progress), session.live_engine.stream(session.sampling) as stream:
            width = options.max_trajectories or len(trajectories)
            Loop(stream, progress, width=width, seconds=options.max_seconds).run(trajectories)
        self._measure(session, conversations, progress, stream)

    def interrupt(self) -> None:
        """Interrupt the requests that the last rollout has left to the engine, and close its stream. The pool gets what
        they have sampled."""
        left, self._left = self._left, None
        if left is not None:
            assert self._in_flight is not None
            with left:
                self._in_flight.interrupt()

    @contextmanager
    def _sampling(self, progress: Progress) -> Iterator[None]:
        """Return a context for a rollout, whose bar is closed at the end."""
        self.runner.usage.clear()
        try:
            with _switching_every(self.options.switch_interval):
                yield
        finally:
            progress.close()

    def _measure(self, session: Run, conversations: Sequence[Conversation], progress: Progress, stream: Stream) -> None:
        """Add a rollout's statistics to the run's metrics, and warn of tools that slow it down."""
        session.metrics.update(metrics(conversations, self.runner.usage, progress, stream))
        for tool, sentence in heavy_tools(self.runner.usage, progress, self.runner).items():
            if tool not in self._warned:
                self._warned.add(tool)
                logger.warning(sentence)

    def close(self) -> None:
        """End the rows in flight, and the threads and processes of tools."""
        self._end_in_flight()
        self.runner.close()

    def _end_in_flight(self) -> None:
        if self._left is not None:
            self._left.close()
            self._left = None
        if self._in_flight is not None:
            self._in_flight.close()
            self._in_flight = None

    def failures(self, total: int, warn: bool = True) -> Callable[[Conversation], None]:
        """Return a function to be called with each conversation of a batch that breaks off.

        The function counts them, and raises TrajectoriesFailedError when there are more than the option `max_failed`
        allows.

        Args:
            total: number of conversations in the batch.
            warn: whether the function also logs a warning.
        """
        share = self.options.max_failed
        allowed = max(1, int(share * total)) if share else 0
        causes: Counter[str] = Counter()

        def failed(conversation: Conversation) -> None:
            causes[str(conversation.failure)] += 1
            if warn:
                broken(conversation)
            if causes.total() > allowed:
                listed = "; ".join(f"{cause} ({count} times)" for cause, count in causes.most_common(5))
                raise TrajectoriesFailedError(
                    f"{causes.total()} of {total} trajectories broke off, {allowed} may (rollout_options max_failed="
                    f"{share:g}): {listed} Mend what failed, or allow more."
                )

        return failed


async def _told(number: int, episode: Episode, tell: Callable[[int, Conversation], None] | None) -> None:
    """Run an episode to its end, and then pass its conversation to a function, which may start to score it.

    Args:
        number: number of the episode's row in the batch.
        episode: the episode.
        tell: the function, called with the number and the conversation; None calls nothing.
    """
    await episode.run()
    if tell is not None:
        tell(number, episode.conversation)


@contextmanager
def _switching_every(seconds: float) -> Iterator[None]:
    """Return a context in which the interpreter switches between threads more often, so that the thread that steps the
    engine waits less for threads of tools. The former interval is restored on exit.

    Args:
        seconds: the switch interval (`sys.setswitchinterval`), in seconds.
    """
    before = sys.getswitchinterval()
    sys.setswitchinterval(seconds)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
