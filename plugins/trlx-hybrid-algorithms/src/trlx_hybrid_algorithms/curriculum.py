"""Which prompts are sampled: those that are sometimes solved."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from trlx_hybrid.protocols import Algorithm, Groups

from .options import CurriculumOptions


class Curriculum(Algorithm):
    """Draws prompts in proportion to p(1 - p), p being how often they were solved; what was never sampled counts as
    p = 1/2. Where rewards are 0 or 1, that is their variance, and so how much a group teaches.

    Source: Learning to Reason at the Frontier of Learnability, arXiv 2502.12272.
    """

    name = "curriculum"

    def __init__(self, options: CurriculumOptions, seed: int) -> None:
        self._options, self._seed = options, seed
        self._rates: dict[int, float] = {}  # of solutions, by row of the dataset
        self._draws = 0

    def draw(self, count: int, size: int) -> Sequence[int]:
        """Different rows, as long as there are enough."""
        generator = random.Random(f"{self._seed}/{self._draws}")
        self._draws += 1
        # Exponential clocks: the first `count` to ring are a weighted draw without replacement.
        clocks = sorted((generator.expovariate(1.0) / self._weight(row), row) for row in range(size))
        rows = [row for _, row in clocks]
        return [rows[i % size] for i in range(count)]

    def _weight(self, row: int) -> float:
        rate = self._rates.get(row, 0.5)
        explore = self._options.explore
        return explore + (1 - explore) * 4 * rate * (1 - rate)

    def observe(self, groups: Groups) -> None:
        """Note how often each prompt was solved."""
        low, high = self._options.lowest, self._options.highest
        rates = ((groups.totals.nanmean(dim=1) - low) / (high - low)).clamp(0, 1).tolist()
        for row, rate in zip(groups.rows, rates, strict=True):
            if row is not None and rate == rate:  # NaN where nothing of the group was scored
                before = self._rates.get(row, rate)
                self._rates[row] = self._options.memory * before + (1 - self._options.memory) * rate

    def note(self) -> str:
        """How it draws."""
        return f"prompts by how often they are solved, {self._options.explore:.0%} of the weight to all alike"

    def state(self) -> Mapping[str, Any]:
        """What it knows of prompts."""
        return {"draws": self._draws, "rates": {str(row): rate for row, rate in self._rates.items()}}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take it up."""
        self._draws = state["draws"]
        self._rates = {int(row): rate for row, rate in state["rates"].items()}
