"""The goals, the results that miss them, and the results that are older than the code they measured."""

from __future__ import annotations

import json
import subprocess
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from trlx_hybrid.config import build

from . import BENCHMARKS
from .result import RESULTS, measured_at

GOALS = RESULTS.parent / "goals.toml"
ROOT = RESULTS.parents[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """A bound that a metric must keep.

    Attributes:
        benchmark: the benchmark whose results are checked.
        metric: name of the metric in the result.
        device: shell pattern of the devices that the goal applies to.
        at_least, at_most: the bound; exactly one of them is given.
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
        """The bound in words."""
        return f"at least {self.at_least:g}" if self.at_least is not None else f"at most {self.at_most:g}"

    def met_by(self, value: float) -> bool:
        """Return whether a value meets the goal; NaN does not."""
        return (self.at_least is None or value >= self.at_least) and (self.at_most is None or value <= self.at_most)


def load(file: Path = GOALS) -> list[Goal]:
    """Return the goals of a file, in its order."""
    return [build(Goal, table, file.name) for table in tomllib.loads(file.read_text())["goal"]]


def misses(goal: Goal, results: Path = RESULTS) -> Iterator[str]:
    """Yield a line for each result in the folder `results` that misses the goal, or one line if there is no result."""
    measured = list(_results(goal.benchmark, goal.device, results))
    if not measured:
        yield f"{goal.benchmark} on {goal.device}: {goal.metric} not measured, goal {goal.bound}"
    for result in measured:
        value = result["metrics"].get(goal.metric)
        if value is None or not goal.met_by(value):
            found = "not measured" if value is None else f"is {value:.4g}"
            yield f"{goal.benchmark} on {result['device']}: {goal.metric} {found}, goal {goal.bound}"


def measured_code(file: Path = GOALS) -> dict[str, list[str]]:
    """Return the files and folders that each benchmark measures, as paths from the root of the repository."""
    found: dict[str, list[str]] = tomllib.loads(file.read_text()).get("code", {})
    return found


def module_of(benchmark: str) -> str:
    """Return the module that writes results of this name: `capacity` writes `capacity_kv`."""
    return max((name for name in BENCHMARKS if f"{benchmark}_".startswith(f"{name}_")), key=len, default=benchmark)


def stale(
    benchmarks: Iterable[str], code: Mapping[str, Sequence[str]], results: Path = RESULTS, root: Path = ROOT
) -> Iterator[str]:
    """Yield a line for each result in the folder `results` whose code a commit has changed since it was measured.

    Where its cases were measured at different commits, each of these commits has its own line.
    """
    for benchmark in benchmarks:
        paths = code.get(module_of(benchmark), ())
        for result in _results(benchmark, "*", results) if paths else ():
            cases: dict[str | None, list[str]] = {}
            for case, at in measured_at(result).items():
                cases.setdefault(at["commit"], []).append(case)
            for commit, measured in cases.items():
                why = _changed_since(commit, paths, root)
                if why is not None:
                    which = f" ({', '.join(measured)})" if len(cases) > 1 else ""
                    yield f"{benchmark} on {result['device']}{which}: {why}"


def _changed_since(commit: str | None, paths: Sequence[str], root: Path) -> str | None:
    if commit is None:
        return "it does not say at which commit it was measured"
    command = ["git", "log", "--format=%h", f"{commit}..HEAD", "--", *paths]
    try:
        found = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout.split()
    except (OSError, subprocess.CalledProcessError):
        return f"measured at {commit:.7}, which git does not know here"
    return f"measured at {commit:.7}; its code was changed since by {found[0]} ({len(found)} in all)" if found else None


def _results(benchmark: str, device: str, folder: Path) -> Iterator[dict[str, Any]]:
    for file in sorted(folder.glob(f"{benchmark}-*.json")):
        result = json.loads(file.read_text())
        if result["benchmark"] == benchmark and fnmatchcase(result["device"], device):
            yield result
