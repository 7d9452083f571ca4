"""A rank with its share of the rows in FOLDER/rows.json: their rewards, and errors that it shares with the others."""

import json
import os
import sys
from pathlib import Path

from accelerate import PartialState
from trlx_hybrid_cure import CureReward


def main(folder: Path) -> None:
    rank = int(os.environ["RANK"])
    PartialState(cpu=True)
    rows = json.loads((folder / "rows.json").read_text())
    mine = rows[:6] if rank == 0 else rows[6:]  # parts both groups of task 7

    def rewards(rows):
        completions, tasks, speakers, tests = zip(*rows, strict=True)
        return CureReward()(completions=completions, task_id=tasks, speaker=speakers, tests=tests)

    def error(rows):
        try:
            rewards(rows)
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    report = {"rewards": rewards(mine), "alone": error([row for row in mine if row[2] == "tester"])}
    if rank == 1:
        sys.executable = "/bin/false"
    report["broken"] = error(mine)
    (folder / f"rank{rank}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
