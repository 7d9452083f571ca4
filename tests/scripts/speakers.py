"""Launched by test_speakers.py: a rank with its share of two tasks' completions reports what it finds of all ranks."""

import json
import os
import sys
from pathlib import Path

from accelerate import PartialState
from trlx_hybrid.errors import ConfigError
from trlx_hybrid.speakers import by_task

ROWS = [  # parts task 5 between the ranks
    ([5, 5, 5], ["even", "even", "odd"], ["a", "b", "c"]),
    ([5, 8, 8, 5], ["odd", "odd", "even", "odd"], ["d", "e", "f", "g"]),
]


def main(folder: Path) -> None:
    rank = int(os.environ["RANK"])
    PartialState(cpu=True)
    said = by_task(*ROWS[rank], required=["even", "odd"])
    report = {"places": said.places, "values": said.values, "own": said.own(said.values)}
    try:
        by_task(*(column[:2] for column in ROWS[rank]), required=["odd"])
    except ConfigError as error:
        report["parted"] = str(error)
    try:
        by_task([rank], ["odd"], ["h"], required=["even"])
    except ConfigError as error:
        report["absent"] = str(error)
    (folder / f"rank{rank}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
