"""Launched by tests/test_distributed.py: GRPO through vLLM on tiny models; each rank writes what it saw as JSON.

accelerate launch --num_processes N tests/scripts/grpo_distributed.py OUT [fsdp] [lora] [tp=2] [trainers=2] [resume]
    [evaluate]
"""

import json
import os
import sys
from pathlib import Path

import torch
from peft import LoraConfig
from trl import GRPOConfig
from trlx_hybrid import GRPOTrainer
from trlx_hybrid.testing.models import character_tokenizer, sorting_prompts, tiny_grpo, tiny_model

from tests.support.fsdp import use_fsdp_on_cpu


def main(out: Path, options: dict[str, str]) -> None:
    if "fsdp" in options:
        use_fsdp_on_cpu()
    world = int(os.environ.get("WORLD_SIZE", "1"))
    rank = int(os.environ.get("RANK", "0"))
    seen: list[dict] = []

    def digits(prompts, completions, completion_ids, **kwargs):
        seen.extend({"prompt": p, "ids": list(i)} for p, i in zip(prompts, completion_ids, strict=True))
        return [float(sum(c.isdigit() for c in text)) for text in completions]

    report: dict = {"runs": []}
    for index in range(int(options.get("trainers", 1))):
        seen.clear()
        settings = tiny_grpo(
            out / f"run{index}",
            per_device_train_batch_size=8 // world,
            max_steps=int(options.get("steps", 3)),
            learning_rate=float(options.get("lr", 3e-3)),
            vllm_tensor_parallel_size=int(options.get("tp", 1)),
            save_strategy="steps" if "save" in options else "no",
            save_steps=2,
        )
        trainer = GRPOTrainer(
            model=tiny_model(tied="tied" in options),
            reward_funcs=digits,
            args=GRPOConfig(**settings),
            train_dataset=sorting_prompts(),
            processing_class=character_tokenizer(),
            peft_config=LoraConfig(r=4, target_modules="all-linear") if "lora" in options else None,
        )
        if "evaluate" in options:
            trainer.evaluate(sorting_prompts(8))
            seen.clear()
        trainer.train(resume_from_checkpoint=options.get("resume"))
        logs = [log for log in trainer.state.log_history if "loss" in log]
        report["runs"].append(
            {
                "seen": list(seen),
                "loss": [log["loss"] for log in logs],
                "grad_norm": [float(log["grad_norm"]) for log in logs],
                "tokens": [log["hybrid/step/tokens"] for log in logs],
                "padded_tokens": [log["hybrid/step/padded_tokens"] for log in logs],
                "gap": [log["sampling/sampling_logp_difference/max"] for log in logs],
                "version": trainer.session.versions.engine_version,
            }
        )
    report["distributed_type"] = str(trainer.accelerator.distributed_type)
    report["sharded"] = any(hasattr(p, "full_tensor") for p in trainer.model.parameters())
    report["folder"] = str(out)
    (out / f"rank{rank}.json").write_text(json.dumps(report))
    trainer.session.close()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), dict([*o.split("="), ""][:2] for o in sys.argv[2:]))
