"""A clock for a rollout's stream: seconds of its steps, tokens computed, and tokens found in the prefix cache."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from trlx_hybrid.contract.conversation import Conversation
from trlx_hybrid.contract.types import Request, Sampling

from .replay import StepTime, Trace


@dataclass(slots=True)
class StepClock:
    """A clock that times the steps of the streams that an engine opens.

    Attributes:
        steps: seconds of each step, with its requests and prompt tokens.
        cached: by row and turn, prompt tokens that were in the prefix cache.
    """

    steps: list[StepTime] = field(default_factory=list)
    cached: dict[tuple[int, int], int] = field(default_factory=dict)

    @contextmanager
    def listening(self, engine: Any) -> Iterator[None]:
        """Time the streams that the engine opens inside this context."""
        stream = engine.stream

        @contextmanager
        def timed(sampling: Sampling) -> Iterator[Any]:
            with stream(sampling) as inner:
                self._time(inner)
                self._note_cached(inner)
                yield inner

        engine.stream = timed
        try:
            yield
        finally:
            del engine.stream

    def _time(self, inner: Any) -> None:
        step = inner.step

        def timed(more: bool) -> Any:
            waiting, prompts, cached = len(inner._ids), inner.prompt_tokens, inner.cached_tokens
            started = time.perf_counter()
            result = step(more)
            seconds = time.perf_counter() - started
            if waiting:
                computed = inner.prompt_tokens - prompts - (inner.cached_tokens - cached)
                self.steps.append(StepTime(waiting, computed, seconds))
            return result

        inner.step = timed

    def _note_cached(self, inner: Any) -> None:
        """Record the cached tokens of each request; the stream counts all requests together."""
        add, places = inner.add, {}

        def noted(request: Request) -> int:
            key: int = add(request)
            places[inner._ids[key]] = request.row, request.turn
            return key

        def seen(request_id: str, cached: int) -> None:
            if request_id in places:
                self.cached[places[request_id]] = cached

        inner.add, inner._stepper._core = noted, _Overheard(inner._stepper._core, seen)


class _Overheard:
    """A wrapper of vLLM's engine core that reports how many tokens of each prompt were cached."""

    def __init__(self, core: Any, seen: Callable[[str, int], None]) -> None:
        self._core, self._seen = core, seen

    def get_output(self) -> Any:
        outputs = self._core.get_output()
        for output in outputs.outputs:
            if output.prefill_stats is not None:
                self._seen(output.request_id, output.prefill_stats.num_cached_tokens)
        return outputs

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)


def computed_prompts(trace: Trace, conversations: Sequence[Conversation], block: int) -> Trace:
    """Return the trace with the prompt tokens that each turn must compute: all but full blocks of the turn before."""
    prompts = []
    for conversation in conversations:
        sizes = [turn.prompt for turn in conversation.turns]
        kept = [0, *(shared // block * block for shared in shared_tokens(conversation))]
        prompts.append([size - known for size, known in zip(sizes, kept, strict=True)])
    return dataclasses.replace(trace, prompts=prompts)


def shared_tokens(conversation: Conversation) -> list[int]:
    """Return, per turn but the first, the tokens of its prompt that the turn before computed or sampled."""
    return [turn.prompt + turn.sampled for turn in conversation.turns[:-1]]


def prefix_share(conversations: Sequence[Conversation], clock: StepClock, block: int) -> float:
    """Return the tokens found in the prefix cache, as a share of the full blocks that each turn shares with the last
    one.

    Further tokens that a turn finds do not count, such as a sibling's answer where a model says the same to the same
    prompt.
    """
    first, found, possible = min(row for row, _ in clock.cached), 0, 0
    for index, conversation in enumerate(conversations):
        for turn, shared in enumerate(shared_tokens(conversation), start=1):
            full = shared // block * block
            found += min(full, clock.cached[first + index, turn])
            possible += full
    return found / possible
