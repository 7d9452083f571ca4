"""Runs on two ranks with a tool that are killed or stopped, or whose files or disks fail, and what becomes of them.

    python -m tests.whole_runs.kills --seeds 60 --out results.jsonl

A seed draws the fault, the moment and the rank. A run is started from the shell; one that fails is started again in the
same folder, as a scheduler does. Every seed ends as one of

- `same`: exit code 0, all steps, and the bits of the undisturbed run's weights;
- `wrong`: exit code 0 and other weights;
- `lost`: no exit code 0 within the starts that a fault may cost;
- `hang`: a start that does not end within its limit;

and what is left of its processes is counted.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from whole_run import SCRIPTS, Ended, run

from tests.support.fsdp import FSDP2_FILE

PHASES = ("save", "rollout", "sync", "backward", "tool")
FAULTS = ("kill", "stop", "torn", "disk")
DELAYS = {"save": 0.6, "rollout": 0.4, "sync": 0.05, "backward": 0.05, "tool": 0.02}
"""Seconds after which a phase has ended, about; a fault strikes at any of them."""
STARTS = 3  # the first, one after the fault, and one to spare where a launcher's own restart met the same full disk
LIMIT = 400.0  # seconds a start may take
DISK = 64  # MiB


def drawn(seed: int) -> dict[str, Any]:
    """Return the fault of a seed: its kind, and where and when it strikes. 20 seeds meet all pairs of both."""
    draw = random.Random(seed)
    phase, fault = PHASES[seed % len(PHASES)], FAULTS[seed // len(PHASES) % len(FAULTS)]
    visit, delay = draw.randint(1, 2 if phase == "tool" else 3), round(draw.random() * DELAYS[phase], 4)
    return {"fault": fault, "phase": phase, "rank": draw.randrange(2), "visit": visit, "delay": delay, "seed": seed}


@contextmanager
def disk(folder: Path, size: int) -> Iterator[None]:
    """Mount a disk of so many MiB in memory there, where this user may; a plain folder elsewhere."""
    folder.mkdir(parents=True)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}m", "tmpfs", str(folder)], capture_output=True, check=False
    )
    try:
        yield
    finally:
        if mounted.returncode == 0:
            subprocess.run(["umount", "-l", str(folder)], check=True)


def start(folder: Path, fault: dict[str, Any], again: bool) -> Ended:
    """Start the script under the launcher; `again`, as a scheduler does that knows nothing of the first start."""
    config = folder / "accelerate.yaml"
    config.write_text(json.dumps(FSDP2_FILE))
    launcher = ["-m", "trlx_hybrid", "launch", "--cpu", "--processes-per-node", "2", "--restart", "1"]
    options = [f"{name}={value}" for name, value in fault.items()]
    command = [sys.executable, *launcher, "--config_file", config, SCRIPTS / "struck.py", folder, *options]
    variables = {"OMP_NUM_THREADS": "1", "RAY_worker_niceness": "0"} | ({"TRLX_HYBRID_RESUME": "1"} if again else {})
    return run(command, LIMIT, variables)


def outcome(folder: Path, fault: dict[str, Any], expected: str | None) -> dict[str, Any]:
    """Take a run through its fault to its end; the row of its seed."""
    said: dict[str, Any] = dict(fault)
    left: list[str] = []
    seconds = 0.0
    with disk(folder / "disk", DISK):
        for number in range(1, STARTS + 1):
            ended = start(folder, fault, number > 1)
            left += ended.left
            seconds += ended.seconds
            (folder / f"start{number}.log").write_text(ended.output)
            (folder / "disk" / "filler").unlink(missing_ok=True)
            if ended.hung or ended.returncode == 0:
                break
    said |= {"starts": number, "seconds": round(seconds), "left": left, "result": "hang" if ended.hung else "lost"}
    struck = folder / "struck.json"
    said["struck"] = json.loads(struck.read_text()).get("file", True) if struck.exists() else False
    if not ended.hung and ended.returncode == 0:
        end = json.loads((folder / "end.json").read_text())
        said |= {"began": end["began"], "steps": end["steps"], "calls": end["calls"], "weights": end["weights"]}
        said["result"] = "same" if expected in (None, end["weights"]) else "wrong"
    return said


def table(rows: list[dict[str, Any]]) -> str:
    """Count what became of the runs, by fault and phase."""
    results = Counter(row["result"] for row in rows)
    lines = [f"{'fault':8}" + "".join(f"{phase:>10}" for phase in PHASES)]
    for fault in FAULTS:
        cells = [[row for row in rows if (row["fault"], row["phase"]) == (fault, phase)] for phase in PHASES]
        lines.append(
            f"{fault:8}" + "".join(f"{sum(r['result'] == 'same' for r in c)} of {len(c)}".rjust(10) for c in cells)
        )
    unstruck = sum(row["struck"] is False for row in rows)
    orphans = sum(bool(row["left"]) for row in rows)
    counts = ", ".join(f"{name} {results[name]}" for name in ("same", "hang", "lost", "wrong"))
    return "\n".join([*lines, f"{len(rows)} runs: {counts}, orphans {orphans}, not struck {unstruck}"])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Kills, stops, torn files and full disks, as a table.")
    parser.add_argument("--seeds", default="60", help="how many, from 0 on; or FIRST-LAST")
    parser.add_argument("--out", type=Path, help="a file that gets a line of JSON for each run")
    parser.add_argument("--folder", type=Path, help="for what the runs write; by default one that is removed")
    parser.add_argument("--at-once", type=int, default=2, help="how many runs at a time; a stopped one mostly waits")
    given = parser.parse_args(arguments)
    first, dash, last = given.seeds.rpartition("-")
    seeds = range(int(first), int(last) + 1) if dash else range(int(last))
    rows = []
    with tempfile.TemporaryDirectory() as made:
        base = given.folder or Path(made)
        twin = outcome(base / "twin", {}, None)
        if twin["result"] != "same":
            raise SystemExit(f"The undisturbed run failed: {twin}")
        with ThreadPoolExecutor(given.at_once) as pool:
            runs = [pool.submit(outcome, base / str(seed), drawn(seed), twin["weights"]) for seed in seeds]
            for ended in as_completed(runs):
                rows.append(ended.result())
                print(json.dumps(rows[-1]), flush=True)
                if given.out:
                    with given.out.open("a") as out:
                        out.write(json.dumps(rows[-1]) + "\n")
    print(table(rows))
    return 0 if all(row["result"] == "same" and not row["left"] for row in rows) else 1


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.exit(main())
