"""The selection of a few trajectories for the page that reports on a run (`trlx-hybrid report`), because a run may
record many thousands."""

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
    """A selection of a file's trajectories for the page that reports on a run. A trajectory is identified by the number
    of its line in the file; the first line is 1.

    Attributes:
        lists: the lines of the trajectories that the page shows token by token, by the title of their list: "best",
            "worst", "failed", "over the run".
        again: the lines of trajectories with the same prompt at different steps, a list per prompt, in the order of the
            steps.
        total: the number of trajectories in the file.
        failed: how many of them failed, that is, have no trained token.
        long: how many trajectories were left out of `lists`, because the page shows a limited number of tokens.
    """

    lists: dict[str, list[int]] = field(default_factory=dict)
    again: list[list[int]] = field(default_factory=list)
    total: int = 0
    failed: int = 0
    long: int = 0


def choose(recorded: Iterable[Recorded]) -> Chosen:
    """Choose the trajectories that the report on a run shows: those with the best and the worst rewards, failed ones
    (no token is trained on), evenly spaced ones, and those of prompts that were sampled at several steps.

    All but the last kind are shown token by token, and have at most `TOKENS` tokens together. Only a few numbers per
    trajectory are kept in memory.

    Args:
        recorded: all trajectories of a file, in its order.
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
    """Return at most `count` of the values: the first, the last, and evenly spaced ones in between."""
    if len(values) <= count:
        return values
    return [values[round(i * (len(values) - 1) / (count - 1))] for i in range(count)]
