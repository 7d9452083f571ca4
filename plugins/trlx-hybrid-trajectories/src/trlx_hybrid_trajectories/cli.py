"""The commands `trlx-hybrid trajectories` and `trlx-hybrid report`, which show what a run has recorded."""

from __future__ import annotations

import argparse
import heapq
import io
import itertools
import json
import os
import shutil
import sys
from collections.abc import Iterator
from math import isnan, nan
from pathlib import Path
from typing import Any

from trlx_hybrid.errors import ConfigError, HybridError

from .record import Recorded, read

IN_TERMINAL, ON_PAGE = 10, 100  # trajectories shown unless --limit says otherwise

DESCRIPTION = """\
Show recorded trajectories. Text sampled by the model is indented; prompts and
tool or environment output are marked with │. The HTML page (--html) also shows
the log-prob of every token.
"""
EXAMPLES = """\
examples:
  trlx-hybrid trajectories run/trajectories.jsonl --worst 3
  trlx-hybrid trajectories run/trajectories.jsonl --step 40 --html step40.html
  trlx-hybrid trajectories run/trajectories.jsonl --failed | less
"""


def add_command(subparsers: Any) -> None:
    """Add the command `trajectories` to the command line. The attribute `run` of its parsed arguments is the function
    that carries it out.

    Args:
        subparsers: what argparse's `add_subparsers` returned.
    """
    command = subparsers.add_parser(
        "trajectories",
        help="show the trajectories that a run recorded",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = command.add_argument
    written = "JSON Lines file written by the run (plugin_options={'trajectories': {'record': FILE}})"
    add("file", metavar="FILE", type=Path, help=written)
    add("--html", metavar="OUT", type=Path, help="write a self-contained HTML page to OUT instead of printing")
    add("--step", metavar="N", type=int, help="only trajectories sampled at optimizer step N")
    add("--failed", action="store_true", help="only failed trajectories (loss mask 0 everywhere)")
    order = command.add_mutually_exclusive_group()
    order.add_argument("--worst", metavar="N", type=_positive, help="the N with the lowest reward, lowest first")
    order.add_argument("--best", metavar="N", type=_positive, help="the N with the highest reward, highest first")
    add(
        "--limit",
        metavar="N",
        type=_positive,
        help=f"show at most N (default: {IN_TERMINAL}, with --html {ON_PAGE}; with --worst or --best their N)",
    )
    command.set_defaults(run=run)


REPORT = """\
Write a page on a run: curves, a timeline of its phases, weight syncs, memory and
trajectories. It opens without a network. A run that is not over may be reported
on, too.
"""
REPORT_EXAMPLES = """\
examples:
  trlx-hybrid report run
  trlx-hybrid report run --out report.html
  trlx-hybrid report run --trace spans.json      (for ui.perfetto.dev)
"""


def add_report(subparsers: Any) -> None:
    """Add the command `report` to the command line. The function that carries it out, `run_report`, is stored as the
    default of the option `run`.

    Args:
        subparsers: what argparse's `add_subparsers` returned.
    """
    command = subparsers.add_parser(
        "report",
        help="write a page on a run that recorded itself",
        description=REPORT,
        epilog=REPORT_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = command.add_argument
    add("run_folder", metavar="RUN", type=Path, help="output_dir of the run")
    add("--out", metavar="FILE", type=Path, help="the page (default: report.html in RUN; with --trace alone: none)")
    add("--trace", metavar="FILE", type=Path, help="write the spans of all ranks in Chrome's trace format")
    command.set_defaults(run=run_report)


def run_report(options: argparse.Namespace) -> int:
    """Carry out the command `report`: write the HTML page, the trace, or both.

    Args:
        options: the parsed options of `add_report`.

    Returns:
        The exit status, 0.

    Raises:
        HybridError: the folder holds nothing of a run, or a file cannot be read or written.
    """
    folder = options.run_folder
    if options.trace:
        from .events import SETTING, read_events, trace

        events = read_events(folder)
        if not events.spans:
            raise ConfigError(f"{folder} holds no spans of a run. Start it with {SETTING}, and give its output_dir.")
        _write("--trace", options.trace, json.dumps(trace(events, folder.resolve().name)))
        print(f"wrote {options.trace}: {len(events.spans)} spans")
    if options.out or not options.trace:
        from .report import as_report

        out = options.out or folder / "report.html"
        _write("--out", out, as_report(folder))
        print(f"wrote {out}: {out.stat().st_size / 1e6:.1f} MB")
    return 0


def _write(option: str, file: Path, text: str) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise HybridError(f"cannot write {option} {file}: {error.strerror}. Choose another path.") from error


def run(options: argparse.Namespace) -> int:
    """Carry out the command `trajectories`: print the selected trajectories, or write them to an HTML page.

    Args:
        options: the parsed options of `add_command`.

    Returns:
        The exit status, 0.

    Raises:
        HybridError: no trajectory matches, or a file cannot be read or written.
    """
    limit = options.limit or options.worst or options.best or (ON_PAGE if options.html else IN_TERMINAL)
    found = list(itertools.islice(_chosen(options), limit + 1))
    if not found:
        raise ConfigError(_nothing(options))
    shown, more = found[:limit], len(found) > limit
    if options.html:
        from .page import as_html

        _write("--html", options.html, as_html(shown, title=options.file.name))
        print(f"wrote {options.html}: {len(shown)} of the trajectories in {options.file}")
    else:
        _print(shown)
    if more:
        print(f"showing the first {limit}; use --limit for more", file=sys.stderr)
    return 0


def _chosen(options: argparse.Namespace) -> Iterator[Recorded]:
    matching = (
        one
        for one in read(options.file)
        if (options.step is None or one.step == options.step) and (one.failed or not options.failed)
    )
    if options.worst is None and options.best is None:
        return matching
    scored = (one for one in matching if not isnan(_reward(one)))  # NaN cannot be ordered
    rank = heapq.nlargest if options.worst is None else heapq.nsmallest
    return iter(rank(options.worst or options.best, scored, key=_reward))


def _reward(one: Recorded) -> float:
    return nan if one.reward is None else one.reward


def _nothing(options: argparse.Namespace) -> str:
    """Return an error message for options that match no trajectory; it says which trajectories the file has."""
    everything = [(one.step, one.failed) for one in read(options.file)]
    if not everything:
        return f"{options.file} holds no trajectories yet."
    steps = [step for step, _ in everything]
    where = "" if options.step is None else f" of step {options.step}"
    kind = "failed trajectory" if options.failed else "trajectory"
    scored = " with a reward" if options.worst or options.best else ""
    failed = sum(failed for _, failed in everything)
    there = f"those of steps {min(steps)} to {max(steps)} ({len(steps)} in all, {failed} failed)"
    way_out = "Change or drop --step, --failed, --worst or --best."
    return f"{options.file} has no {kind}{where}{scored}; it has {there}. {way_out}"


def _print(shown: list[Recorded]) -> None:
    from .view import as_text

    colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    width = shutil.get_terminal_size((100, 24)).columns
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a character that the terminal lacks must not fail the rest
    print("\n\n\n".join(as_text(one, colour=colour, width=width) for one in shown))


def _positive(text: str) -> int:
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return value
