"""Automatic offload on one GPU: it moves what it must, changes nothing else, and without it the run is refused.

    python offload_on_gpu.py OUT [KV_GIB]

Three runs of a 1.5B shape with an fp32 master: a KV cache of 8 GiB and no offload; one of KV_GIB (by default all but 17
of the GPU's, 62 of 80 GB), which leaves no room for AdamW's state, with offload "auto"; and the same with "none".
"""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import torch
from trl import GRPOConfig
from trlx_hybrid import GRPOTrainer, HybridConfig
from trlx_hybrid.testing.models import character_tokenizer, sorting_prompts, tiny_grpo, tiny_model

SHAPE = {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12}
SHAPE |= {"num_key_value_heads": 2, "head_dim": 128, "vocab_size": 151936, "initializer_range": 0.02}
MEMORY = ("moved/optimizer_mib", "moved/kv_cache_mib", "host_arena_mib")
SECONDS = 300  # for a run
BESIDE = 17  # GiB, of which policy, engine and activations take what AdamW's state would need


def run(out, kv_bytes, offload):
    """One of the runs; prints what it sampled and learned, and what memory moved meanwhile."""
    sampled = []

    def reward(completion_ids, **_):
        sampled.append(hashlib.sha256(json.dumps(completion_ids).encode()).hexdigest()[:12])
        return [sum(ids) % 7 / 7 for ids in completion_ids]

    model = tiny_model(**SHAPE)
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=GRPOConfig(
            **tiny_grpo(
                out / "run",
                per_device_train_batch_size=8,
                num_generations=8,
                max_completion_length=64,
                vllm_max_model_length=128,
                max_steps=4,
                optim="adamw_torch_fused",  # whose state is what moves
                learning_rate=1e-4,
                use_cpu=not torch.cuda.is_available(),
                bf16=torch.cuda.is_available(),
                gradient_checkpointing=True,
                generation_kwargs={"ignore_eos": True},
            )
        ),
        train_dataset=sorting_prompts(64),
        processing_class=character_tokenizer(),
        hybrid=HybridConfig(
            engine="vllm",
            offload=offload,
            engine_options={"kv_cache_memory_bytes": kv_bytes, "enforce_eager": True},
        ),
    )
    trainer.train()
    weights = hashlib.sha256()
    for parameter in model.parameters():
        weights.update(parameter.detach().cpu().numpy().tobytes())
    logs = [log for log in trainer.state.log_history if "loss" in log]
    memory = {name: logs[-1].get(f"hybrid/memory/{name}", 0) for name in MEMORY}
    learned = [(log["loss"], log["grad_norm"]) for log in logs]
    print(json.dumps({"memory": memory, "same": [sampled, learned, weights.hexdigest()]}), flush=True)


def main():
    total = torch.cuda.get_device_properties(0).total_memory >> 30
    out, kv = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else total - BESIDE
    ended = []
    for size, offload in ((8, "none"), (kv, "auto"), (kv, "none")):
        command = [sys.executable, __file__, str(out), str(size << 30), offload]
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
        ended.append(done)
        print(f"{size} GiB, {offload}: {(done.stdout or done.stderr).strip().splitlines()[-1]}", flush=True)
    for done in ended[:2]:
        assert done.returncode == 0, done.stderr[-4000:]
    free, moved = (json.loads(done.stdout.splitlines()[-1]) for done in ended[:2])
    assert free["memory"]["moved/optimizer_mib"] == 0
    assert moved["memory"]["moved/optimizer_mib"] > 11 << 10, "nothing moved"
    assert moved["memory"]["host_arena_mib"] > 11 << 10
    assert moved["same"] == free["same"], "offload changed the training"
    assert all(norm == norm and norm > 0 for _, norm in free["same"][1]), "nothing was learned"
    assert "MemoryPlanError" in ended[2].stderr


if __name__ == "__main__":
    if len(sys.argv) > 3:
        run(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
    elif torch.cuda.is_available():
        main()
    else:
        sys.exit("It needs a GPU.")
