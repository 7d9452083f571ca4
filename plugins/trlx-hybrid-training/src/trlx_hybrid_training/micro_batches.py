"""The choice of which rows share a micro-batch. The aim is that few tokens are computed, since a prompt that several
rows of a micro-batch have is computed once; or that all micro-batches have nearly the same number of tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

PADDING = -1
"""The number that stands in a prompt's ids where there is no token."""

WORTH = 0.9
"""The default limit for sharing prompts: a prompt is computed once for several rows only if this brings the number of
computed tokens below this fraction of the number without sharing."""


@dataclass(frozen=True, slots=True)
class RowLengths:
    """The lengths of rows (prompt and completion), and how many of their tokens rows with the same prompt can share.

    Attributes:
        tokens: for each row, the number of tokens of prompt and completion.
        alike: for each row, the number of the first row that has the same prompt.
        prefixes: for each row, how many of its tokens can be shared: all tokens of its prompt except the last one.
    """

    tokens: Sequence[int]
    alike: Sequence[int]
    prefixes: Sequence[int]

    @classmethod
    def of(cls, prompts: Tensor, tokens: Sequence[int]) -> RowLengths:
        """Build the lengths of rows from their prompts and their numbers of tokens.

        Args:
            prompts: (B, P) int64 on the CPU, `PADDING` where there is no token.
            tokens: for each row, the number of tokens of prompt and completion.
        """
        first: dict[bytes, int] = {}
        alike = [first.setdefault(prompt.tobytes(), row) for row, prompt in enumerate(prompts.numpy())]
        return cls(tokens, alike, [max(0, int(n) - 1) for n in (prompts != PADDING).sum(1)])

    def packed(self, rows: Iterable[int], below: float = WORTH) -> int:
        """Return how many tokens one forward pass of these rows computes, if they are packed into one sequence.

        Args:
            rows: numbers of the rows.
            below: a fraction. If computing each common prompt once brings the number of tokens below this fraction of
                the number without sharing, the result counts each common prompt once. Otherwise it counts the prompt of
                every row.
        """
        rows = list(rows)
        whole = sum(self.tokens[row] for row in rows)
        once = {self.alike[row]: self.prefixes[row] for row in rows}
        left = whole - sum(self.prefixes[row] for row in rows) + sum(once.values())
        return left if left < below * whole else whole


def equal_tokens(tokens: Sequence[int], count: int) -> list[list[int]]:
    """Split rows into `count` groups, which become micro-batches, with equally many rows and nearly equally many
    tokens.

    The longest rows go first, each into the group that has the fewest tokens and still has room.

    Args:
        tokens: the number of tokens of each row.
        count: the number of groups; it must divide the number of rows.

    Returns:
        For each group its row numbers, ascending.
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
    """Split rows into `count` groups, which become micro-batches, with equally many rows. Rows with the same prompt are
    put together as far as this saves tokens that must be computed.

    No group computes more tokens than the largest group of `equal_tokens`, which decides how much memory is needed.

    Args:
        lengths: the lengths and prompts of the rows.
        count: the number of groups; it must divide the number of rows.

    Returns:
        For each group its row numbers, ascending.
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
    """Split rows into `count` groups like `equal_tokens`, but add up to `most` rows with the same prompt to a group at
    once.

    Args:
        lengths: the lengths and prompts of the rows.
        count: the number of groups.
        most: the largest number of rows that are added at once.

    Returns:
        For each group its row numbers, ascending.
    """
    tokens, alike, prefixes = lengths.tokens, lengths.alike, lengths.prefixes
    of_prompt: dict[int, list[int]] = {}
    for row in sorted(range(len(tokens)), key=lambda row: (-tokens[row], row)):
        of_prompt.setdefault(alike[row], []).append(row)
    chunks = []
    for rows in of_prompt.values():
        pieces = -(-len(rows) // most)
        chunks += [rows[piece::pieces] for piece in range(pieces)]  # with rows of about the same lengths in each piece
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
