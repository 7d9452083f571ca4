"""The rollouts that `benchmarks.multiturn` compares on a CPU, case by case, and the predictions of their replays."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from .harness import Arm, Measurement, Timed, alternate
from .multiturn_clock import StepClock, computed_prompts, prefix_share
from .multiturn_rollouts import Rollouts, loops_per_second
from .replay import StepCost, Trace, asynchronous, draw, fit, lock_step

FITS = {"": False, "_with_prompts": True}
"""The suffixes of metrics, and whether the cost of a step has a term for prompt tokens."""


@dataclass(slots=True)
class Round:
    """The data of one round of a case.

    Attributes:
        seconds: seconds of each arm.
        free, ours: steps of the tool-free workload, and of multi_turn.
        trace: the trace, with the prompt tokens that had to be computed.
        prefix_share: see `multiturn_clock.prefix_share`.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    free: StepClock = field(default_factory=StepClock)
    ours: StepClock = field(default_factory=StepClock)
    trace: Trace | None = None
    prefix_share: float = 0.0

    def metrics(self) -> dict[str, float]:
        """Return this round's metrics of its case, measured and predicted."""
        assert self.trace is not None
        ours, measured = self.seconds["multi_turn"], self.seconds["lock_step"] / self.seconds["multi_turn"]
        found = {
            "ratio": measured,
            "prefix_share": self.prefix_share,
            "share_in_steps": sum(step.seconds for step in self.ours.steps) / ours,
        }
        for suffix, prompts in FITS.items():
            cost = fit(self.free.steps, prompts=prompts)
            best, fair = asynchronous(self.trace, cost), lock_step(self.trace, cost)
            found |= {
                f"share_of_optimum{suffix}": best / ours,
                f"predicted_ratio{suffix}": fair / best,
                f"share_of_lock_step{suffix}": fair / self.seconds["lock_step"],
                f"step_ms{suffix}": cost.base * 1e3,
                f"request_ms{suffix}": cost.per_request * 1e3,
                f"prompt_token_ms{suffix}": cost.per_prompt_token * 1e3,
            }
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The sizes that all cases share.

    Attributes:
        tokens: tokens sampled in a turn, on average.
        latency: median latency of a tool, in seconds.
        seed: seed of the traces.
    """

    tokens: int
    latency: float
    seed: int = 0

    def trace(self, trajectories: int, turns: int) -> Trace:
        """Return the trace of one case."""
        return draw(trajectories, turns, tokens=self.tokens, latency=self.latency, seed=self.seed)


Found = tuple[list[Measurement], dict[str, float]]


def waiting_tools(rollouts: Rollouts, trajectories: int, turns: int, sizes: Sizes, *, repetitions: int) -> Found:
    """Measure tools that wait: lock-step and multi_turn in turns, with the tool-free workload around both."""
    case = f"{trajectories}x{turns}"
    trace = sizes.trace(trajectories, turns)
    rounds = [Round() for _ in range(repetitions)]

    def noted(name: str, turn: int, timed: Timed) -> Timed:
        rounds[turn].seconds[name] = timed.seconds
        return timed

    def free(turn: int) -> None:
        rollouts.tool_free(waves(trajectories), trace, rounds[turn].free, len(rounds[turn].free.steps))

    def ours(turn: int) -> Timed:
        this = rounds[turn]
        free(turn)
        timed = noted("multi_turn", turn, rollouts.repeat(trace, "multi_turn", this.ours))
        free(turn)
        block, conversations = rollouts.block_size, rollouts.conversations
        this.trace = computed_prompts(trace, conversations, block)
        this.prefix_share = prefix_share(conversations, this.ours, block)
        return timed

    def fair(turn: int) -> Timed:
        free(turn)
        return noted("lock_step", turn, rollouts.repeat(trace, "single_turn", StepClock(), early=True))

    arms = [Arm("lock_step", fair), Arm("multi_turn", ours)]
    measured = alternate(arms, warmup=0, repetitions=repetitions, case=case)
    return measured, {f"{name}_{case}": value for name, value in medians([r.metrics() for r in rounds]).items()}


def stock_loop(rollouts: Rollouts, trajectories: int, turns: int, sizes: Sizes) -> Measurement:
    """Measure TRL's loop once. It waits for one tool after another, most of the time with nothing else to do."""
    trace = sizes.trace(trajectories, turns)
    arms = [
        Arm("trl_loop", lambda turn: rollouts.repeat(trace, "single_turn", StepClock())),
        Arm("again", lambda turn: rollouts.repeat(trace, "multi_turn", StepClock())),  # to compare the tokens
    ]
    return alternate(arms, warmup=0, repetitions=1, case=f"{trajectories}x{turns}")[0]


def computing_tools(rollouts: Rollouts, trajectories: int, turns: int, sizes: Sizes, *, repetitions: int) -> Found:
    """Measure tools that compute as long as others wait: in threads beside the engine, and in processes.

    The inflation of a step is how much longer it takes than steps with as many requests and no tools.
    """
    case, speed = f"computing {trajectories}x{turns}", loops_per_second()
    trace = sizes.trace(trajectories, turns)
    places = {"threads": "multi_turn", "processes": "multi_turn_processes"}
    free: dict[int, StepCost] = {}
    inflation: dict[str, list[float]] = {name: [] for name in places}

    def tool_free(turn: int) -> Timed:
        clock = StepClock()
        timed = rollouts.tool_free(waves(trajectories), trace, clock, turn)
        free[turn] = fit(clock.steps, prompts=True)
        return timed

    def run(name: str, turn: int) -> Timed:
        clock = StepClock()
        timed = rollouts.repeat(trace, places[name], clock, loops=speed)
        expected = sum(free[turn](step.requests, step.prompt_tokens) for step in clock.steps)
        inflation[name].append(sum(step.seconds for step in clock.steps) / expected)
        return timed

    arms = [Arm("tool_free", tool_free)]
    arms += [Arm(name, lambda turn, name=name: run(name, turn)) for name in places]  # type: ignore[misc]
    measured = alternate(arms, warmup=1, repetitions=repetitions, case=case)
    return measured, {f"step_inflation_{name}": statistics.median(v[1:]) for name, v in inflation.items()}


def waves(trajectories: int) -> list[int]:
    """Return how many trajectories the tool-free workload runs at once, for each of its waves."""
    return [max(1, trajectories // part) for part in (8, 2, 1)]


def medians(rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the median of each number over the rounds.

    A machine that drifts does so between rounds, and each round has its own prediction.
    """
    return {name: statistics.median(found[name] for found in rounds) for name in rounds[0]}
