"""The progress bar of a rollout, and its metrics afterwards."""

from __future__ import annotations

import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from trlx_hybrid.contract.conversation import Conversation
from trlx_hybrid.contract.types import Completion

from .tools.runner import ToolRunner, ToolUsage

REFRESH = 0.5  # seconds, on a terminal
REFRESH_LOG = 30.0  # seconds, where every refresh is a line of a log
TURNS_SHOWN = 5  # in the trainer's logs
HEAVY = 0.1  # share of the rollout's wall time spent computing in tools' threads, from which on it warns


class Progress:
    """Shows a progress bar of a rollout, and measures how long engine steps take with and without tools running.

    Args:
        total: the number of trajectories in this rank's batch.
        runner: runs the tools, and knows which calls are running.
        visible: whether to show the bar.

    Attributes:
        tokens: the number of tokens sampled so far.
    """

    def __init__(self, total: int, runner: ToolRunner, visible: bool) -> None:
        from tqdm.auto import tqdm

        interval = REFRESH if sys.stderr.isatty() else REFRESH_LOG
        self._bar = tqdm(
            total=total, desc="rollout", unit="traj", leave=False, disable=not visible, mininterval=interval
        )
        self._interval, self._shown = interval, time.perf_counter()
        self._runner = runner
        self._started = time.perf_counter()
        self._steps: dict[tuple[int, bool], list[float]] = defaultdict(list)  # by (requests, whether tools ran)
        self.tokens = 0

    def stepped(self, seconds: float, sampling: int, finished: Sequence[tuple[int, Completion]]) -> None:
        """Record one step of the engine.

        Args:
            seconds: its duration, in seconds.
            sampling: the number of requests that were being sampled in it.
            finished: key and completion of each request that the step finished.
        """
        self._steps[sampling, self._runner.busy > 0].append(seconds)
        self.tokens += sum(len(completion.token_ids) for _, completion in finished)

    def interrupted(self, sampled: Sequence[Completion]) -> None:
        """Count the tokens of requests that are unfinished at the end of the rollout.

        Args:
            sampled: what was sampled of each in this rollout.
        """
        self.tokens += sum(len(completion.token_ids) for completion in sampled)

    def moved(self, done: int, sampling: int, calling: int) -> None:
        """Update the progress bar, unless it was updated a moment ago.

        Args:
            done: the number of trajectories that are over.
            sampling: the number of trajectories that wait for the engine.
            calling: the number of trajectories that wait for a tool.
        """
        now = time.perf_counter()
        if self._bar.disable or now - self._shown < self._interval:
            return
        self._shown = now
        slowest = next(iter(self._runner.running()), None)
        text = f"sampling {sampling}, at tools {calling}, {self.tokens / (now - self._started):,.0f} tok/s"
        if slowest is not None:
            text += f", slowest {slowest[0]} {slowest[1]:.0f} s"
        self._bar.set_postfix_str(text, refresh=False)
        self._bar.n = done
        self._bar.refresh()

    def close(self) -> None:
        """Remove the bar."""
        self._bar.close()

    @property
    def seconds(self) -> float:
        """The seconds since the rollout began."""
        return time.perf_counter() - self._started

    def in_flight(self, rows: int) -> dict[str, float]:
        """Return how full the engine was, as metrics: the mean of the requests that a step sampled, and the share of
        steps that sampled fewer than a quarter of `rows`. It is empty where no step was taken.

        Args:
            rows: the number of conversations that are played at a time.
        """
        sampled = [(size, len(seconds)) for (size, _), seconds in self._steps.items()]
        steps = sum(count for _, count in sampled)
        if not steps:  # the batch was complete before
            return {}
        return {
            "hybrid/in_flight/occupancy": sum(size * count for size, count in sampled) / steps / rows,
            "hybrid/in_flight/alone": sum(count for size, count in sampled if 4 * size < rows) / steps,
        }

    def inflation(self) -> float | None:
        """Return how many times as long an engine step takes while tools run in threads, or None if there are no steps
        to compare.

        Medians of steps with the same number of requests are compared.
        """
        pairs = [
            (statistics.median(self._steps[size, True]) / statistics.median(quiet), len(self._steps[size, True]))
            for (size, busy), quiet in list(self._steps.items())
            if not busy and (size, True) in self._steps
        ]
        return sum(ratio * n for ratio, n in pairs) / sum(n for _, n in pairs) if pairs else None


