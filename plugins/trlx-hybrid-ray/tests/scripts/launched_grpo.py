"""GRPO with FSDP2 and a tensor-parallel vLLM on a CPU, under either launcher; each rank writes what it saw as JSON.

    launcher scripts/launched_grpo.py OUT [steps=3] [save=1] [pause=0.2]

With `save`, a checkpoint each step; nothing here says what a run that is started again goes on from. Each phase that a
rank enters leaves a file with its name in OUT, for tests that kill it there.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
from transformers import TrainerCallback
from trl import GRPOConfig
from trlx_hybrid import GRPOTrainer, HybridConfig, hookimpl
from trlx_hybrid.testing.models import character_tokenizer, sorting_prompts, tiny_grpo, tiny_model

from tests.support.fsdp import use_fsdp_on_cpu

OUT = Path(sys.argv[1])
OPTIONS = dict(option.split("=") for option in sys.argv[2:])
RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def enter(phase):
    (OUT / f"{phase}.{RANK}").write_text(json.dumps({"pid": os.getpid()}))
    time.sleep(float(OPTIONS.get("pause", 0)))


class Phases(TrainerCallback):
    """Says in which phase the run is, and remembers the step that it began at."""

    began = 0

    @hookimpl
    def trlx_sync_start(self, session, plan):
        enter("sync")

    @hookimpl
    def trlx_enter_phase(self, session, phase, step):
        enter(phase.name.lower())

    def on_train_begin(self, args, state, *rest, **kwargs):
        self.began = state.global_step

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
    settings = tiny_grpo(
        OUT / "run",
        per_device_train_batch_size=4,
        max_steps=int(OPTIONS.get("steps", 3)),
        learning_rate=1e-3,
        optim="adamw_torch",  # has a state to lose, without which accelerate resumes no FSDP2
        vllm_tensor_parallel_size=WORLD,
        save_strategy="steps" if "save" in OPTIONS else "no",
        save_steps=1,
    )
    trainer = GRPOTrainer(
        model=tiny_model(),
        reward_funcs=digits,
        args=GRPOConfig(**settings),
        train_dataset=sorting_prompts(),
        processing_class=character_tokenizer(),
        hybrid=HybridConfig(verify_every=1),
        callbacks=[phases],
        plugins=[phases],
    )
    trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    report = {
        "distributed_type": str(trainer.accelerator.distributed_type),
        "sharded": all(hasattr(p, "full_tensor") for p in trainer.model.parameters()),
        "weights": trainer.session.weights.name,
        "threads": torch.get_num_threads(),
        "rewards": rewards,
        "logs": [{k: log[k] for k in ("loss", "grad_norm", "reward")} for log in logs],
        "resumed": phases.began,
    }
    trainer.session.close()
    (OUT / f"report.{RANK}").write_text(json.dumps(report))
    enter("end")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
