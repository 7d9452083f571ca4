"""Which trajectories of a run a report shows: a file may hold many thousands."""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from .record import Recorded

EACH = 6  # best, worst, failed and other trajectories, and prompts that come again
TIMES = 5  # completions of a prompt that comes again
TOKENS = 12_000  # of all trajectories that are shown token by token: 1 MB


@dataclass(slots=True, kw_only=True)
class Chosen:
    """Which trajectories of a file the page shows, by their line.

    Attributes:
        lists: by what they are, those shown token by token.
        again: of prompts that come again, lines at some of their steps.
        total, failed: how many the file has.
        long: how many of `lists` were left out for their length.
    """

    lists: dict[str, list[int]] = field(default_factory=dict)
    again: list[list[int]] = field(default_factory=list)
    total: int = 0
    failed: int = 0
    long: int = 0


def choose(recorded: Iterable[Recorded]) -> Chosen:
    """The best, the worst, failed ones and some from the whole run, as far as `TOKENS` go; and prompts that come again.

    Holds a few numbers of each trajectory in memory.
    """
    seen: list[tuple[int, float | None, bool]] = []  # line, reward, failed
    tokens: dict[int, int] = {}
    prompts: dict[int, dict[int, int]] = defaultdict(dict)  # the last line of each step: of the last start
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
    """The first, the last, and evenly those between."""
    if len(values) <= count:
        return values
    return [values[round(i * (len(values) - 1) / (count - 1))] for i in range(count)]
