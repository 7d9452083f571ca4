"""Launched by tests: does what its first argument says, one thing after another where commas part several, and leaves
word of it in the folder that the second names."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

WHAT, FOLDER = sys.argv[1], Path(sys.argv[2])
RANK, WORLD = (
    int(os.environ.get("RANK", 0)),
    int(os.environ.get("WORLD_SIZE", 1)),
)  # accelerate sets none for one process


def word(name, **fields):
    (FOLDER / f"{name}.{RANK}.tmp").write_text(json.dumps(fields))
    (FOLDER / f"{name}.{RANK}.tmp").rename(FOLDER / f"{name}.{RANK}")


def look():
    """Everything a script can see of how it was started."""
    word("seen", environment=dict(os.environ), argv=sys.argv, folder=os.getcwd(), path=sys.path, main=__name__)


def together():
    """A sum over all ranks, and many lines."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.tensor(RANK + 1)
    dist.all_reduce(total)
    for number in range(1000):
        print(f"line {number}")
        print(f"error {number}", file=sys.stderr)
    print(f"sum {total.item()}", end="")
    dist.destroy_process_group()


def fail():
    """The last rank fails on its own; the others wait for it in a collective call."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    if RANK == WORLD - 1:
        word("failed", at=time.monotonic())
        raise ValueError("the reward is nan")
    dist.all_reduce(torch.zeros(1))


def leave():
    """Rank 0 ends with a code of its own."""
    if RANK == 0:
        sys.exit(3)
    time.sleep(600)


def wait():
    """Until somebody ends it, with a child of its own."""
    subprocess.Popen(["sleep", "600"], env=os.environ | {"LEFT_BY": str(FOLDER)}, start_new_session=True)
    try:
        word("waiting", pid=os.getpid())
        time.sleep(600)
    finally:
        print("unwound")


def flood():
    """More lines than a small pipe holds, then an end with a code of its own."""
    for number in range(1000):
        print(f"line {number}", file=sys.stderr)
    word("flooded")
    time.sleep(1)
    sys.exit(3)


def long_line():
    """200 kB without an end, then one with."""
    sys.stdout.write("x" * 200_000)
    print("\nafter")


def map_files():
    """As datasets and safetensors do: files that somebody staged in shared memory, mapped until the end."""
    import mmap

    maps = [mmap.mmap(os.open(path, os.O_RDWR), 0) for path in (FOLDER / "stage").resolve().iterdir()]
    print("mapped", len(maps))
    time.sleep(1)  # a look at shared memory takes place every 0.1 s


def actors():
    """Two Ray actors with a GPU each, and a worker group with two, started by rank 0: node and GPUs of each."""
    import ray
    from trlx_hybrid_ray.worker_group import WorkerGroup, register

    def devices():
        return ray.get_runtime_context().get_node_id(), os.environ["CUDA_VISIBLE_DEVICES"]

    class Judge:
        @register(dispatch="one_to_all")
        def devices(self) -> tuple[str, str]:
            return devices()

    class Actor:
        def devices(self):
            return devices()

    if RANK == 0:
        ray.init(log_to_driver=False)
        settings = {"num_gpus": 1, "num_cpus": 0}
        started = [ray.remote(Actor).options(**settings).remote() for _ in range(2)]
        theirs = ray.get([actor.devices.remote() for actor in started])
        with WorkerGroup(Judge, [settings] * 2) as judges:
            theirs += judges.devices()
        word("actors", own=os.environ["CUDA_VISIBLE_DEVICES"], theirs=theirs)


def stubborn():
    """Neither signal ends it."""
    import signal

    for which in (signal.SIGINT, signal.SIGTERM):
        signal.signal(which, signal.SIG_IGN)
    word("waiting", pid=os.getpid())
    time.sleep(600)


def count():
    """A line each 0.2 s, 100 times, and then more than a pipe holds."""
    for number in range(100):
        print(f"line {number}")
        word("counting", pid=os.getpid(), number=number)
        time.sleep(0.2)
    for number in range(100):
        print(f"long {number} " + "x" * 10_000)
    word("counted")


def again():
    """Fails at the first start, and looks at the second."""
    look()
    if "TRLX_HYBRID_RESUME" not in os.environ:
        os.kill(os.getpid(), 9) if RANK == 0 else time.sleep(600)


if __name__ == "__main__":
    for what in WHAT.split(","):
        globals()[what]()
