"""The selection of trajectories that a report shows, since a file may hold many thousands."""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from .record import Recorded

EACH = 6  # best, worst, failed and other trajectories, and prompts that come again
TIMES = 5  # completions of a prompt that comes again
TOKENS = 12_000  # of all trajectories shown token by token: a page of 1 MB


@dataclass(slots=True, kw_only=True)
class Chosen:
    """A selection of a file's trajectories for the page of a run, by their line numbers in the file.

    Attributes:
        lists: lines of the trajectories that are shown token by token, by the name of their list.
        again: for each prompt that was sampled at several steps, the lines of its trajectories at some of these steps.
        total: number of trajectories in the file.
        failed: number of failed ones among them.
        long: number of trajectories that were left out of `lists` for their length.
    """

    lists: dict[str, list[int]] = field(default_factory=dict)
    again: list[list[int]] = field(default_factory=list)
    total: int = 0
    failed: int = 0
    long: int = 0


def choose(recorded: Iterable[Recorded]) -> Chosen:
    """Choose the best, worst, failed and evenly spaced trajectories, up to `TOKENS` tokens, and prompts that recur.

    Holds a few numbers of each trajectory in memory.
    """
    seen: list[tuple[int, float | None, bool]] = []  # line, reward, failed
    tokens: dict[int, int] = {}
    prompts: dict[int, dict[int, int]] = defaultdict(dict)  # by prompt and step: the last line, of the last start
    for one in recorded:
        seen.append((one.line, one.reward, one.failed))
        tokens[one.line] = len(one.prompt_ids) + len(one.completion_ids)
        prompts[hash(tuple(one.prompt_ids))][one.step] = one.line
    scored = [(reward, line) for line, reward, _ in seen if reward is not None and math.isfinite(reward)]
    failed = [line for line, _, failed in seen if failed]
    candidates = {
        "best": [line for _, line in heapq.nlargest(EACH, scored)],
        "worst": [line for _, line in heapq.nsmallest(EACH, scored)],
        "failed": failed[-EACH:],
        "over the run": _spread([line for line, _, _ in seen], EACH),
    }
    found = Chosen(total=len(seen), failed=len(failed), lists={name: [] for name in candidates})
    left, shown, skipped = TOKENS, set[int](), set[int]()
    for place in range(EACH):
        for name, lines in candidates.items():
            if place >= len(lines):
                continue
            line = lines[place]
            if line not in shown and tokens[line] > left:
                skipped.add(line)
                continue
            left -= tokens[line] if line not in shown else 0
            shown.add(line)
            found.lists[name].append(line)
    found.long = len(skipped)
    repeated = sorted((steps for steps in prompts.values() if len(steps) > 1), key=len, reverse=True)[:EACH]
    found.again = [[steps[step] for step in _spread(sorted(steps), TIMES)] for steps in repeated]
    return found


def _spread(values: list[int], count: int) -> list[int]:
    """Return at most `count` of the values: the first, the last, and evenly spaced ones between."""
    if len(values) <= count:
        return values
    return [values[round(i * (len(values) - 1) / (count - 1))] for i in range(count)]
