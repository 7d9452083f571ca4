"""Launched by test_rounds_distributed.py: batches sampled in rounds, each rank writes what was trained on as JSON.

RANK=... python rounds_distributed.py OUT [oversampling=1.5] [curriculum]
"""

import json
import os
import sys
from pathlib import Path

import torch
from trl import GRPOConfig
from trlx_hybrid import GRPOTrainer, hookimpl
from trlx_hybrid.contract.protocols import Algorithm
from trlx_hybrid.testing.models import character_tokenizer, sorting_prompts, tiny_grpo, tiny_model

ROWS = 12  # of a batch: three groups, the second of which lies on two ranks


class Watch:
    def __init__(self):
        self.batches = []

    @hookimpl
    def trlx_rollout_end(self, session, trajectories):
        rows = [[row["number"], t.completion_ids, t.reward] for row, t in zip(session.rows, trajectories, strict=True)]
        self.batches.append({"rows": rows, "rounds": session.metrics.get("hybrid/rounds")})


class OnOneRank(Algorithm):
    """Adds nothing to the loss: 0 on the first rank, None on the others."""

    name = "on_one_rank"

    def loss(self, scores, batch):
        return scores.log_probs.sum() * 0.0 if os.environ.get("RANK", "0") == "0" else None


class Offer:
    @hookimpl
    def trlx_register(self, registry):
        registry.offer("algorithm", "on_one_rank", lambda session, options: OnOneRank())


def sometimes(prompts, completion_ids, number, log_extra, **_):
    """The same for all completions of every other prompt."""
    log_extra("number", list(number))
    return [float(n % 2 * (ids[0] % 2)) for n, ids in zip(number, completion_ids, strict=True)]


def main(out, options):
    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    watch = Watch()
    names = ["dynamic_sampling", "on_one_rank"] + ["curriculum"] * ("curriculum" in options)
    sampling = {"rounds": 4, "oversampling": float(options.get("oversampling", 1))}
    dataset = sorting_prompts(24)
    trainer = GRPOTrainer(
        model=tiny_model(),
        reward_funcs=sometimes,
        args=GRPOConfig(
            **tiny_grpo(out / "run", per_device_train_batch_size=ROWS // world, learning_rate=0.1, log_completions=True)
        ),
        train_dataset=dataset.add_column("number", list(range(24))),
        processing_class=character_tokenizer(),
        hybrid={"algorithm": names, "algorithm_options": {"dynamic_sampling": sampling}},
        plugins=[watch, Offer()],
    )
    trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    report = {
        "batches": watch.batches,
        "loss": [log["loss"] for log in logs],
        "grad_norm": [float(log["grad_norm"]) for log in logs],
        "reward": [log["reward"] for log in logs],
        "extra": list(trainer._logs["extra"]["number"]),
    }
    (out / f"rank{rank}.json").write_text(json.dumps(report))
    trainer.session.close()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), dict([*o.split("="), ""][:2] for o in sys.argv[2:]))
