"""Launched by test_launch_faults.py: the phases of a trainer in four seconds, and what one leaves when it is killed.

    launcher scripts/phases.py OUT

A weight is moved by a sum over all ranks in each of four steps and saved after each; a run that is started again goes
on from the last checkpoint. Every rank has a child in a session of its own and a shared-memory segment.
"""

import json
import os
import subprocess
import sys
import time
from multiprocessing import resource_tracker, shared_memory
from pathlib import Path

import torch
import torch.distributed as dist
from trlx_hybrid.trl.checkpoint.checkpoints import checkpoint_to_resume

OUT = Path(sys.argv[1])
RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
STEPS, PAUSE = 4, 0.15


def enter(phase):
    (OUT / f"{phase}.{RANK}").write_text(json.dumps({"pid": os.getpid()}))
    time.sleep(PAUSE)


def save(step, weight):
    if RANK == 0:
        folder = OUT / f"checkpoint-{step}"
        folder.mkdir(exist_ok=True)
        torch.save(weight, folder / "weight.pt")
        (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    dist.barrier()


def main():
    child = subprocess.Popen(["sleep", "600"], env=os.environ | {"LEFT_BY": str(OUT)}, start_new_session=True)
    segment = shared_memory.SharedMemory(create=True, size=4096)
    resource_tracker.unregister(segment._name, "shared_memory")  # the tracker would clean up, and vLLM has none
    enter("start")
    dist.init_process_group("gloo")
    checkpoint = checkpoint_to_resume(OUT)
    assert "transformers" not in sys.modules  # five seconds of a core, for each of many ranks
    weight, first = torch.zeros(1), 0
    if checkpoint is not None:
        weight, first = torch.load(Path(checkpoint) / "weight.pt"), int(checkpoint.rpartition("-")[2])
    for step in range(first, STEPS):
        enter("rollout")
        gradient = weight / 3 + RANK + step
        enter("sync")
        dist.broadcast(weight, src=0)
        enter("train")
        dist.all_reduce(gradient)
        enter("optimizer")
        weight -= gradient
        save(step + 1, weight)
        enter("saved")
    (OUT / f"report.{RANK}").write_text(json.dumps({"result": weight.item(), "resumed": checkpoint}))
    enter("end")
    dist.destroy_process_group()
    child.kill()
    segment.close()
    os.unlink(f"/dev/shm/{segment.name}")


if __name__ == "__main__":
    main()
