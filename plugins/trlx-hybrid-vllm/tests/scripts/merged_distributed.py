"""Launched by test_merged.py on two ranks: what is refused, and engines that round alike; each rank reports.

python merged_distributed.py OUT
"""

import hashlib
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch.distributed.fsdp import fully_shard
from trlx_hybrid import HybridConfig, HybridEngine
from trlx_hybrid.errors import ComponentError
from trlx_hybrid.testing.models import character_tokenizer, tiny_model
from trlx_hybrid_vllm.private.engine import model_of


def adapted():
    torch.manual_seed(0)
    model = get_peft_model(tiny_model(), LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    return torch.nn.parallel.DistributedDataParallel(model)


def sharded():
    model = adapted().module
    for layer in model.get_base_model().model.layers:
        fully_shard(layer)
    return fully_shard(model)


def served(model, look, **options):
    """What `look` says of a run's session, or why its weights are refused."""
    config = HybridConfig(
        engine="vllm",
        engine_options={"dtype": "bfloat16", "max_model_len": 64, **options},
        weights="merged",
        weights_options={"rounding": "stochastic"},
    )
    with HybridEngine(model, character_tokenizer(), max_tokens=8, config=config) as engine:
        try:
            with engine.rollout_context():
                return look(engine.session)
        except ComponentError as error:
            return str(error)


def digest(session):
    """Of all of the engine's parameters."""
    state = hashlib.sha256()
    for p in model_of(session.live_engine.llm).parameters():
        state.update(p.detach().view(torch.uint8).numpy().tobytes())
    return state.hexdigest()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    report = {
        "digest": served(adapted(), digest),
        "sliced": served(adapted(), digest, tensor_parallel_size=2),
        "sharded": served(sharded(), digest),
    }
    (Path(sys.argv[1]) / f"rank{os.environ['RANK']}.json").write_text(json.dumps(report))
    dist.destroy_process_group()
