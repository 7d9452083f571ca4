"""Launched by tests/test_resuming_order.py on two ranks: a run, and the runs that resume from each of its steps.

Each rank writes as JSON from which steps the resumed run was another one, and how far its weights ended apart.
"""

import json
import os
import sys
from pathlib import Path

import torch
from trl import GRPOConfig
from trlx_hybrid import GRPOTrainer
from trlx_hybrid.testing.models import character_tokenizer, sorting_prompts, tiny_grpo, tiny_model


def main(out: Path, shape: dict) -> None:
    stream = shape.pop("stream", False)
    data = sorting_prompts(shape.pop("count", 4))
    if stream:
        data = data.to_iterable_dataset()
    rows = shape.pop("per_device_train_batch_size", 8 // shape.get("steps_per_generation", 1)) // 2

    def trained(folder: Path, resume: Path | None) -> tuple[list, dict]:
        seen: list = []

        def digits(completions, completion_ids, **kwargs):
            seen.extend(completion_ids)
            return [sum(c.isdigit() for c in text) + 0.3 * (i % 5) for i, text in enumerate(completions)]

        settings = {"save_strategy": "steps", "save_steps": 1, "learning_rate": 3e-3, "use_vllm": False} | shape
        settings["per_device_train_batch_size"] = rows
        trainer = GRPOTrainer(
            model=tiny_model(),
            reward_funcs=digits,
            args=GRPOConfig(**tiny_grpo(folder, **settings)),
            train_dataset=data,
            processing_class=character_tokenizer(),
        )
        trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
        return seen, {name: p.detach().clone() for name, p in trainer.model.named_parameters()}

    seen, weights = trained(out / "whole", None)
    report: dict = {"rollouts": len(seen), "resumed": [], "wrong": {}}
    for step in range(1, shape["max_steps"]):
        again, others = trained(out / f"from{step}", out / "whole" / f"checkpoint-{step}")
        distance = max(float((value - weights[name]).abs().max()) for name, value in others.items())
        report["resumed"].append(step)
        if distance or again != seen[len(seen) - len(again) :]:
            report["wrong"][step] = distance
    (out / f"rank{os.environ['RANK']}.json").write_text(json.dumps(report))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
