"""The time that a rollout with tools must take: a discrete-event replay of a trace, with a cost for each engine step.

A trajectory is turns of sampled tokens with tool calls between them. The engine takes steps; each gives one token to
every trajectory that samples, and costs `base + per_request · batch`. A trajectory that becomes ready during a step
joins the next step. Nothing else costs anything, so a program that takes as long as its replay wastes no time.

Everything here is a pure function. All times are seconds.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """The tokens and latencies of every trajectory, whatever runs it.

    Attributes:
        tokens: per trajectory and turn, how many are sampled; at least 1.
        latencies: per trajectory, latency of the tool call after each turn but the last.
        prompts: per trajectory and turn, tokens that the engine has to compute before it samples; none where empty.
    """

    tokens: Sequence[Sequence[int]]
    latencies: Sequence[Sequence[float]]
    prompts: Sequence[Sequence[int]] = ()

    def prompt(self, row: int, turn: int) -> int:
        """Return the prompt tokens to compute."""
        return self.prompts[row][turn] if self.prompts else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """The seconds of one engine step: `base` for any step, and more for each request and each prompt token in it."""

    base: float
    per_request: float
    per_prompt_token: float = 0.0

    def __call__(self, requests: int, prompt_tokens: int = 0) -> float:
        """Return the seconds of a step."""
        return self.base + self.per_request * requests + self.per_prompt_token * prompt_tokens


@dataclass(frozen=True, slots=True)
class StepTime:
    """One measured engine step."""

    requests: int
    prompt_tokens: int
    seconds: float


def draw(trajectories: int, turns: int, *, tokens: int, latency: float, sigma: float = 1.0, seed: int = 0) -> Trace:
    """Draw a trace: lognormal latencies with this median, and per turn `tokens` ± half of it, uniformly."""
    source, rows, half = random.Random(f"{seed} {trajectories} {turns}"), range(trajectories), tokens // 2
    return Trace(
        tokens=[[source.randint(tokens - half, tokens + half) for _ in range(turns)] for _ in rows],
        latencies=[[latency * source.lognormvariate(0.0, sigma) for _ in range(turns - 1)] for _ in rows],
    )


def fit(steps: Iterable[StepTime], *, prompts: bool) -> StepCost:
    """Fit the cost of measured steps by least squares.

    With `prompts` the cost has a term for prompt tokens; otherwise their cost is spread over the other terms.
    """
    measured = list(steps)
    columns = [(1.0, step.requests, step.prompt_tokens) if prompts else (1.0, step.requests) for step in measured]
    solution, *_ = np.linalg.lstsq(np.array(columns, dtype=float), np.array([s.seconds for s in measured]), rcond=None)
    base, per_request, *per_prompt_token = (max(0.0, float(value)) for value in solution)
    return StepCost(base=base, per_request=per_request, per_prompt_token=sum(per_prompt_token))


def asynchronous(trace: Trace, cost: StepCost) -> float:
    """Return the seconds of an asynchronous rollout: trajectories advance independently, and the engine steps for any.

    It is called the optimum, since a trajectory waits for others only until the current step ends, less than a step per
    turn. A schedule that delayed steps could at best save part of these waits.
    """
    clock, ready = 0.0, [(0.0, row, 0) for row in range(len(trace.tokens))]  # (when, row, turn), a heap
    sampling: dict[int, tuple[int, int]] = {}  # row -> turn, tokens left
    while ready or sampling:
        if not sampling:
            clock = max(clock, ready[0][0])
        fresh = 0
        while ready and ready[0][0] <= clock:
            _, row, turn = heapq.heappop(ready)
            sampling[row] = turn, trace.tokens[row][turn]
            fresh += trace.prompt(row, turn)
        clock += cost(len(sampling), fresh)
        for row, (turn, left) in list(sampling.items()):
            if left > 1:
                sampling[row] = turn, left - 1
                continue
            del sampling[row]
            if turn + 1 < len(trace.tokens[row]):
                heapq.heappush(ready, (clock + trace.latencies[row][turn], row, turn + 1))
    return clock


def lock_step(trace: Trace, cost: StepCost, *, concurrent: bool = True) -> float:
    """Return the seconds of a lock-step rollout.

    All trajectories take a turn, then all tools are called, at once or one after another, then the next turn begins.
    """
    clock = 0.0
    for turn in range(max(map(len, trace.tokens), default=0)):
        there = [row for row, tokens in enumerate(trace.tokens) if turn < len(tokens)]
        fresh = sum(trace.prompt(row, turn) for row in there)
        for index in range(max(trace.tokens[row][turn] for row in there)):
            clock += cost(sum(trace.tokens[row][turn] > index for row in there), 0 if index else fresh)
        latencies = [trace.latencies[row][turn] for row in there if turn < len(trace.latencies[row])]
        clock += max(latencies, default=0.0) if concurrent else sum(latencies)
    return clock


def critical_path(trace: Trace, cost: StepCost) -> float:
    """Return the seconds that the longest trajectory would take alone: no schedule is faster."""
    return max(
        (
            sum(cost(1) * count + cost.per_prompt_token * trace.prompt(row, t) for t, count in enumerate(tokens))
            + sum(trace.latencies[row][: len(tokens) - 1])
            for row, tokens in enumerate(trace.tokens)
        ),
        default=0.0,
    )
