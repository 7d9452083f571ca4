"""The command `trlx-hybrid reshard-plan`, which estimates the cost of a weight sync between two layouts (how trainer
and engines shard the parameters) from a model's config alone, before any GPU is requested."""

from __future__ import annotations

import argparse
import dataclasses
import json
import textwrap
from collections.abc import Iterator, Sequence
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
"""Bytes per element of each dtype that `--dtype` accepts."""
GPUS_PER_NODE = 8
TRAIN_KEYS = ("dp", "fsdp", "tp", "pp")
ROLLOUT_KEYS = ("dp", "tp", "pp", "ep")
EPILOG = "example: trlx-hybrid reshard-plan --model 7b --train fsdp=4 --rollout tp=2"
SHADES = " .:-=+*#%@"
"""The characters of the picture that shows how many bytes each rank receives from each other, from no bytes to the
most."""
WIDEST = 16
"""The largest number of ranks that the report lists one by one. With more ranks, a row of the picture of traffic stands
for several."""
COLUMNS = ("receives", "minimum", "sends", "minimum sent", "already local", "zero padding", "from other nodes")
"""The headings of the report's table of bytes per rank."""
FIELDS = ("receives", "floor", "sends", "send_floor", "local_copy", "zero", "inter_receives")
"""The fields of `Forecast.ranks` that the table's columns show, without the suffix `_bytes`."""
WIDTHS = [max(11, len(name)) for name in COLUMNS]


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `reshard-plan` to the sub-parsers of a command line. The parsed options have `run`, a function that takes
    them and returns the exit status."""
    parser = commands.add_parser(
        "reshard-plan",
        help="estimate the cost of a weight sync between layouts",
        description="Estimate the bytes, memory and time of a weight sync from the training layout to the rollout "
        "layout. Needs only the model config, no GPU.",
        epilog=EPILOG,
    )
    parser.add_argument(
        "--model",
        required=True,
        metavar="CONFIG",
        help="config.json, a folder with one, or a built-in model size: 0.5b, 1.5b, 7b (Qwen2.5), 0.6b, 30b-a3b "
        "(Qwen3), 8b, 70b (Llama 3), 1t-moe (Qwen3-MoE with Kimi K2's sizes)",
    )
    train = f"training layout, e.g. fsdp=8; keys: {', '.join(TRAIN_KEYS)}; ranks = their product"
    parser.add_argument("--train", required=True, metavar="LAYOUT", help=train)
    parser.add_argument(
        "--rollout",
        required=True,
        metavar="LAYOUT",
        help=f"rollout layout, e.g. tp=4,pp=2; keys: {', '.join(ROLLOUT_KEYS)}; dp defaults to as many replicas as fit "
        "the training ranks; ep (expert parallelism) is tp or a multiple of it",
    )
    nodes = f"number of nodes, a divisor of the number of ranks (default: {GPUS_PER_NODE} ranks per node)"
    parser.add_argument("--nodes", type=int, metavar="N", help=nodes)
    dtype = "dtype of the transferred weights (default: bf16)"
    parser.add_argument("--dtype", choices=SIZES, default="bf16", help=dtype)
    parser.add_argument(
        "--network",
        type=float,
        default=NETWORK / 1e9,
        metavar="GB/s",
        help="network bandwidth between nodes, per rank, GB/s each way (default: %(default)g)",
    )
    parser.add_argument("--back", action="store_true", help="plan the opposite direction, rollout to training layout")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run `trlx-hybrid reshard-plan`: print the estimated cost of a weight sync, as text or as JSON.

    Args:
        options: the parsed options of the command.

    Returns:
        The exit status, 0.

    Raises:
        ConfigError: the model, a layout or the nodes are invalid; names the option and the way out.
    """
    model = load(options.model, SIZES[options.dtype])
    train = MeshLayout(**parsed(options.train, "--train", TRAIN_KEYS))
    sizes = parsed(options.rollout, "--rollout", ROLLOUT_KEYS)
    ep = sizes.pop("ep", 1)
    rollout = MeshLayout(**sizes).served()
    if "dp" not in sizes:
        rollout = rollout.over(train.world)
    rollout = dataclasses.replace(rollout, ep=ep)  # last: it may span the replicas
    if ep > 1 and all(parameter.expert_dim is None for parameter in model.parameters):
        raise ConfigError(f"--rollout {options.rollout}: {model.name} has no experts. Leave ep out.")
    if options.network <= 0:
        raise ConfigError(f"--network {options.network:g}: must be more than 0 GB/s.")
    per_node = _ranks_per_node(train.world, options.nodes)
    source, target = (rollout, train) if options.back else (train, rollout)
    found = forecast(model, source, target, ranks_per_node=per_node, network=options.network * 1e9)
    better = alternatives(model, train, rollout, ranks_per_node=per_node, back=options.back)
    if options.json:
        print(json.dumps(_as_dict(model, source, target, found, better), indent=2))
    else:
        print(report(model, source, target, found, better, options.network))
    return 0


