"""Who gets what, and what becomes of the results. Pure functions of a rule, a grid and data; nothing is sent here.

The single-controller programming model is HybridFlow's (arXiv:2409.19256, section 4).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .batch import Chunks, join, rows_of, split, unpadded
from .failure import DispatchError
from .grid import Grid
from .reduction import reduce
from .register import Rule


@dataclass(frozen=True, slots=True)
class Deal:
    """One call, planned.

    Attributes:
        ranks: who is called, in order. "Position" below is an index into it.
        parcels: the distinct first arguments; empty where all arguments go to everyone.
        parcel_of: by position, the parcel it gets.
        collected: the positions whose results count, in the order in which they are put together.
        keywords: by parcel, arguments that come with it: the mask of its padding.
        chunks: of a batch that was cut; None where none was, or where its rows are known to the workers only.
    """

    ranks: Sequence[int]
    parcels: Sequence[Any]
    parcel_of: Sequence[int]
    collected: range
    keywords: Sequence[Mapping[str, Any]] = ()
    chunks: Chunks | None = None


def whole(rule: Rule, grid: Grid) -> Deal:
    """Everyone gets the same arguments, or rank 0 does."""
    ranks = range(1 if rule.dispatch == "rank_zero" else grid.ranks)
    collected = range(0, len(ranks), grid.tensor_parallel if rule.dispatch == "reduce" else 1)
    return Deal(ranks, (), (), collected[:1] if rule.dispatch == "broadcast" else collected)


def dealt(rule: Rule, grid: Grid, first: Any) -> Deal:
    """The first argument is dealt out.

    Raises:
        DispatchError: it cannot be cut, or has not as many items as there are workers or replicas.
    """
    if rule.dispatch == "all_to_all":
        parcels = _items(rule, first, grid.ranks, "workers")
        return Deal(range(grid.ranks), parcels, range(grid.ranks), range(grid.ranks))
    if rule.dispatch == "replicate":
        return by_replica(grid, _items(rule, first, grid.replicas, "replicas"))
    chunks = Chunks.of(rows_of(first), grid.replicas, padded=rule.pad is not None)
    keywords = [{rule.pad: mask} for mask in chunks.masks()] if rule.pad is not None else ()
    return by_replica(grid, split(first, chunks), keywords, chunks)


def by_replica(
    grid: Grid, parcels: Sequence[Any], keywords: Sequence[Mapping[str, Any]] = (), chunks: Chunks | None = None
) -> Deal:
    """A parcel for each replica, whose ranks all get it."""
    size = grid.tensor_parallel
    parcel_of = range(grid.ranks) if size == 1 else [rank // size for rank in range(grid.ranks)]
    return Deal(range(grid.ranks), parcels, parcel_of, range(0, grid.ranks, size), keywords, chunks)


def collect(rule: Rule, deal: Deal, results: Sequence[Any]) -> Any:
    """What the caller gets, of the results of all positions.

    Raises:
        DispatchError: the results cannot be put together.
    """
    counted = [results[position] for position in deal.collected]
    if rule.dispatch in ("broadcast", "rank_zero"):
        return counted[0]
    if rule.dispatch == "scatter":
        return join(counted, deal.chunks)
    if rule.dispatch == "reduce":
        return reduce(rule.reduction, counted, deal.chunks.real if deal.chunks else [1] * len(counted))
    return counted


def part(deal: Deal, position: int, result: Any) -> tuple[int, range | None, Any]:
    """Of one result that counts: its place in their order, the batch's rows that it is of, the result unpadded."""
    number = deal.collected.index(position)
    if deal.chunks is None:
        return number, None, result
    return number, deal.chunks.rows[number], unpadded(result, deal.chunks, number)


def restricted(deal: Deal, positions: Sequence[int]) -> Deal:
    """The same call as seen by the workers at some positions only, with the parcels that these get."""
    ranks = [deal.ranks[p] for p in positions]
    if not deal.parcels:
        return replace(deal, ranks=ranks)
    wanted = sorted({deal.parcel_of[p] for p in positions})
    renumbered = {parcel: index for index, parcel in enumerate(wanted)}
    return replace(
        deal,
        ranks=ranks,
        parcels=[deal.parcels[parcel] for parcel in wanted],
        parcel_of=[renumbered[deal.parcel_of[p]] for p in positions],
        keywords=[deal.keywords[parcel] for parcel in wanted] if deal.keywords else (),
    )


def _items(rule: Rule, first: Any, count: int, what: str) -> Sequence[Any]:
    if not isinstance(first, (list, tuple)) or len(first) != count:
        given = f"{len(first)} items" if isinstance(first, (list, tuple)) else f"a {type(first).__name__}"
        raise DispatchError(
            f"{rule.name} is registered as {rule.dispatch!r}: its first argument is a list with an item for each of "
            f"the {count} {what}, and it got {given}."
        )
    return first
