"""Launched by tests/test_full_disk.py on two ranks: the disk of one is full at the second checkpoint.

    full_disk_distributed.py OUT FOLDER WRITER RANK

Each rank reports the error that its `train` has raised.
"""

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import pytest
import torch
from test_full_disk import fill, trainer_of


def main(out: Path, folder: Path, writer: str, full: int) -> None:
    rank = int(os.environ["RANK"])
    trainer = trainer_of(folder, steps=2)
    fill(pytest.MonkeyPatch(), writer, when=lambda: rank == full and trainer.state.global_step == 2)
    report = {"kind": None, "error": None}
    try:
        trainer.train()
    except Exception as error:
        report = {"kind": type(error).__name__, "error": str(error)}
    (out / f"rank{rank}.json").write_text(json.dumps(report))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
