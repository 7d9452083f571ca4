"""`trlx-hybrid reshard-plan`: what a reshard costs, from a config alone, before any GPU is asked for."""

from __future__ import annotations

import argparse
import dataclasses
import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from trlx_hybrid.errors import ConfigError, did_you_mean

from ..layouts import MeshLayout, Model
from ..sharding import Ints
from .advice import Better, alternatives
from .architectures import SHAPES, describe
from .forecast import NETWORK, NVLINK, Forecast, forecast

SIZES = {"bf16": 2, "fp16": 2, "fp32": 4}
GPUS_PER_NODE = 8
TRAIN_KEYS = ("dp", "fsdp", "tp", "pp")
ROLLOUT_KEYS = ("dp", "tp", "pp", "ep")
EPILOG = "example: trlx-hybrid reshard-plan --model 7b --train fsdp=4 --rollout tp=2"
SHADES = " .:-=+*#%@"
WIDEST = 16
"""Ranks listed one by one, and blocks of ranks in the picture."""
COLUMNS = ("receives", "floor", "sends", "send floor", "local copy", "zero", "inter-node")


def add_command(commands: Any) -> None:
    """Add `reshard-plan` to the sub-parsers of a command line; its `run` takes the options, returns the exit status."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "reshard-plan", help="say which bytes a reshard moves between which ranks", description=__doc__, epilog=EPILOG
    )
    parser.add_argument(
        "--model",
        required=True,
        metavar="CONFIG",
        help=f"config.json, a folder with one, or a shape: {', '.join(SHAPES)}",
    )
    parser.add_argument("--train", required=True, metavar="LAYOUT", help=f"e.g. fsdp=8; keys: {', '.join(TRAIN_KEYS)}")
    parser.add_argument(
        "--rollout", required=True, metavar="LAYOUT", help=f"e.g. tp=4,pp=2; keys: {', '.join(ROLLOUT_KEYS)}"
    )
    parser.add_argument(
        "--nodes", type=int, help=f"machines the ranks are spread over (default: {GPUS_PER_NODE} ranks each)"
    )
    parser.add_argument("--dtype", choices=SIZES, default="bf16", help="on the wire (default: bf16)")
    parser.add_argument(
        "--network",
        type=float,
        default=NETWORK / 1e9,
        metavar="GB/S",
        help="per rank between nodes (default: %(default)g)",
    )
    parser.add_argument(
        "--back", action="store_true", help="plan the way back, from the rollout to the training layout"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(options: Any) -> int:
    """Print the forecast.

    Raises:
        ConfigError: the model, a layout or the nodes cannot be; names the culprit and the way out.
    """
    model = load(options.model, SIZES[options.dtype])
    train = parsed(options.train, "--train", TRAIN_KEYS)
    rollout = parsed(options.rollout, "--rollout", ROLLOUT_KEYS).served()
    if "dp" not in options.rollout:
        rollout = rollout.over(train.world)
    if options.network <= 0:
        raise ConfigError(f"--network {options.network:g} is no bandwidth. Give GB/s per rank, e.g. 50.")
    per_node = _ranks_per_node(train.world, options.nodes)
    source, target = (rollout, train) if options.back else (train, rollout)
    found = forecast(model, source, target, ranks_per_node=per_node, network=options.network * 1e9)
    better = alternatives(model, train, rollout, ranks_per_node=per_node, back=options.back)
    if options.json:
        print(json.dumps(_as_dict(model, source, target, found, better), indent=2))
    else:
        print(report(model, source, target, found, better))
    return 0


def load(given: str, itemsize: int = 2) -> Model:
    """The model of a config.json, of a folder with one, or of a shape's name.

    Raises:
        ConfigError: there is no such file or shape, or it describes no model known here.
    """
    if given.lower() in SHAPES:
        return describe(SHAPES[given.lower()], name=given.lower(), itemsize=itemsize)
    file = Path(given) / "config.json" if Path(given).is_dir() else Path(given)
    if not file.is_file():
        hint = did_you_mean(given.lower(), SHAPES)
        raise ConfigError(f"--model {given}: no such file or shape.{hint} Shapes: {', '.join(SHAPES)}.")
    try:
        fields = json.loads(file.read_text())
        kind = fields["model_type"]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"--model {given}: {file} is no transformers config: {error!r}.") from error
    # Published configs leave out what is the default of their class, so the class is asked: it costs an import.
    from transformers import AutoConfig

    try:
        config = AutoConfig.for_model(**fields)
    except ValueError as error:
        raise ConfigError(f"--model {given}: transformers knows no model_type {kind!r}.") from error
    return describe(config, name=file.parent.name if file.name == "config.json" else file.stem, itemsize=itemsize)


def parsed(text: str, flag: str, keys: tuple[str, ...]) -> MeshLayout:
    """A layout from `key=size,…`.

    Raises:
        ConfigError: names the flag and the part of it that is wrong.
    """
    sizes: dict[str, Any] = {}
    for part in text.split(","):
        key, _, size = part.strip().partition("=")
        if key not in keys:
            hint = did_you_mean(key, keys)
            raise ConfigError(f"{flag} {text}: unknown key {key!r}.{hint} Keys: {', '.join(keys)}.")
        if key in sizes:
            raise ConfigError(f"{flag} {text}: {key} is given twice.")
        if not size.isdecimal() or int(size) < 1:
            raise ConfigError(f"{flag} {text}: {key}={size} is no size. Write e.g. {key}=4.")
        sizes[key] = int(size)
    return MeshLayout(**sizes)


def _ranks_per_node(world: int, hosts: int | None) -> int:
    if hosts is None:
        return min(world, GPUS_PER_NODE)
    if hosts < 1 or world % hosts:
        raise ConfigError(f"--nodes {hosts} does not divide {world} ranks. Every node has the same number of them.")
    return world // hosts


def _as_dict(
    model: Model, source: MeshLayout, target: MeshLayout, found: Forecast, better: Sequence[Better]
) -> dict[str, Any]:
    return {
        "model": model.name,
        "model_bytes": model.bytes,
        "source": str(source),
        "target": str(target),
        "nodes": found.nodes,
        "per_rank": found.ranks,
        "busiest_rank": found.busiest,
        "busiest_rank_kinds": found.kinds,
        "intra_node_bytes": found.intra_node_bytes,
        "inter_node_bytes": found.inter_node_bytes,
        "peak_bytes": found.peak_bytes,
        "seconds": found.seconds,
        "plan_seconds": found.plan_seconds,
        "layouts": [dataclasses.asdict(option) | {"shard_dims": dict(option.shard_dims)} for option in better],
    }


def gigabytes(count: int) -> str:
    """In GB of 10⁹ bytes, small amounts in MB and kB."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size / 10:
            return f"{count / size:.2f} {unit}"
    return f"{count} B"


