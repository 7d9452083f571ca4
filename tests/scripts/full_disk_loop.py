"""Launched by tests/test_full_disk.py on two ranks, with a loop of one's own: the disk of rank 0 is full.

    full_disk_loop.py OUT FOLDER

Each rank reports what `save_state` has raised, and what the file holds after it is called again, with room.
"""

import json
import sys
from contextlib import nullcontext
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from accelerate import Accelerator
from test_full_disk import no_room
from trlx_hybrid.own_loop.hybrid_engine import HybridEngine
from trlx_hybrid.session import STATE_FILE
from trlx_hybrid.testing.models import character_tokenizer, tiny_model


def main(out: Path, folder: Path) -> None:
    accelerator = Accelerator(cpu=True)
    run = HybridEngine(tiny_model(), character_tokenizer(), accelerator=accelerator, max_tokens=4)
    report = {"error": None}
    with no_room() if accelerator.process_index == 0 else nullcontext():
        try:
            run.save_state(folder)
        except Exception as error:
            report["error"] = f"{type(error).__name__}: {error}"
    run.save_state(folder)
    report["seen"] = json.loads((folder / STATE_FILE).read_text())
    (out / f"rank{accelerator.process_index}.json").write_text(json.dumps(report))
    run.close()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
