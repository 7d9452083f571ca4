"""What a rollout's stream did: how long its steps took, what it computed, and what it found in the prefix cache."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from trlx_hybrid.conversation import Conversation
from trlx_hybrid.types import Sampling

from .replay import StepTime, Trace


@dataclass(slots=True)
class StepClock:
    """Times the steps of the streams that an engine opens.

    Attributes:
        steps: seconds of each, with what was in it.
        first_cached: prompt tokens of first turns that the prefix cache had.
        cached: of all turns.
    """

    steps: list[StepTime] = field(default_factory=list)
    first_cached: int = 0
    cached: int = 0

    @contextmanager
    def listening(self, engine: Any) -> Iterator[None]:
        """While it is inside."""
        stream = engine.stream

        @contextmanager
        def timed(sampling: Sampling) -> Iterator[Any]:
            with stream(sampling) as inner:
                self._time(inner)
                yield inner
                self.cached = inner.cached_tokens

        engine.stream = timed
        try:
            yield
        finally:
            del engine.stream

    def _time(self, inner: Any) -> None:
        step, finished_any = inner.step, False

        def timed(more: bool) -> Any:
            nonlocal finished_any
            waiting, prompts, cached = len(inner._ids), inner.prompt_tokens, inner.cached_tokens
            started = time.perf_counter()
            result = step(more)
            seconds = time.perf_counter() - started
            if waiting:
                computed = inner.prompt_tokens - prompts - (inner.cached_tokens - cached)
                self.steps.append(StepTime(waiting, computed, seconds))
            if result[0] and not finished_any:
                finished_any, self.first_cached = True, inner.cached_tokens
            return result

        inner.step = timed


def computed_prompts(trace: Trace, conversations: Sequence[Conversation], block: int) -> Trace:
    """The trace with the prompt tokens that each turn has to compute: all but the full blocks of the turn before."""
    prompts = []
    for conversation in conversations:
        sizes = [turn.prompt for turn in conversation.turns]
        kept = [0, *(shared // block * block for shared in shared_tokens(conversation))]
        prompts.append([size - known for size, known in zip(sizes, kept, strict=True)])
    return dataclasses.replace(trace, prompts=prompts)


def shared_tokens(conversation: Conversation) -> list[int]:
    """Per turn but the first, the tokens of its prompt that the turn before computed or sampled."""
    return [turn.prompt + turn.sampled for turn in conversation.turns[:-1]]


def prefix_share(conversations: Sequence[Conversation], cached: int, block: int) -> float:
    """Tokens found in the prefix cache, as share of the full blocks that each turn shares with the one before.

    Args:
        cached: those of later turns.
    """
    return cached / sum(shared // block * block for c in conversations for shared in shared_tokens(c))
