"""Launched by test_lora_sync.py: GRPO of an adapter with an engine over two ranks; each rank reports.

    python lora_distributed.py OUT fsdp|ddp TENSOR_PARALLEL [KEY=VALUE ...]

Further arguments are `architecture`, a model type, and fields of its config. By `torchrun --nproc-per-node 2` with two
GPUs it runs on them, in bfloat16, which vLLM's kernels for adapters ask for.
"""

import hashlib
import json
import os
import sys
from pathlib import Path

import torch
from peft import LoraConfig
from trl import GRPOConfig
from trlx_hybrid import GRPOTrainer, HybridConfig, hookimpl
from trlx_hybrid.policy.sharded import is_sharded
from trlx_hybrid.testing.models import character_tokenizer, sorting_prompts, tiny_grpo, tiny_model

from tests.support.fsdp import FSDP2, use_fsdp_on_cpu

RANK = int(os.environ["RANK"])
CUDA = torch.cuda.is_available()
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


def digest(policy):
    """Of all parameters in full: FSDP leaves some unsharded after a forward pass."""
    state = hashlib.sha256()
    for p in policy.module.parameters():
        whole = p.full_tensor() if hasattr(p, "full_tensor") else p
        # A clone: what NumPy has seen cannot be resized, as FSDP does.
        state.update(whole.detach().clone().cpu().flatten().view(torch.uint8).numpy().tobytes())
    return state.hexdigest()


class Syncs:
    """What each sync moved and left, and that the trainer's own weights stay as they are."""

    def __init__(self):
        self.reports, self.before = [], ""

    @hookimpl
    def trlx_sync_start(self, session, plan):
        self.before = digest(session.policy)

    @hookimpl
    def trlx_sync_end(self, session, report):
        unchanged = digest(session.policy) == self.before
        self.reports.append([report.weights, report.bytes, report.verified, report.logprob_gap, unchanged])


def main(folder, size, shape):
    syncs = Syncs()
    settings = tiny_grpo(
        folder / "run",
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        max_steps=4,
        vllm_tensor_parallel_size=size,
        vllm_enable_sleep_mode=True,
        use_cpu=not CUDA,
        bf16=CUDA,
    )
    trainer = GRPOTrainer(
        model=tiny_model(dtype=torch.bfloat16 if CUDA else torch.float32, **shape),
        reward_funcs=lambda completions, **_: [float(sum(c.isdigit() for c in text)) for text in completions],
        args=GRPOConfig(**settings),
        train_dataset=sorting_prompts(),
        processing_class=character_tokenizer(),
        hybrid=HybridConfig(
            verify_every=1,
            engine_options={"enforce_eager": True} | ({"kv_cache_memory_bytes": 1 << 30} if CUDA else {}),
        ),
        plugins=[syncs],
        peft_config=LoraConfig(
            r=4,
            lora_alpha=6,
            target_modules=ATTENTION if "architecture" in shape else "all-linear",  # which adapts fused experts too
            init_lora_weights="gaussian",
            rank_pattern={"down_proj": 7},
            alpha_pattern={"k_proj": 10},
        ),
    )
    trainer.train()
    parameters = dict(trainer.model.named_parameters())
    report = {
        "sharded": sum(is_sharded(p) for p in parameters.values()),
        "parameters": len(parameters),
        "adapter": sum(p.numel() * p.element_size() for p in parameters.values() if p.requires_grad),
        "whole": sum(p.numel() for p in parameters.values()),
        "engine_weights": trainer.session.memory.engine_weight_bytes(itemsize=2, ranks_per_replica=size),
        "why": trainer.session.weights_why,
        "syncs": syncs.reports,
        "losses": [log["loss"] for log in trainer.state.log_history if "loss" in log],
    }
    trainer.session.close()
    folder.mkdir(exist_ok=True)
    (folder / f"rank{RANK}.json").write_text(json.dumps(report))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    out, mode, size, *rest = sys.argv[1:]
    shape = {key: int(value) if value.isdigit() else value for key, value in (item.split("=") for item in rest)}
    if mode == "fsdp":
        os.environ.update(FSDP2)
        if shape.get("architecture") == "qwen3_moe":
            os.environ["FSDP_TRANSFORMER_LAYER_CLS_TO_WRAP"] = "Qwen3MoeDecoderLayer"
    os.environ["ACCELERATE_USE_CPU"] = "false" if CUDA else "true"
    if not CUDA and mode == "fsdp":
        use_fsdp_on_cpu()
    main(Path(out), int(size), shape)
