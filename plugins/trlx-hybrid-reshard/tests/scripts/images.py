"""Launched by test_images.py: GRPO on pictures with FSDP2 and a tensor-parallel vLLM on a CPU; each rank reports."""

import json
import os
import sys
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor
from trl import GRPOConfig
from trlx_hybrid import GRPOTrainer, HybridConfig, hookimpl
from trlx_hybrid.errors import ConfigError
from trlx_hybrid.testing.models import MARKS, tiny_grpo, tiny_vision_model

from tests.support.fsdp import FSDP2, use_fsdp_on_cpu
from tests.support.vision import counted_squares, picture

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
LAYERS = {"qwen2_5_vl": "Qwen2_5_VLDecoderLayer", "qwen3_vl": "Qwen3VLTextDecoderLayer"}


class Syncs:
    def __init__(self):
        self.seen = []

    @hookimpl
    def trlx_sync_end(self, session, report):
        differing = session.live_engine.differing(session.policy.full_weights())
        self.seen.append({"weights": report.weights, "gap": report.logprob_gap, "differing": differing})


def main(folder, architecture):
    model, processor = tiny_vision_model(architecture, tower_heads=max(WORLD, 2))
    plugin = Syncs()
    settings = tiny_grpo(folder, per_device_train_batch_size=4, vllm_tensor_parallel_size=WORLD)
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=lambda completion_ids, **_: [float(sum(ids) % 7) for ids in completion_ids],
        args=GRPOConfig(**settings | {"learning_rate": 1e-2}),
        train_dataset=counted_squares(architecture),
        processing_class=processor,
        hybrid=HybridConfig(verify_every=1),
        plugins=[plugin],
    )
    trainer.train()
    sharded = all(isinstance(p, DTensor) for p in trainer.model.parameters())
    report = {
        "syncs": plugin.seen,
        "sharded": sharded,
        "logs": [log for log in trainer.state.log_history if "loss" in log],
    }
    trainer.session.close()
    return report


def uneven(folder):
    """Two steps on batches whose images are all on the first rank; what was refused, or each step's gradient."""
    model, processor = tiny_vision_model("qwen2_5_vl")
    image = picture("qwen2_5_vl", 3)
    text = f"{MARKS['vision_start']}{MARKS['image_pad']}{MARKS['vision_end']}many"
    shown = processor(text=[text], images=[image])["input_ids"][0]

    def rollout(prompts, trainer):
        ids = [5, 6] if RANK else shown
        images = [None if RANK else [image]] * len(prompts)
        sampled = [[7 + i % 3] for i in range(len(prompts))]
        logprobs = [[-1.0]] * len(prompts)
        return {"prompt_ids": [ids] * len(prompts), "completion_ids": sampled, "logprobs": logprobs, "images": images}

    settings = {"per_device_train_batch_size": 4, "max_steps": 2, "gradient_checkpointing": False}
    settings["vllm_importance_sampling_correction"] = False  # these tokens were not sampled
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=lambda completion_ids, **_: [float(ids[0]) for ids in completion_ids],
        args=GRPOConfig(**tiny_grpo(folder, **settings)),
        train_dataset=counted_squares("qwen2_5_vl").remove_columns("image"),
        processing_class=processor,
        rollout_func=rollout,
    )
    try:
        trainer.train()
        return [log["grad_norm"] for log in trainer.state.log_history if "loss" in log]
    except ConfigError as error:
        return str(error)
    finally:
        trainer.session.close()


if __name__ == "__main__":
    out, what = Path(sys.argv[1]), sys.argv[2]
    if what == "ddp":
        os.environ["ACCELERATE_USE_CPU"] = "true"
    else:
        os.environ.update(FSDP2 | {"FSDP_TRANSFORMER_LAYER_CLS_TO_WRAP": LAYERS.get(what, LAYERS["qwen2_5_vl"])})
        use_fsdp_on_cpu()
    (out / f"rank{RANK}.json").write_text(json.dumps(main(out, what) if what in LAYERS else uneven(out)))
    torch.distributed.destroy_process_group()
