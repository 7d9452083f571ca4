"""The goals, and which of them the results miss."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from trlx_hybrid.config import build

from .result import RESULTS

GOALS = RESULTS.parent / "goals.toml"


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """A bound that a metric must keep.

    Attributes:
        benchmark, metric: whose result, and which of its metrics.
        device: shell pattern of the devices it holds on.
        at_least, at_most: the bound; exactly one of them.
    """

    benchmark: str
    metric: str
    device: str = "*"
    at_least: float | None = None
    at_most: float | None = None

    def __post_init__(self) -> None:
        if (self.at_least is None) == (self.at_most is None):
            raise ValueError(f"Goal {self.benchmark}.{self.metric} needs exactly one of at_least and at_most.")

    @property
    def bound(self) -> str:
        """In words."""
        return f"at least {self.at_least:g}" if self.at_least is not None else f"at most {self.at_most:g}"

    def met_by(self, value: float) -> bool:
        """NaN meets nothing."""
        return (self.at_least is None or value >= self.at_least) and (self.at_most is None or value <= self.at_most)


def load(file: Path = GOALS) -> list[Goal]:
    """The goals of a file, in its order."""
    return [build(Goal, table, file.name) for table in tomllib.loads(file.read_text())["goal"]]


def misses(goal: Goal, results: Path = RESULTS) -> Iterator[str]:
    """One line for each result in the folder `results` that misses the goal, or one saying that none was measured."""
    measured = list(_results_for(goal, results))
    if not measured:
        yield f"{goal.benchmark} on {goal.device}: {goal.metric} not measured, goal {goal.bound}"
    for result in measured:
        value = result["metrics"].get(goal.metric)
        if value is None or not goal.met_by(value):
            found = "not measured" if value is None else f"is {value:.4g}"
            yield f"{goal.benchmark} on {result['device']}: {goal.metric} {found}, goal {goal.bound}"


def _results_for(goal: Goal, folder: Path) -> Iterator[dict[str, Any]]:
    for file in sorted(folder.glob(f"{goal.benchmark}-*.json")):
        result = json.loads(file.read_text())
        if result["benchmark"] == goal.benchmark and fnmatchcase(result["device"], goal.device):
            yield result
