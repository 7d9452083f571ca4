"""A forecast for people: a table of ranks, who sends to whom, and what would be better."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

import numpy as np

from .advice import Better
from .forecast import NVLINK, Forecast
from .intervals import Ints
from .layout import Layout
from .parameter import Model

SHADES = " .:-=+*#%@"
WIDEST = 16
"""Ranks listed one by one, and blocks of ranks in the picture."""
COLUMNS = ("receives", "floor", "sends", "send floor", "local copy", "zero", "inter-node")


def gigabytes(count: int) -> str:
    """In GB of 10⁹ bytes, small amounts in MB and kB."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size / 10:
            return f"{count / size:.2f} {unit}"
    return f"{count} B"


def report(model: Model, source: Layout, target: Layout, found: Forecast, better: Sequence[Better]) -> str:
    """The whole text."""
    world, hosts = len(found.ranks), int(found.node.max()) + 1
    head = (
        f"{model.name}: {gigabytes(model.bytes)} at {model.itemsize} bytes per element, {source} → {target}, "
        f"{_count(world, 'rank')} on {_count(hosts, 'node')}"
    )
    links = f"{gigabytes(found.intra_node_bytes)} within nodes, {gigabytes(found.inter_node_bytes)} between nodes"
    return "\n".join(
        [
            head,
            "",
            *_table(found),
            "",
            f"of rank {found.busiest}, which receives the most:",
            *(_row(kind.kind, [_cell(kind, name) for name in COLUMNS[:-1]]) for kind in found.kinds),
            "",
            f"links      {links}, all ranks together",
            f"peak       +{gigabytes(found.peak_bytes)} for what is packed or staged, on the worst rank",
            f"time       ≈ {found.seconds * 1e3:.1f} ms on the busiest link, NVLink at {NVLINK / 1e9:.0f} GB/s",
            f"planned in {found.plan_seconds * 1e3:.1f} ms on the slowest rank",
            "",
            *_picture(found.traffic),
            "",
            *_advice(better),
        ]
    )


def _table(found: Forecast) -> Iterator[str]:
    yield "rank        " + "  ".join(f"{name:>11}" for name in COLUMNS)
    for rank in found.ranks[:WIDEST]:
        yield _row(str(rank.rank), [_cell(rank, name) for name in COLUMNS])
    if len(found.ranks) > WIDEST:
        yield f"…           and {len(found.ranks) - WIDEST} more; --json lists all"
    yield _row("worst", [max(_cell(rank, name) for rank in found.ranks) for name in COLUMNS])


def _cell(rank: object, column: str) -> int:
    field = {"inter-node": "inter_receives_bytes"}.get(column, f"{column.replace(' ', '_')}_bytes")
    return int(getattr(rank, field))


def _row(name: str, cells: Sequence[int]) -> str:
    return f"{name:<10}  " + "  ".join(f"{gigabytes(cell):>11}" for cell in cells)


def _picture(traffic: Ints) -> Iterator[str]:
    """One character per pair; above `WIDEST` ranks, per pair of blocks of ranks."""
    block = -(-len(traffic) // WIDEST)
    edges = np.arange(0, len(traffic), block)
    blocks = np.add.reduceat(np.add.reduceat(traffic, edges, axis=0), edges, axis=1)
    largest = int(blocks.max())
    of = "" if block == 1 else f", each row and column {block} ranks"
    if not largest:
        yield "nothing moves between ranks"
        return
    yield f"who sends (columns) to whom (rows){of}; {SHADES[-1]} is {gigabytes(largest)}, blank is nothing"
    yield "      " + "".join(f"{int(edge) % 1000:>4}" for edge in edges)
    for edge, row in zip(edges, blocks):
        shades = [-(-int(cell) * (len(SHADES) - 1) // largest) for cell in row]
        yield f"{int(edge):>6}" + "".join(f"{SHADES[shade] * 2:>4}" for shade in shades)


def _advice(better: Sequence[Better]) -> Iterator[str]:
    now = better[0]
    if len(better) == 1:
        yield "rather     this layout: no choice of shard dimensions moves less"
        return
    for option in better[1:]:
        saved, less = now.receives_bytes - option.receives_bytes, now.sends_bytes - option.sends_bytes
        yield (
            f"rather     {option.name}: the worst rank receives {gigabytes(option.receives_bytes)} (saves "
            f"{gigabytes(max(saved, 0))}), sends {gigabytes(option.sends_bytes)} (saves {gigabytes(max(less, 0))})"
        )
    chosen = better[-1].layout.shard_dims
    for dim in sorted({dim for _, dim in chosen}):
        names = ", ".join(name.format("*") for name, its in chosen if its == dim)
        head = f"           shard_placement_fn: Shard({dim}) for "
        yield from textwrap.wrap(names, 100, initial_indent=head, subsequent_indent=" " * 13)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
