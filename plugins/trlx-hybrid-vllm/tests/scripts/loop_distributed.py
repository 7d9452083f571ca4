"""Launched by test_hybrid_engine_distributed.py: a plain loop on every rank; each writes what it saw as JSON.

torchrun --nproc_per_node 2 loop_distributed.py OUT [raw] [tp=2] [experts]
ACCELERATE_USE_CPU=true accelerate launch --multi_gpu --num_processes 2 loop_distributed.py OUT
"""

import hashlib
import json
import os
import sys
from pathlib import Path

os.environ.update(HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="ERROR", TOKENIZERS_PARALLELISM="false")

import torch
from accelerate import Accelerator
from trlx_hybrid import HybridConfig, HybridEngine
from trlx_hybrid.errors import ComponentError
from trlx_hybrid.testing.models import character_tokenizer, tiny_model

PROMPTS = [[5, 6, 7, 40], list(range(10, 23)), [90], [33, 34]]


def digest(model):
    """Of all weights, bit for bit."""
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()


def refused(accelerator):
    """What is said to whom wants slices sent to an engine whose ranks have whole experts."""
    options = {"max_model_len": 64, "tensor_parallel_size": 2, "engine_args": {"enable_expert_parallel": True}}
    config = HybridConfig(weights="reshard", engine_options=options)
    model, given = tiny_model("qwen3_moe"), {"max_tokens": 8, "config": config, "accelerator": accelerator}
    with HybridEngine(model, character_tokenizer(), **given) as engine:
        try:
            with engine.rollout_context():
                return None
        except ComponentError as error:
            return str(error)


def main(out, options):
    model = tiny_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    if "raw" in options:  # torch alone: no accelerate in the loop
        torch.distributed.init_process_group("gloo")
        model, accelerator, backward = torch.nn.parallel.DistributedDataParallel(model), None, torch.Tensor.backward
    else:
        accelerator = Accelerator(cpu=True)
        model, optimizer = accelerator.prepare(model, optimizer)
        backward = accelerator.backward
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    share = len(PROMPTS) // world
    prompts = PROMPTS[rank * share : (rank + 1) * share]
    settings = {"enable_sleep_mode": True, "max_model_len": 64, "max_num_seqs": 16}
    settings["tensor_parallel_size"] = int(options.get("tp", 1))
    report = {"drawn": [], "digests": [], "gaps": [], "syncs": []}
    with HybridEngine(
        model, character_tokenizer(), optimizer, max_tokens=8, engine_options=settings, accelerator=accelerator
    ) as engine:
        engine.on_reshard_end(lambda sync: report["syncs"].append([sync.weights, sync.bytes]))
        maps = Path("/proc/self/maps").read_text().splitlines()
        report["shared"] = [line.endswith(" (deleted)") for line in maps if "/dev/shm/" in line and "-cpushm_" in line]
        for _ in range(4):
            with engine.rollout_context():
                completions = engine.generate(prompts, num_generations=2)
            rows = [(prompt, c) for prompt, c in zip([p for p in prompts for _ in range(2)], completions, strict=True)]
            theirs = [engine.session.policy.log_probs(prompt, c.token_ids) for prompt, c in rows]
            ours = [torch.tensor([p[0] for p in c.logprobs]) for _, c in rows]
            report["gaps"].append(max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True)))
            report["drawn"].append([c.token_ids for c in completions])
            with engine.train_context():
                losses = []
                for prompt, c in rows:
                    logits = model(input_ids=torch.tensor([[*prompt, *c.token_ids]])).logits[0, len(prompt) - 1 : -1]
                    scores = logits.log_softmax(-1).gather(-1, torch.tensor(c.token_ids)[:, None])
                    losses.append(scores.sum() * (sum(t < 50 for t in c.token_ids) - 4))
                backward(-torch.stack(losses).mean() / 10)
                optimizer.step()
                optimizer.zero_grad()
            report["digests"].append(digest(model))
    report["closed"] = digest(model)
    if "experts" in options:
        report["refused"] = refused(accelerator)
    (out / f"rank{rank}.json").write_text(json.dumps(report))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), dict([*o.split("="), ""][:2] for o in sys.argv[2:]))
