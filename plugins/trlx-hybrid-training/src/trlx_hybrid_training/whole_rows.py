"""Whole rows of packed keys and values: each row with its own copy of what it shares with others."""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    import numpy.typing as npt


class Copies(NamedTuple):
    """The copies of some tokens of the packed sequence in whole rows.

    Attributes:
        shared: (S,) int64, the places of the tokens in the sequence.
        places: (n, S) int64, for each of them its places in the whole rows that share it; 0 where fewer than n rows
            share it.
        missing: (n, S) bool, True where `places` names no place; None if it names a place everywhere.
    """

    shared: Tensor
    places: Tensor
    missing: Tensor | None


class WholeRows(NamedTuple):
    """Indices by which one operation copies the keys (or the values) of packed rows to whole rows. In whole rows, each
    row has its own copy of what it shares with others.

    Attributes:
        lengths: the number of tokens of each whole row; M in all.
        sources: (M,) int64, for each token of the whole rows its place in the packed sequence of N tokens.
        own: (N,) int64, for each token of the sequence its place in the whole row that it stands in.
        copies: the tokens that are copied, each in one of these groups.
        left_out: int64, the tokens of rows that are left out, which stand in no whole row of their own: `own` has no
            meaning there. None where no row is left out.
    """

    lengths: tuple[int, ...]
    sources: Tensor
    own: Tensor
    copies: tuple[Copies, ...]
    left_out: Tensor | None = None


class Room(NamedTuple):
    """Sizes to which `whole_rows` fills its indices up, so that packs with different prompts have equal shapes.

    Attributes:
        copied: how many more tokens the whole rows have than the packed sequence.
        shared: S of `Copies`.
        copies: n of `Copies`.
    """

    copied: int
    shared: int
    copies: int


@functools.lru_cache(maxsize=8)
def whole_rows(
    segments: tuple[int, ...],
    prefixes: tuple[tuple[int, int], ...],
    device: torch.device,
    room: Room | None = None,
    without: tuple[int, ...] = (),
) -> WholeRows | None:
    """Return the indices that copy packed rows with these segments and prefixes (see `attention`) to whole rows; None
    where no segment has a prefix and no room is given. All layers of a forward pass use the same indices, so the last
    results are kept.

    Args:
        device: where the indices are needed.
        room: sizes that the indices are to have. What fills them up copies the sequence's first token behind the last
            row, where no query sees it and its gradient is not used.
        without: rows without a prefix that are left out: other rows' prefixes may still be theirs.
    """
    if room is None and not without and not any(tokens for _, tokens in prefixes):
        return None
    whole_lengths = (own + tokens for own, (_, tokens) in zip(segments, prefixes, strict=True))
    lengths = tuple(0 if row in without else length for row, length in enumerate(whole_lengths))
    whole_starts = [0, *accumulate(lengths)]
    of_rows = [source[:length] for source, length in zip(_sources(segments, prefixes), lengths, strict=True)]
    own = [
        np.arange(end - tokens, end) if row not in without else np.zeros(tokens, int)
        for row, (tokens, end) in enumerate(zip(segments, whole_starts[1:], strict=True))
    ]
    tokens = np.concatenate([source[:tokens] for source, (_, tokens) in zip(of_rows, prefixes, strict=True)])
    places = np.concatenate([np.arange(tokens) + start for start, (_, tokens) in zip(whole_starts, prefixes)])
    order = np.argsort(tokens, kind="stable")
    tokens, places = tokens[order], places[order]
    shared, begins, counts = np.unique(tokens, return_index=True, return_counts=True)
    nested = any(tokens and prefixes[other][1] for other, tokens in prefixes)
    sizes = np.full(len(counts), counts.max(initial=1))
    if nested:  # a token near the root of a trie has many copies, and one near its leaves few
        sizes = 1 << np.ceil(np.log2(counts)).astype(int)
    groups = []
    for size in np.unique(sizes):
        chosen = np.flatnonzero(sizes == size)
        copies = np.full((size, len(chosen)), -1)
        for copy in range(size):
            there = counts[chosen] > copy
            copies[copy, there] = places[begins[chosen[there]] + copy]
        groups.append((shared[chosen], copies))
    sources = np.concatenate(of_rows)
    if room is not None:
        ((of_group, copies),) = groups or [(np.zeros(0, int), np.zeros((0, 0), int))]
        groups = [
            (
                np.pad(of_group, (0, room.shared - len(of_group))),
                np.pad(
                    copies,
                    ((0, room.copies - copies.shape[0]), (0, room.shared - copies.shape[1])),
                    constant_values=-1,
                ),
            )
        ]
        sources = np.pad(sources, (0, sum(segments) + room.copied - len(sources)))

    def moved(array: npt.NDArray[Any]) -> Tensor:
        return torch.tensor(array).to(device, non_blocking=True)

    def copied(shared: npt.NDArray[Any], copies: npt.NDArray[Any]) -> Copies:
        missing = copies < 0
        kept = moved(missing) if room is not None or missing.any() else None
        return Copies(moved(shared), moved(copies.clip(0)), kept)

    starts = [0, *accumulate(segments)]
    left_out = [np.arange(starts[row], starts[row + 1]) for row in without]
    return WholeRows(
        lengths,
        sources=moved(sources),
        own=moved(np.concatenate(own)),
        copies=tuple(copied(*group) for group in groups),
        left_out=moved(np.concatenate(left_out)) if left_out else None,
    )


