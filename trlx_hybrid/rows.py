"""Which global row and turn each prompt of a rollout belongs to, so that its seed does not depend on rank or order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Place:
    """Where a request stands: `row` counts completions over all ranks, `turn` within the trajectory."""

    row: int
    turn: int


class RowTracker:
    """Places the prompts of one rollout phase on this rank.

    The first call holds every row of this rank. TRL's tool loop then calls again with the rows that go on, each
    prompt being what was sampled so far plus the tool's answer: such a prompt is recognised by its prefix.

    Args:
        first_row: global row of this rank's first prompt.
    """

    def __init__(self, first_row: int) -> None:
        self._first_row = first_row
        self._sequences: list[list[int]] = []
        self._turns: list[int] = []
        self._calls = 0

    def __len__(self) -> int:
        return len(self._sequences)

    def place(self, prompts: Sequence[list[int]]) -> list[Place]:
        """A place for each prompt, in order. TRL keeps the order of rows, so each search starts after the last hit."""
        self._calls += 1
        if not self._sequences:
            self._sequences = [list(p) for p in prompts]
            self._turns = [0] * len(prompts)
            return [Place(self._first_row + i, 0) for i in range(len(prompts))]
        places, start = [], 0
        for index, prompt in enumerate(prompts):
            hit = next((i for i in range(start, len(self._sequences)) if _continues(prompt, self._sequences[i])), None)
            if hit is None:  # a custom rollout asks for something of its own: the call's number keeps it distinct
                places.append(Place(self._first_row + index, self._calls - 1))
                continue
            start = hit + 1
            self._turns[hit] += 1
            places.append(Place(self._first_row + hit, self._turns[hit]))
        return places

    def extend(self, places: Sequence[Place], prompts: Sequence[list[int]], completions: Sequence[list[int]]) -> None:
        """Remember what was sampled, for the next turn."""
        for place, prompt, completion in zip(places, prompts, completions, strict=True):
            index = place.row - self._first_row
            if index < len(self._sequences):
                self._sequences[index] = [*prompt, *completion]


def _continues(prompt: list[int], sequence: list[int]) -> bool:
    return len(prompt) > len(sequence) and prompt[: len(sequence)] == sequence