def report(model: Model, source: MeshLayout, target: MeshLayout, found: Forecast, better: Sequence[Better]) -> str:
    """The whole text."""
    head = (
        f"{model.name}: {gigabytes(model.bytes)} at {model.itemsize} bytes per element, {source} → {target}, "
        f"{_count(len(found.ranks), 'rank')} on {_count(found.nodes, 'node')}"
    )
    links = f"{gigabytes(found.intra_node_bytes)} within nodes, {gigabytes(found.inter_node_bytes)} between nodes"
    return "\n".join(
        [
            head,
            "",
            *_table(found),
            "",
            f"of rank {found.busiest}, which receives the most:",
            *(_row(kind["kind"], [_cell(kind, name) for name in COLUMNS[:-1]]) for kind in found.kinds),
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
        yield _row(str(rank["rank"]), [_cell(rank, name) for name in COLUMNS])
    if len(found.ranks) > WIDEST:
        yield f"…           and {len(found.ranks) - WIDEST} more; --json lists all"
    yield _row("worst", [max(_cell(rank, name) for rank in found.ranks) for name in COLUMNS])


def _cell(row: Mapping[str, Any], column: str) -> int:
    return int(row["inter_receives_bytes" if column == "inter-node" else f"{column.replace(' ', '_')}_bytes"])


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
    chosen = better[-1].shard_dims
    for dim in sorted({dim for _, dim in chosen}):
        names = ", ".join(name.format("*") for name, its in chosen if its == dim)
        head = f"           shard_placement_fn: Shard({dim}) for "
        yield from textwrap.wrap(names, 100, initial_indent=head, subsequent_indent=" " * 13)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
