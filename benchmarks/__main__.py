"""The command `python -m benchmarks`: lists the benchmarks; `check [NAME ...]` compares results with the goals."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from trlx_hybrid.errors import did_you_mean

from . import BENCHMARKS
from .goals import GOALS, load, measured_code, misses, module_of, stale
from .result import RESULTS


def main(argv: Sequence[str] | None = None, *, goals: Path = GOALS, results: Path = RESULTS) -> int:
    """Run the command and return the exit status: 0, or 1 if a goal is missed or a result is too old.

    An unknown name exits with 2.
    """
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="List the benchmarks, or check their committed results.",
        epilog="Run one with: python -m benchmarks.NAME (--help lists its options)",
    )
    commands = parser.add_subparsers(dest="command")
    told = "exit 1 naming each goal that the committed results miss, and each result older than the code it measured"
    check_parser = commands.add_parser("check", help=told, description=told.capitalize())
    check_parser.add_argument("names", nargs="*", metavar="NAME", help="benchmarks to check (default: all)")
    arguments = parser.parse_args(argv)
    if arguments.command is None:
        list_benchmarks()
        return 0
    for name in arguments.names:
        if name not in BENCHMARKS:
            check_parser.error(_unknown(name))
    return check(arguments.names or BENCHMARKS, goals, results)


def list_benchmarks() -> None:
    width = max(map(len, BENCHMARKS))
    for name in BENCHMARKS:
        summary = (importlib.import_module(f"benchmarks.{name}").__doc__ or "").partition("\n")[0]
        print(f"{name:{width}}  {summary}")


def check(names: Sequence[str], goals: Path, results: Path) -> int:
    """Print each missed goal, and each result whose code is newer; return 1 if there is one, else 0."""
    wanted = [goal for goal in load(goals) if module_of(goal.benchmark) in names]
    missed = [miss for goal in wanted for miss in misses(goal, results)]
    old = list(stale(dict.fromkeys(goal.benchmark for goal in wanted), measured_code(goals), results))
    for miss in missed:
        print(f"MISSED  {miss}", file=sys.stderr)
    for line in old:
        print(f"STALE   {line}", file=sys.stderr)
    print(f"{len(wanted)} goals of {', '.join(names)}: {f'{len(missed)} missed' if missed else 'all met'}.")
    print(
        f"{len(old)} results are older than what they measure." if old else "No result is older than what it measures."
    )
    return 1 if missed or old else 0


def _unknown(name: str) -> str:
    return f"there is no benchmark {name!r}.{did_you_mean(name, BENCHMARKS)} Benchmarks: {', '.join(BENCHMARKS)}."


if __name__ == "__main__":
    sys.exit(main())