def load(given: str, itemsize: int = 2) -> Model:
    """Return the parameters of the model that `--model` names: a config.json, a folder with one, or a built-in size.

    Args:
        given: the value of `--model`.
        itemsize: bytes per element as it is sent in a weight sync.

    Raises:
        ConfigError: there is no such file or size, or it describes no known model.
    """
    if given.lower() in SHAPES:
        return describe(SHAPES[given.lower()], name=given.lower(), itemsize=itemsize)
    file = Path(given) / "config.json" if Path(given).is_dir() else Path(given)
    if not file.is_file():
        hint = did_you_mean(given.lower(), SHAPES)
        raise ConfigError(
            f"--model {given}: no such file, folder or built-in size.{hint} Hub ids are not downloaded: give a local "
            f"config.json. Built-in sizes: {', '.join(SHAPES)}."
        )
    try:
        fields = json.loads(file.read_text())
        kind = fields["model_type"]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"--model {given}: {file} is not a transformers config: {error!r}. Give a model's config.json."
        ) from error
    # Published configs leave out the defaults of their class, so the class is asked, at the cost of an import.
    from transformers import AutoConfig

    try:
        config = AutoConfig.for_model(**fields)
    except ValueError as error:
        raise ConfigError(f"--model {given}: transformers has no model_type {kind!r}. Upgrade it?") from error
    return describe(config, name=file.parent.name if file.name == "config.json" else file.stem, itemsize=itemsize)


def parsed(text: str, flag: str, keys: tuple[str, ...]) -> dict[str, Any]:
    """Parse a layout such as `fsdp=4,tp=2` into its sizes by name.

    Args:
        text: the layout.
        flag: the option that it was given for, for messages.
        keys: the names of sizes that the option accepts.

    Raises:
        ConfigError: a part is wrong; names it and the flag.
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
            what = f"{size} is not a positive integer" if size else "no size given"
            raise ConfigError(f"{flag} {text}: {what} for {key}. Write {key}=4.")
        sizes[key] = int(size)
    return sizes


def _ranks_per_node(world: int, hosts: int | None) -> int:
    """Return the number of ranks on each node.

    Args:
        world: the number of ranks.
        hosts: the value of `--nodes`; None assumes `GPUS_PER_NODE` ranks on each node.

    Raises:
        ConfigError: `hosts` does not divide the ranks.
    """
    if hosts is None:
        return min(world, GPUS_PER_NODE)
    if hosts < 1 or world % hosts:
        raise ConfigError(f"--nodes {hosts} does not divide {world} ranks. Every node has the same number of them.")
    return world // hosts


def _as_dict(
    model: Model, source: MeshLayout, target: MeshLayout, found: Forecast, better: Sequence[Better]
) -> dict[str, object]:
    """Return the content of the report as a dictionary, for `--json`."""
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
    """Format a number of bytes in GB of 10⁹ bytes, small amounts in MB and kB."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size / 10:
            return f"{count / size:.2f} {unit}"
    return f"{count} B"


