"""Launched by test_grpo.py: GRPO with FSDP2 and a tensor-parallel vLLM on a CPU, several times; each rank reports."""

import json
import os
import sys
from pathlib import Path

import torch
from peft import LoraConfig
from torch.distributed.tensor import DTensor
from trl import GRPOConfig
from trlx_hybrid import GRPOTrainer, HybridConfig, hookimpl
from trlx_hybrid.testing.models import character_tokenizer, sorting_prompts, tiny_grpo, tiny_model
from trlx_hybrid_vllm.private.engine import model_of

from tests.support.fsdp import FSDP2, use_fsdp_on_cpu

FROZEN = "layers.1.mlp"
ADAPTED = ("q_proj", "k_proj", "v_proj", "down_proj")
RUNS = [
    {"engine": {}, "tied": False},
    {"engine": {"dtype": "bfloat16", "enable_sleep_mode": True}, "tied": True},
    {"engine": {}, "tied": False, "lora": True},
    {"engine": {"enable_sleep_mode": True}, "tied": False, "experts": True},
]
RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


class Poisoned:
    """Before each sync the engine's memory is NaN, except for weights that rest there. It is looked at after."""

    def __init__(self, rests):
        self.rests = rests
        self.syncs = []

    @hookimpl
    def trlx_sync_start(self, session, plan):
        whole = session.live_engine.weights_lost or not self.syncs
        for name, p in model_of(session.live_engine.llm).named_parameters():
            if whole or not self.rests(name):
                p.data.fill_(torch.nan)

    @hookimpl
    def trlx_sync_end(self, session, report):
        engine, moves = session.live_engine, session.weights.prepared
        parameters = model_of(engine.llm).named_parameters()
        self.syncs.append(
            {
                "weights": report.weights,
                "bytes": report.bytes,
                "floor": moves.floor_bytes,
                "tensors": report.tensors,
                "gap": report.logprob_gap,
                "differing": engine.differing(session.policy.full_weights()),
                "unwritten": [name for name, p in parameters if p.isnan().any()],
            }
        )


def main(folder, index):
    wanted = RUNS[index]
    lora, experts = wanted.get("lora", False), wanted.get("experts", False)
    os.environ["FSDP_TRANSFORMER_LAYER_CLS_TO_WRAP"] = "Qwen3MoeDecoderLayer" if experts else "Qwen3DecoderLayer"
    plugin = Poisoned(lambda name: ("qkv_proj" not in name and "down_proj" not in name) if lora else FROZEN in name)
    model = tiny_model("qwen3_moe" if experts else "qwen3", tied=wanted["tied"])
    for name, p in model.named_parameters():
        p.requires_grad_(FROZEN not in name)
    settings = tiny_grpo(
        folder / f"run{index}", per_device_train_batch_size=4, learning_rate=1e-2, vllm_tensor_parallel_size=WORLD
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [float(sum(c.isdigit() for c in text)) for text in completions],
        args=GRPOConfig(**settings),
        train_dataset=sorting_prompts(),
        processing_class=character_tokenizer(),
        hybrid=HybridConfig(
            engine_options=wanted["engine"], verify_every=1, weights="reshard" if lora else "auto"
        ),  # merged, and not served: `auto` would serve it
        plugins=[plugin],
        peft_config=LoraConfig(r=4, lora_alpha=12, target_modules=list(ADAPTED)) if lora else None,
    )
    trainer.train()
    report = {
        "distributed_type": str(trainer.accelerator.distributed_type),
        "sharded": all(isinstance(p, DTensor) for p in trainer.model.parameters()),
        "why": trainer.session.weights_why,
        "syncs": plugin.syncs,
        "loss": [log["loss"] for log in trainer.state.log_history if "loss" in log],
    }
    trainer.session.close()
    return report


if __name__ == "__main__":
    os.environ.update(FSDP2)
    use_fsdp_on_cpu()
    out = Path(sys.argv[1])
    seen = [main(out, index) for index in range(len(RUNS))]
    (out / f"rank{RANK}.json").write_text(json.dumps(seen))
    torch.distributed.destroy_process_group()
