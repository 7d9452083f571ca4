"""docs/tested.md from what `make test-gpu` saw: `python tests/whole_runs/page.py` writes it anew."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parents[2] / "docs" / "tested.md"

HEAD = """# What was run whole

Each line is a script as a user writes it, started from the shell on GPUs by `make test-gpu`, trained for seven steps
with an evaluation and a checkpoint in between, until it fell off its end. *Passed* means: exit code 0 within 20 s of
the last step; no process, shared memory or GPU memory left; every tensor of every weight sync compared with the
policy's; losses and rewards finite; and where `a_plain_script_trains_to_its_end` has several times, every logged number
the same in the last run, with `weights="gather"`, and in the one before it. Of three times, the first is a run of one
step: it compiles for CUDA graphs what the others load. Where a reward fails, *passed* means: exit code 1 with the
reward's own error, and nothing left. A name reads: processes, ranks per engine, weights, sleep mode, CUDA graphs,
lengths, offload.

What is not listed has not been seen on a GPU in this way. On a CPU most of these scripts run with every change.
"""


def page(rows: Iterable[Mapping[str, Any]]) -> str:
    """The page; of a case that was run several times, the last."""
    latest = {(row["gpus"], row["case"], row["device"]): row for row in rows}
    lines = [
        HEAD,
        "| GPUs | script | device | commit | result | seconds | exit after |",
        "|---|---|---|---|---|---|---|",
    ]
    for (gpus, case, device), row in sorted(latest.items()):
        runs = row["runs"]
        seconds = ", ".join(f"{run['seconds']:.0f}" for run in runs)
        leaving = ", ".join("–" if run["leaving"] is None else f"{run['leaving']:.1f} s" for run in runs)
        result = "passed" if row["passed"] else "**failed**"
        lines.append(f"| {gpus} | `{case}` | {device} | {row['commit']} | {result} | {seconds} | {leaving} |")
    return "\n".join([*lines, *row_notes(latest.values())]) + "\n"


def row_notes(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Why something failed, where a result says so."""
    notes = [f"- `{row['case']}`: {row['note']}" for row in rows if "note" in row]
    return ["", *notes] if notes else []


def seen() -> list[dict[str, Any]]:
    """All results, oldest first within a file."""
    return [json.loads(line) for file in sorted(RESULTS.glob("*.jsonl")) for line in file.read_text().splitlines()]


if __name__ == "__main__":
    PAGE.write_text(page(seen()))
