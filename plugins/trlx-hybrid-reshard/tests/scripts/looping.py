"""Launched by test_looping.py: a custom loop over two ranks, FSDP2 and an engine of tp=2, with its layouts named."""

import json
import os
import sys
from pathlib import Path

os.environ.update(HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="ERROR", TOKENIZERS_PARALLELISM="false")

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from trlx_hybrid import HybridEngine, Layout
from trlx_hybrid.errors import ConfigError
from trlx_hybrid.testing.models import character_tokenizer, tiny_model

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
OPTIONS = {"max_model_len": 64, "max_num_seqs": 16}


def engine_of(model, optimizer=None, **layouts):
    return HybridEngine(model, character_tokenizer(), optimizer, max_tokens=8, engine_options=dict(OPTIONS), **layouts)


def main(folder):
    dist.init_process_group("gloo")
    model = tiny_model()
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    report = {"refused": [], "syncs": [], "gaps": []}
    for layouts in ({"train": Layout(fsdp=8)}, {"rollout": Layout(tp=4)}):
        try:
            engine_of(model, **layouts)
        except ConfigError as error:
            report["refused"].append(str(error))
    with engine_of(model, optimizer, rollout=Layout(tp=WORLD), train=Layout(fsdp=WORLD)) as engine:
        engine.on_reshard_start(lambda plan: report["syncs"].append([plan.weights, plan.version]))
        for _ in range(2):
            with engine.rollout_context():
                (completion,) = engine.generate([[5, 6, 7, 40 + RANK]])
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
        report["parallel"] = engine.session.live_engine.tensor_parallel_size
    (folder / f"rank{RANK}.json").write_text(json.dumps(report))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
