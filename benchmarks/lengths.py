"""Lengths of completions: all equal, or drawn once, so that all arms have the same rows."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """The lengths of every batch of a case.

    Random weights do not end a completion where a trained model would. So each row's length is prescribed: the engine
    is asked for that many tokens, and told to ignore the end of a sequence.

    Attributes:
        sequences: rows of a batch.
        longest: tokens; all rows have this length, or no row is longer.
        median, sigma: parameters of a lognormal distribution; where `median` is None, all rows are `longest`.
    """

    sequences: int
    longest: int
    median: int | None = None
    sigma: float = 0.0

    @property
    def name(self) -> str:
        """The name in tables: 64x512, or 64xlognormal512."""
        return f"{self.sequences}x" + (f"lognormal{self.median}" if self.median is not None else str(self.longest))

    def draw(self, turn: int) -> list[int]:
        """Return the tokens of each row of a batch; the same for the same turn."""
        if self.median is None:
            return [self.longest] * self.sequences
        draw = random.Random(f"{self}-{turn}")
        drawn = (round(draw.lognormvariate(math.log(self.median), self.sigma)) for _ in range(self.sequences))
        return [min(max(1, tokens), self.longest) for tokens in drawn]


def prescribe_stock(llm: Any, batch: Callable[[], Sequence[int] | None]) -> None:
    """Make each prompt of TRL's engine have its own limit of tokens; TRL passes one `SamplingParams` for all prompts.

    Args:
        llm: vLLM's LLM.
        batch: called at each `generate`: returns a length for each prompt, or None to leave all as they are.
    """
    generate = llm.generate

    def limited(prompts: Sequence[Any], sampling_params: Any, **others: Any) -> Any:
        lengths = batch()
        if lengths is not None:
            sampling_params = [sampling_params.clone() for _ in prompts]
            for params, tokens in zip(sampling_params, lengths, strict=True):
                params.max_tokens = tokens
        return generate(prompts, sampling_params=sampling_params, **others)

    llm.generate = limited


def prescribe_hybrid(sampler: Any, batch: Callable[[], Sequence[int] | None]) -> None:
    """Make each request of our session's sampler have its own limit of tokens; `batch` is as in `prescribe_stock`."""
    sample = sampler.sample

    def limited(engine: Any, run: Any, *others: Any, **named: Any) -> Any:
        lengths = batch()

        def run_limited(requests: Sequence[Any], sampling: Any) -> Any:
            if lengths is not None:
                pairs = zip(requests, lengths, strict=True)
                requests = [dataclasses.replace(request, max_tokens=tokens) for request, tokens in pairs]
            return run(requests, sampling)

        return sample(engine, run_limited, *others, **named)

    sampler.sample = limited


def batches(lengths: Lengths) -> Callable[[], list[int]]:
    """Return a function that gives the lengths of the first batch, at the next call those of the second, and so on."""
    turns = itertools.count()
    return lambda: lengths.draw(next(turns))