def _sources(segments: tuple[int, ...], prefixes: tuple[tuple[int, int], ...]) -> list[npt.NDArray[Any]]:
    """Return the places in the packed sequence of each whole row's tokens.

    Args:
        segments, prefixes: see `attention`.
    """
    starts = [0, *accumulate(segments)]
    known: dict[int, npt.NDArray[Any]] = {}
    for row in range(len(segments)):
        waiting = [row]
        while waiting:
            at = waiting[-1]
            other, tokens = prefixes[at]
            if tokens and other not in known:
                waiting.append(other)
                continue
            before = known[other][:tokens] if tokens else np.zeros(0, int)
            known[at] = np.concatenate([before, np.arange(starts[at], starts[at + 1])])
            waiting.pop()
    return [known[row] for row in range(len(segments))]


def whole(packed: Tensor, rows: WholeRows | None, dim: int) -> Tensor:
    """Return the keys or values of packed rows as whole rows, in which each row has its own copy of a shared prompt.
    Where no row shares a prompt, return the same tensor.

    Args:
        packed: keys or values of the N tokens of the packed sequence.
        rows: the indices; None where no row shares a prompt.
        dim: the dimension of the tokens.
    """
    if rows is None:
        return packed
    gather: Callable[..., Tensor] = _Whole.apply
    return gather(packed, rows, dim)


class _Whole(torch.autograd.Function):
    """The autograd function of `whole`, which copies keys or values of packed rows to whole rows. Its backward pass
    sums the gradients of a token's copies in one operation: always in the same order, and rounded once."""

    @staticmethod
    def forward(ctx: Any, packed: Tensor, rows: WholeRows, dim: int) -> Tensor:
        ctx.rows, ctx.dim = rows, dim
        return packed.index_select(dim, rows.sources)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        rows, dim = ctx.rows, ctx.dim
        packed = grad.index_select(dim, rows.own)
        if rows.left_out is not None:
            packed.index_fill_(dim, rows.left_out, 0)
        for of_group in rows.copies:
            shape = grad.shape[:dim] + of_group.places.shape + grad.shape[dim + 1 :]
            copied = grad.index_select(dim, of_group.places.flatten()).view(shape)
            if of_group.missing is not None:
                missing = of_group.missing.view([1] * dim + [*of_group.missing.shape] + [1] * (grad.ndim - dim - 1))
                copied = copied.masked_fill(missing, 0)
            packed.index_add_(dim, of_group.shared, copied.sum(dim))
        return packed, None, None
