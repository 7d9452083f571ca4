"""A curriculum: an algorithm that draws more often the prompts that are sometimes solved, neither always nor never."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trlx_hybrid.contract.protocols import Algorithm, Groups
from trlx_hybrid.errors import ConfigError
from trlx_hybrid.rollout.seeding import request_seed


@dataclass(frozen=True, slots=True, kw_only=True)
class CurriculumOptions:
    """Settings of `curriculum`, which prefers prompts that are sometimes solved.

    Attributes:
        lowest: the reward, weighted and summed over functions, of a completion that is entirely wrong.
        highest: the reward, weighted and summed over functions, of a completion that is entirely right.
        explore: the share of prompts that are drawn uniformly, regardless of their solve rates; above 0 and at most 1.
        memory: the weight of the older solve rate when a prompt is sampled again, from 0 to below 1.
    """

    lowest: float = 0.0
    highest: float = 1.0
    explore: float = 0.2
    memory: float = 0.5

    def __post_init__(self) -> None:
        if not self.lowest < self.highest:
            raise ConfigError(f"curriculum: lowest={self.lowest} must be below highest={self.highest}.")
        if not (0 < self.explore <= 1 and 0 <= self.memory < 1):
            raise ConfigError(
                f"curriculum: explore={self.explore} must be above 0 and at most 1, and memory={self.memory} from 0 to "
                "below 1."
            )


class Curriculum(Algorithm):
    """An algorithm that draws training prompts with probabilities proportional to p(1 - p), where p is a prompt's
    recorded solve rate.

    A share of the draws (`CurriculumOptions.explore`) is uniform. A prompt that was never sampled counts as p = 1/2.
    Where rewards are 0 or 1, p(1 - p) is their variance, and so measures how much a group teaches.

    Source of p(1 - p): Learning to Reason at the Frontier of Learnability, arXiv 2502.12272. There, candidate prompts
    are sampled only to estimate p, and the prompts with the highest p(1 - p) are trained on. Here p is recorded from
    the groups that were sampled for training.

    Args:
        options: the user's options.
        seed: the run's seed, from which the draws follow.
    """

    name = "curriculum"

    def __init__(self, options: CurriculumOptions, seed: int) -> None:
        self._options, self._seed = options, seed
        self._rates: dict[int, float] = {}  # of solutions, by row of the dataset
        self._draws = 0

    def draw(self, count: int, size: int) -> Sequence[int]:
        """Draw prompts for the next batch, without repeats as long as there are enough.

        Args:
            count: how many prompts to draw.
            size: the number of rows in the dataset.

        Returns:
            The row numbers, in the training dataset, of the prompts that were drawn.
        """
        import torch  # not above: every process loads every plugin

        seed = request_seed(self._seed, "curriculum", self._draws, 0, 0, turn=0)
        self._draws += 1
        rates = torch.full((size,), 0.5, dtype=torch.float64)
        known = {row: rate for row, rate in self._rates.items() if row < size}
        rates[list(known)] = torch.tensor(list(known.values()), dtype=torch.float64)
        taught = rates * (1 - rates) + 1e-12
        explore = self._options.explore
        weights = explore / size + (1 - explore) * taught / taught.sum()
        # Exponential clocks: the first `count` to ring are a weighted draw without replacement.
        clocks = torch.empty(size, dtype=torch.float64).exponential_(generator=torch.Generator().manual_seed(seed))
        rows: list[int] = (clocks / weights).topk(min(count, size), largest=False).indices.tolist()
        return [rows[i % size] for i in range(count)]

    def observe(self, groups: Groups) -> None:
        """Update the recorded solve rates of the prompts of some groups. The solve rate that a group shows is its mean
        reward, scaled so that the option `lowest` gives 0 and `highest` gives 1; it is averaged with the earlier rate.

        Args:
            groups: the groups that were sampled, with their rewards and the dataset's row of each prompt.
        """
        low, high = self._options.lowest, self._options.highest
        rates = ((groups.totals.nanmean(dim=1) - low) / (high - low)).clamp(0, 1).tolist()
        for row, rate in zip(groups.rows, rates, strict=True):
            if row is not None and rate == rate:  # NaN where nothing of the group was scored
                before = self._rates.get(row, rate)
                self._rates[row] = self._options.memory * before + (1 - self._options.memory) * rate

    def note(self) -> str:
        """Return the line about this algorithm that is printed when a run starts: how prompts are drawn."""
        return f"prompts by how often they are solved, {self._options.explore:.0%} of them whatever is known"

    def state(self) -> Mapping[str, Any]:
        """Return what a checkpoint must keep: the number of draws and the solve rates of the prompts."""
        return {"draws": self._draws, "rates": {str(row): rate for row, rate in self._rates.items()}}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the number of draws and the solve rates from what `state` returned."""
        self._draws = state["draws"]
        self._rates = {int(row): rate for row, rate in state["rates"].items()}