def report(
    model: Model, source: MeshLayout, target: MeshLayout, found: Forecast, better: Sequence[Better], network: float
) -> str:
    """Return the whole report of `trlx-hybrid reshard-plan` as text.

    Args:
        model: the parameters that are moved.
        source, target: the layouts before and after.
        found: the estimate.
        better: the layouts that `alternatives` returned: the present training layout, then a better one, if there is
            one.
        network: the bandwidth between nodes in GB/s per rank.
    """
    head = (
        f"{model.name}: {gigabytes(model.bytes)} at {model.itemsize} bytes per element, {source} → {target}, "
        f"{_count(len(found.ranks), 'rank')} on {_count(found.nodes, 'node')}"
    )
    traffic = f"{gigabytes(found.intra_node_bytes)} within nodes, {gigabytes(found.inter_node_bytes)} between nodes"
    return "\n".join(
        [
            head,
            "",
            *_table(found),
            "",
            f"rank {found.busiest} (receives the most), by kind of parameter:",
            *(_row(kind["kind"], [kind[f"{field}_bytes"] for field in FIELDS[:-1]]) for kind in found.kinds),
            "",
            f"traffic     {traffic}, all ranks together",
            f"buffers     {gigabytes(found.peak_bytes)} extra memory at most on a rank",
            f"time        ≈ {found.seconds * 1e3:.1f} ms on the busiest link (NVLink {NVLINK / 1e9:.0f} GB/s, network "
            f"{network:g} GB/s per rank; latency and packing not counted)",
            f"planning    {found.plan_seconds * 1e3:.1f} ms on the slowest rank",
            "",
            *_picture(found.traffic),
            "",
            *_advice(better),
        ]
    )


def _table(found: Forecast) -> Iterator[str]:
    """Yield the lines of a table that shows how many bytes each rank sends, receives and copies in the forecast weight
    sync."""
    yield "rank        " + "  ".join(map(str.rjust, COLUMNS, WIDTHS))
    for rank in found.ranks[:WIDEST]:
        yield _row(str(rank["rank"]), [rank[f"{field}_bytes"] for field in FIELDS])
    if len(found.ranks) > WIDEST:
        yield f"…           and {len(found.ranks) - WIDEST} more; --json lists all"
    yield _row("maximum", [max(rank[f"{field}_bytes"] for rank in found.ranks) for field in FIELDS])


def _row(name: str, cells: Sequence[int]) -> str:
    """Return one line of the table: a name and numbers of bytes."""
    return f"{name:<10}  " + "  ".join(map(str.rjust, map(gigabytes, cells), WIDTHS))


def _picture(traffic: Ints) -> Iterator[str]:
    """Yield the lines of a picture that shows how much each rank receives from each other, one character per pair of
    ranks. Above `WIDEST` ranks, a character stands for a pair of blocks of ranks.

    Args:
        traffic: the bytes that the row's rank receives from the column's rank, int64 of shape (ranks, ranks).
    """
    block = -(-len(traffic) // WIDEST)
    edges = np.arange(0, len(traffic), block)
    blocks = np.add.reduceat(np.add.reduceat(traffic, edges, axis=0), edges, axis=1)
    largest = int(blocks.max())
    of = "" if block == 1 else f", each row and column {block} ranks"
    if not largest:
        yield "nothing moves between ranks"
        return
    yield f"traffic: row receives from column{of}; {SHADES[-1]} is {gigabytes(largest)}, blank is nothing"
    yield "      " + "".join(f"{int(edge) % 1000:>4}" for edge in edges)
    for edge, row in zip(edges, blocks):
        shades = [-(-int(cell) * (len(SHADES) - 1) // largest) for cell in row]
        yield f"{int(edge):>6}" + "".join(f"{SHADES[shade] * 2:>4}" for shade in shades)


def _advice(better: Sequence[Better]) -> Iterator[str]:
    """Yield the lines of the report that suggest another training layout.

    Args:
        better: the present training layout, then a better one, if there is one.
    """
    now = better[0]
    if len(better) == 1:
        yield "suggestion  none: no other choice of shard dimensions transfers less"
        return
    for option in better[1:]:
        saved, less = now.receives_bytes - option.receives_bytes, now.sends_bytes - option.sends_bytes
        yield (
            "suggestion  shard other dimensions (below): at most "
            f"{gigabytes(option.receives_bytes)} received per rank (saves {gigabytes(max(saved, 0))}), "
            f"{gigabytes(option.sends_bytes)} sent (saves {gigabytes(max(less, 0))})"
        )
    chosen = better[-1].shard_dims
    for dim in sorted({dim for _, dim in chosen}):
        names = ", ".join(name.format("*") for name, its in chosen if its == dim)
        head = f"            shard_placement_fn: Shard({dim}) for "
        yield from textwrap.wrap(names, 100, initial_indent=head, subsequent_indent=" " * 14)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