def metrics(
    conversations: Sequence[Conversation], usage: Mapping[str, ToolUsage], progress: Progress, stream: Any
) -> dict[str, float | list[float]]:
    """Return a rollout's metrics for the trainer's logs, by name: seconds, counts and shares of this rank's rows.

    A metric of one turn (`hybrid/turn_2/sampled`) is a list with a number for each trajectory that has this turn. So
    each trajectory has the same weight in the logged mean. If each batch logged its own mean instead, batches in which
    few trajectories have the turn would weigh too much. `hybrid/turn_2/reached` has a number for every trajectory: 1 if
    it has this turn, else 0. Its mean is the share of trajectories that have this turn.

    Args:
        conversations: the rollout's conversations, finished.
        usage: counters of each tool's calls, by the tool's name.
        progress: the progress bar of this rollout, which has measured how long the rollout and its engine steps took.
        stream: the stream of requests to the engine. It may have the attributes `prompt_tokens`, the number of prompt
            tokens, and `cached_tokens`, how many of these tokens the engine found in its prefix cache.
    """
    turns = [len(c.turns) for c in conversations]
    found: dict[str, float | list[float]] = {
        "hybrid/turns/mean": statistics.fmean(turns),
        "hybrid/turns/max": float(max(turns)),
        "hybrid/trajectories/failed": float(sum(c.failure is not None for c in conversations)),
        "hybrid/tokens_per_second": progress.tokens / progress.seconds,
    }
    for index in range(TURNS_SHOWN):
        there = [c.turns[index] for c in conversations if len(c.turns) > index]
        found[f"hybrid/turn_{index + 1}/reached"] = [float(count > index) for count in turns]
        found[f"hybrid/turn_{index + 1}/sampled"] = [float(turn.sampled) for turn in there]
        found[f"hybrid/turn_{index + 1}/observed"] = [float(turn.observed) for turn in there]
    calls = sum(use.calls for use in usage.values())
    if calls:
        found["hybrid/tools/seconds_mean"] = sum(use.seconds for use in usage.values()) / calls
        found["hybrid/tools/seconds_max"] = max(use.slowest for use in usage.values())
        found["hybrid/tools/cut_off"] = float(sum(use.cut_off for use in usage.values()))
        found["hybrid/tools/mended_answers"] = float(sum(c.mended_answers for c in conversations))
    if getattr(stream, "prompt_tokens", 0):
        found["hybrid/prefix_hit_rate"] = stream.cached_tokens / stream.prompt_tokens
    inflation = progress.inflation()
    if inflation is not None:
        found["hybrid/tools/step_inflation"] = inflation
    return found


def heavy_tools(usage: Mapping[str, ToolUsage], progress: Progress, runner: ToolRunner) -> dict[str, str]:
    """Return warnings about tools that compute so much in threads of this process that the engine's steps have to wait
    for them.

    Args:
        usage: counters of each tool's calls in the rollout, by the tool's name.
        progress: has timed the rollout and its engine steps.
        runner: knows which tools run in threads of this process.

    Returns:
        The text of the warning, by the tool's name.
    """
    inflation = progress.inflation()
    beside = f" Engine steps beside tools took {inflation:.1f} times as long as without." if inflation else ""
    found = {}
    for name, use in usage.items():
        if runner.beside_the_engine(name) and use.cpu_seconds > HEAVY * progress.seconds:
            way = f"Move it out: rollout_options={{'tool_modes': {{{name!r}: 'process'}}}}."
            if name in runner.environment_methods:
                way = "Let it be a coroutine that hands the work to a process."
            found[name] = (
                f"Tool {name!r} computed for {use.cpu_seconds:.1f} s of a rollout of {progress.seconds:.1f} s, in "
                f"threads that share the interpreter with the engine.{beside} {way}"
            )
    return found
