"""Two ranks on two GPUs, of which the second does not do its part; how the first ends.

Started by test_faults_on_gpus.py, or by hand:

python failing_on_gpus.py FOLDER [FAULT...]
"""

import faulthandler
import functools
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from trlx_hybrid.testing.processes import free_port

DEADLINE = 12.0  # seconds that a rank is waited for, and that a sync may stand still
LIMIT = 240  # seconds for a fault, with the start of its engines
CULPRIT = 1
FAULTS = ("killed", "away", "killed_in_the_sync", "away_in_the_sync")
SHAPE = {"hidden_size": 2048, "intermediate_size": 5504, "num_attention_heads": 16, "num_key_value_heads": 8}
SHAPE |= {"num_hidden_layers": 4, "vocab_size": 8192}


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def away():
    time.sleep(3 * DEADLINE)


def run(folder, fault):
    """One rank: a sync for its proofs, two that are recorded, then one with the fault."""
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from trlx_hybrid import HybridConfig, HybridEngine
    from trlx_hybrid.errors import PeerLostError
    from trlx_hybrid.testing.models import character_tokenizer, tiny_model

    rank = int(os.environ["RANK"])
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("cuda:nccl,cpu:gloo", device_id=device)
    model = tiny_model(**SHAPE).to(device, torch.bfloat16)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    options = {"tensor_parallel_size": 2, "enforce_eager": True, "max_model_len": 256, "max_num_seqs": 8}
    config = HybridConfig(
        engine="vllm",
        engine_options=options | {"kv_cache_memory_bytes": 1 << 30},
        weights="reshard",
        weights_options={"deadline": DEADLINE, "stall": DEADLINE},
    )
    engine = HybridEngine(model, character_tokenizer(), config=config, max_tokens=8)
    with engine.rollout_context():
        pass
    session = engine.session
    for _ in range(2):
        session.weights_changed()
        session.weights.sync()
    dist.barrier()
    session.weights_changed()
    if rank == CULPRIT:
        misbehave = kill if fault.startswith("killed") else away
        if fault.endswith("in_the_sync"):
            session.weights.prepared.run = misbehave
            session.weights.sync()
        else:
            misbehave()
        return
    started, said = time.monotonic(), None
    try:
        session.weights.sync()
    except PeerLostError as error:
        said = str(error)
        faulthandler.dump_traceback_later(10, repeat=True)  # where it is held up, if it is
    seconds = time.monotonic() - started
    report = {"fault": fault, "error": said, "seconds": seconds, "until": time.time()}
    (folder / f"{fault}.json").write_text(json.dumps(report))
    engine.close()


def main(folder, faults):
    """All faults, each with a pair of processes, at once: starting them takes longest."""
    folder.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(len(faults)) as pool:
        found = dict(zip(faults, pool.map(functools.partial(ended, folder), faults), strict=True))
    (folder / "found.json").write_text(json.dumps(found))


def ended(folder, fault):
    """What the first rank saw, and how long it then took to exit."""
    pair = start(folder, fault)
    try:
        code = pair[0].wait(LIMIT)
        found = json.loads((folder / f"{fault}.json").read_text())
        found |= {"returncode": code, "exit_seconds": time.time() - found.pop("until")}
    except (subprocess.TimeoutExpired, FileNotFoundError) as error:
        found = {"error": None, "hung": str(error), "said": (folder / f"{fault}.0.log").read_text()[-2000:]}
    for process in pair:
        process.kill()
        process.wait()
    print(fault, json.dumps(found), flush=True)
    return found


def start(folder, fault):
    """Both ranks. Not forked from a process that has imported the stack, which may have asked for GPUs."""
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    processes = []
    for rank in range(2):
        environment = os.environ | world | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        with (folder / f"{fault}.{rank}.log").open("w") as log:
            command = [sys.executable, __file__, str(folder), fault]
            processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
    return processes


if __name__ == "__main__":
    if "RANK" in os.environ:
        run(Path(sys.argv[1]), sys.argv[2])
    else:
        main(Path(sys.argv[1]), sys.argv[2:] or FAULTS)
