"""Launched by test_looping.py: a custom loop over all ranks, FSDP2 and an engine over them, with its layouts named.

    looping.py FOLDER TP PP DTYPE

The engine is in DTYPE, and so is what is sent. On rank 1 the log of the weight sync is on, at INFO.
"""

import json
import logging
import os
import sys
from pathlib import Path

os.environ.update(HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="ERROR", TOKENIZERS_PARALLELISM="false")

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from trlx_hybrid import HybridEngine, Layout
from trlx_hybrid.errors import ConfigError, EngineError
from trlx_hybrid.testing.models import character_tokenizer, tiny_model

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
OPTIONS = {"max_model_len": 64, "max_num_seqs": 16}


def engine_of(model, optimizer=None, **layouts):
    return HybridEngine(model, character_tokenizer(), optimizer, max_tokens=8, engine_options=dict(OPTIONS), **layouts)


def main(folder, tp, pp, dtype):
    dist.init_process_group("gloo")
    model = tiny_model()
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    report = {"refused": [], "syncs": [], "gaps": [], "generated": [], "ended": 0, "logged": [], "bytes": []}
    if RANK == 1:
        logged = logging.Handler()
        logged.emit = lambda record: report["logged"].append(record.getMessage())
        logging.getLogger("trlx_hybrid_reshard").addHandler(logged)
        logging.getLogger("trlx_hybrid_reshard").setLevel(logging.INFO)
    for layouts in ({"train": Layout(fsdp=8)}, {"rollout": Layout(tp=8)}):
        try:
            engine_of(model, **layouts)
        except ConfigError as error:
            report["refused"].append(str(error))
    fsdp = {"version": 2, "dp_shard_size": WORLD, "reshard_after_forward": True}
    layouts = {"rollout_config": {"tp_size": tp, "pp_size": pp, "dp_type": "none"}}
    layouts |= {"train_config": {"fsdp_config": fsdp}, "enable_reshard": True}
    compressed = {"compress_reshard": True, "compression_dtype": dtype}
    layouts |= {"compress_reshard": False} if dtype is torch.float32 else compressed
    prompts = torch.tensor([[0, 0, 5, 6, 7, 40 + RANK], [11, 12, 13, 14, 15, 60 + RANK]])
    asked = {"input_ids": prompts, "attention_mask": (prompts != 0).long(), "max_new_tokens": 9}
    with engine_of(model, optimizer, **layouts) as engine:
        engine.on_reshard_start(lambda plan: report["syncs"].append([plan.weights, plan.version]))

        @engine.on_reshard_end
        def ended():
            report["ended"] += 1

        for _ in range(2):
            own = model.generate(**asked, synced_gpus=True)
            with engine.rollout_context():
                report["bytes"].append(engine.session.metrics["hybrid/sync_bytes"])
                (completion,) = engine.generate([[5, 6, 7, 40 + RANK]])
                served = model.generate(**asked)
                try:
                    model.generate(**asked | {"max_new_tokens": 4 + RANK})
                except EngineError as error:
                    report["refused"].append(str(error))
            report["generated"].append([served.tolist(), own.tolist()])
            everyone = [None] * WORLD
            dist.all_gather_object(everyone, completion)
            for rank, drawn in enumerate(everyone):  # scoring is collective: both ranks score both rows
                scores = engine.session.policy.log_probs([5, 6, 7, 40 + rank], drawn.token_ids)
                ours = torch.tensor([p[0] for p in drawn.logprobs])
                report["gaps"].append(float((scores - ours).abs().max()))
            with engine.train_context():
                ids = torch.tensor([[5, 6, 7, 40 + RANK, *completion.token_ids]])
                model(input_ids=ids, labels=ids).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        report["parallel"] = engine.session.live_engine.ranks_per_replica
    (folder / f"rank{RANK}.json").write_text(json.dumps(report))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:4]), getattr(torch, sys.argv[4]))
