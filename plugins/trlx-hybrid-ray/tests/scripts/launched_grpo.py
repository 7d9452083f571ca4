"""GRPO with FSDP2 and a tensor-parallel vLLM on a CPU, under either launcher; each rank writes what it saw as JSON.

    launcher scripts/launched_grpo.py OUT [steps=3] [save=1] [pause=0.2]

With `save`, a checkpoint each step; a run that is started again goes on from the last one. Each phase that a rank
enters leaves a file with its name in OUT, for tests that kill it there.
"""

import functools
import json
import os
import sys
import time
from pathlib import Path

import accelerate.state as state
import torch
from accelerate.utils import DistributedType
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig
from trlx_hybrid import GRPOTrainer, HybridConfig, hookimpl
from trlx_hybrid.testing.models import character_tokenizer, tiny_model

OUT = Path(sys.argv[1])
OPTIONS = dict(option.split("=") for option in sys.argv[2:])
RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def use_fsdp_on_cpu():
    """accelerate 1.15 turns its FSDP setting into DDP on a CPU in silence; honoured, FSDP2 over gloo is real."""
    original = state.AcceleratorState.__init__

    @functools.wraps(original)
    def init(self, *args, fsdp_plugin=None, **kwargs):
        original(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if self.distributed_type == DistributedType.MULTI_CPU and fsdp_plugin is not None:
            self.distributed_type = DistributedType.FSDP
            self.fsdp_plugin = fsdp_plugin
            state.PartialState._shared_state["distributed_type"] = self.distributed_type

    state.AcceleratorState.__init__ = init


def enter(phase):
    (OUT / f"{phase}.{RANK}").write_text(json.dumps({"pid": os.getpid()}))
    time.sleep(float(OPTIONS.get("pause", 0)))


class Phases(TrainerCallback):
    """Says in which phase the run is."""

    @hookimpl
    def trlx_sync_start(self, session, plan):
        enter("sync")

    @hookimpl
    def trlx_enter_phase(self, session, phase, step):
        enter(phase.name.lower())

    def on_optimizer_step(self, *args, **kwargs):
        enter("optimizer")

    def on_save(self, *args, **kwargs):
        enter("saved")


def main():
    enter("start")
    use_fsdp_on_cpu()
    rewards = []

    def digits(completions, **_):
        rewards.append([float(sum(c.isdigit() for c in text)) + len(text) / 100 for text in completions])
        return rewards[-1]

    phases = Phases()
    trainer = GRPOTrainer(
        model=tiny_model(),
        reward_funcs=digits,
        args=GRPOConfig(
            output_dir=str(OUT / "run"),
            per_device_train_batch_size=4,
            num_generations=4,
            max_completion_length=8,
            max_steps=int(OPTIONS.get("steps", 3)),
            learning_rate=1e-2,
            optim="sgd",
            logging_steps=1,
            report_to=[],
            use_cpu=True,
            bf16=False,
            disable_tqdm=True,
            use_vllm=True,
            vllm_max_model_length=48,
            vllm_tensor_parallel_size=WORLD,
            save_strategy="steps" if "save" in OPTIONS else "no",
            save_steps=1,
        ),
        train_dataset=Dataset.from_dict({"prompt": [f"sort {i * 7919 % 1000}=" for i in range(32)]}),
        processing_class=character_tokenizer(),
        hybrid=HybridConfig(verify_every=1),
        callbacks=[phases],
        plugins=[phases],
    )
    checkpoint = None
    if "save" in OPTIONS:
        from trlx_hybrid_ray.launch.resume import checkpoint_to_resume

        checkpoint = checkpoint_to_resume(OUT / "run")
    trainer.train(resume_from_checkpoint=checkpoint)
    logs = [log for log in trainer.state.log_history if "loss" in log]
    report = {
        "distributed_type": str(trainer.accelerator.distributed_type),
        "sharded": all(hasattr(p, "full_tensor") for p in trainer.model.parameters()),
        "weights": trainer.session.weights.name,
        "threads": torch.get_num_threads(),
        "rewards": rewards,
        "logs": [{k: log[k] for k in ("loss", "grad_norm", "reward")} for log in logs],
        "resumed": checkpoint,
    }
    trainer.session.close()
    (OUT / f"report.{RANK}").write_text(json.dumps(report))
    enter("end")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
