"""Which rows share a micro-batch, by the tokens that it then computes: rows with the same prompt compute it once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

PADDING = -1
"""Stands in a prompt where there is no token."""

WORTH = 0.9
"""Prompts are shared where that leaves less than this part of the tokens."""


@dataclass(frozen=True, slots=True)
class RowLengths:
    """How many tokens rows have, and which of them they may share.

    Attributes:
        tokens: of each row, prompt and completion.
        alike: of each row, the first row that has the same prompt.
        prefixes: of each row, the tokens of its prompt but for the last, which each row keeps.
    """

    tokens: Sequence[int]
    alike: Sequence[int]
    prefixes: Sequence[int]

    @classmethod
    def of(cls, prompts: Tensor, tokens: Sequence[int]) -> RowLengths:
        """Of rows with these prompts: (B, P) int64 on the CPU, `PADDING` where there is no token."""
        first: dict[bytes, int] = {}
        alike = [first.setdefault(prompt.tobytes(), row) for row, prompt in enumerate(prompts.numpy())]
        return cls(tokens, alike, [max(0, int(n) - 1) for n in (prompts != PADDING).sum(1)])

    def packed(self, rows: Iterable[int], below: float = WORTH) -> int:
        """Tokens that one forward pass of these rows computes.

        Args:
            below: prompts are shared where that leaves less than this part of the tokens.
        """
        rows = list(rows)
        whole = sum(self.tokens[row] for row in rows)
        once = {self.alike[row]: self.prefixes[row] for row in rows}
        left = whole - sum(self.prefixes[row] for row in rows) + sum(once.values())
        return left if left < below * whole else whole


def equal_tokens(tokens: Sequence[int], count: int) -> list[list[int]]:
    """Rows in `count` groups of equally many, the sums of their tokens close together: the longest first, each into the
    group that has the fewest tokens and still has room.

    Args:
        tokens: of each row; as many rows as `count` divides.

    Returns:
        Row numbers, ascending within each group.
    """
    size = len(tokens) // count
    groups: list[list[int]] = [[] for _ in range(count)]
    sums = [0] * count
    for row in sorted(range(len(tokens)), key=lambda row: (-tokens[row], row)):
        group = min((g for g in range(count) if len(groups[g]) < size), key=lambda g: sums[g])
        groups[group].append(row)
        sums[group] += tokens[row]
    return [sorted(group) for group in groups]


def fewest_tokens(lengths: RowLengths, count: int) -> list[list[int]]:
    """Rows in `count` groups of equally many, of as few tokens in all as keeping the rows of a prompt together brings.
    No group computes more than the largest of `equal_tokens` would without sharing: it decides the memory.

    Returns:
        Row numbers, ascending within each group.
    """
    apart = equal_tokens(lengths.tokens, count)
    allowed = max(sum(lengths.tokens[row] for row in group) for group in apart)
    plans, most = [apart], len(lengths.tokens) // count
    while most > 1:
        plans.append(_together(lengths, count, most))
        most //= 2

    def cost(plan: list[list[int]]) -> tuple[bool, int, int]:
        packed = [lengths.packed(group) for group in plan]
        return max(packed) > allowed, sum(packed), max(packed)

    return min(plans, key=cost)


def _together(lengths: RowLengths, count: int, most: int) -> list[list[int]]:
    """As `equal_tokens`, but up to `most` rows of a prompt at a time."""
    tokens, alike, prefixes = lengths.tokens, lengths.alike, lengths.prefixes
    of_prompt: dict[int, list[int]] = {}
    for row in sorted(range(len(tokens)), key=lambda row: (-tokens[row], row)):
        of_prompt.setdefault(alike[row], []).append(row)
    chunks = []
    for rows in of_prompt.values():
        pieces = -(-len(rows) // most)
        chunks += [rows[piece::pieces] for piece in range(pieces)]  # of rows as long as those of the others
    size = len(tokens) // count
    groups: list[list[int]] = [[] for _ in range(count)]
    sums, held = [0] * count, [set[int]() for _ in range(count)]
    for chunk in sorted(chunks, key=lambda rows: -lengths.packed(rows, below=1.0)):
        prompt, prefix = alike[chunk[0]], prefixes[chunk[0]]
        while chunk:
            fitting = min(len(chunk), size - min(map(len, groups)))
            part, chunk = chunk[:fitting], chunk[fitting:]
            sums_with = [sums[g] + (0 if prompt in held[g] else prefix) for g in range(count)]
            group = min((g for g in range(count) if len(groups[g]) + fitting <= size), key=sums_with.__getitem__)
            groups[group] += part
            held[group].add(prompt)
            sums[group] = sums_with[group] + sum(tokens[row] - prefix for row in part)
    return [sorted(group) for group in groups]
