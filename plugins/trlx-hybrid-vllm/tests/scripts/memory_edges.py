"""Launched by test_memory.py: what each owner's coming and going does to this process's memory, as JSON.

python memory_edges.py OUT

In a process of its own, where nothing else moves; with owners of hundreds of MiB, beside which the rest is small.
"""

import ctypes
import gc
import json
import os
import resource
import sys
import time
from pathlib import Path

os.environ.update(HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="ERROR", TOKENIZERS_PARALLELISM="false")

import torch
from accelerate import Accelerator
from trlx_hybrid import HybridConfig, HybridEngine
from trlx_hybrid.memory.offload import Offload
from trlx_hybrid.testing.models import character_tokenizer, tiny_model
from trlx_hybrid_vllm.engine import VLLMEngine

MIB = 1 << 20
KV_CACHE = 320 * MIB
LARGE = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 5,
    "num_attention_heads": 8,
    "head_dim": 128,
}
TRIM = ctypes.CDLL("libc.so.6").malloc_trim


def resident():
    """Bytes that this process holds, after what is free was given back: its own, not code of libraries, of which Linux
    keeps in memory what it likes. Counted page by page; the counters of /proc/self/statm are rough on many cores."""
    gc.collect(1)  # the young: after the first cycle everything else is frozen
    TRIM(0)
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    own = ("Anonymous:", "Swap:", "Pss_Shmem:")
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith(own))


def walk(model, optimizer, engine):
    """Bytes per owner, without the ledger's help: distinct storages, less what an owner before them holds of them."""
    runner = engine.llm.llm_engine.model_executor.driver_worker.model_runner
    owners = {
        "policy": [*model.parameters(), *model.buffers()],
        "gradients": [p.grad for p in model.parameters() if p.grad is not None],
        "optimizer": [t for state in optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor)],
        "engine weights": list(runner.model.parameters()),
        "KV cache": runner.kv_caches,
    }
    owners["engine weights"] += runner.model.buffers()  # the CPU's worker keeps these few KiB while weights sleep
    held, taken = {}, []
    for owner, tensors in owners.items():
        blocks = {(s.data_ptr(), s.nbytes()) for s in (t.untyped_storage() for t in tensors) if s.nbytes()}
        held[owner] = 0
        for start, size in blocks:
            inside = sum(n for a, n in taken if start <= a and a + n <= start + size)
            assert all(a + n <= start or start + size <= a or (start <= a and a + n <= start + size) for a, n in taken)
            held[owner] += size - inside
        taken += blocks
    return held


def cycles(weights, count):
    """A loop that accumulates gradients over its rollouts, with everything offloaded; the edges of its last cycle."""
    small = count == 1
    gc.collect()
    before = resident()
    model = tiny_model() if small else tiny_model(**LARGE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    options = {"enable_sleep_mode": True, "max_model_len": 64, "max_num_seqs": 4}
    options["kv_cache_memory_bytes"] = MIB if small else KV_CACHE
    config = HybridConfig(engine="vllm", weights=weights, offload="all", engine_options=options)
    loop = HybridEngine(
        model, character_tokenizer(), optimizer, config=config, max_tokens=4, accelerator=Accelerator(cpu=True)
    )
    edges, recording = [], False

    def state():
        ledger = loop.session.memory.ledger
        counted = walk(model, optimizer, loop.session.live_engine)
        return {"rss": resident(), "ledger": ledger.measure(), "walk": counted, "arena": ledger.arena.bytes}

    def watched(function, name):
        def call(*args, **kwargs):
            if not recording or loop.session.engine is None:
                return function(*args, **kwargs)
            first = state()
            result = function(*args, **kwargs)
            edges.append({"edge": " ".join([name, *map(str, args[1:])]), "before": first, "after": state()})
            return result

        return call

    places = [(Offload, "leave"), (Offload, "start_return"), (VLLMEngine, "sleep"), (VLLMEngine, "wake")]
    originals = [(owner, name, getattr(owner, name)) for owner, name in places]
    for owner, name, original in originals:
        setattr(owner, name, watched(original, name))
    for cycle in range(count):
        recording = cycle == count - 1
        gc.collect()
        gc.freeze()
        with loop.rollout_context():
            loop.generate([[5, 6, 7]], num_generations=4)
        recording = False
        with loop.train_context():
            ids = torch.tensor([[5, 6, 7, 40]])
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
    path, frozen = loop.session.weights.name, gc.get_freeze_count()
    loop.close()
    for owner, name, original in originals:
        setattr(owner, name, original)
    return {"edges": edges, "path": path, "baseline": before, "frozen": frozen}


def main(out):
    started = time.perf_counter()
    cycles("copy", 1)  # imports, pools and caches
    report = {weights: cycles(weights, 3) for weights in ("alias", "gather")}
    report["peak"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    report["seconds"] = time.perf_counter() - started
    out.write_text(json.dumps(report))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
