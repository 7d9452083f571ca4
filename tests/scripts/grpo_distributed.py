"""Launched by tests/test_distributed.py: GRPO through vLLM on tiny models; each rank writes what it saw as JSON.

accelerate launch --num_processes N tests/scripts/grpo_distributed.py OUT [fsdp] [lora] [tp=2] [trainers=2] [resume]
"""

import functools
import json
import os
import sys
from pathlib import Path

os.environ.update(HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="ERROR", TOKENIZERS_PARALLELISM="false")


def let_accelerate_use_fsdp_on_cpu() -> None:
    """accelerate 1.15 turns its FSDP setting into DDP on a CPU in silence; honoured, FSDP2 over gloo is real."""
    import accelerate.state as state
    from accelerate.utils import DistributedType

    original = state.AcceleratorState.__init__

    @functools.wraps(original)
    def init(self, *args, fsdp_plugin=None, **kwargs):
        original(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if self.distributed_type == DistributedType.MULTI_CPU and fsdp_plugin is not None:
            self.distributed_type = DistributedType.FSDP
            self.fsdp_plugin = fsdp_plugin
            state.PartialState._shared_state["distributed_type"] = self.distributed_type

    state.AcceleratorState.__init__ = init


def main(out: Path, options: dict[str, str]) -> None:
    if "fsdp" in options:
        let_accelerate_use_fsdp_on_cpu()
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from trl import GRPOConfig
    from trlx_hybrid import GRPOTrainer
    from trlx_hybrid.testing.models import character_tokenizer, tiny_model

    world = int(os.environ.get("WORLD_SIZE", "1"))
    rank = int(os.environ.get("RANK", "0"))
    seen: list[dict] = []

    def digits(prompts, completions, completion_ids, **kwargs):
        seen.extend({"prompt": p, "ids": list(i)} for p, i in zip(prompts, completion_ids, strict=True))
        return [float(sum(c.isdigit() for c in text)) for text in completions]

    report: dict = {"runs": []}
    for index in range(int(options.get("trainers", 1))):
        seen.clear()
        config = GRPOConfig(
            output_dir=str(out / f"run{index}"),
            per_device_train_batch_size=8 // world,
            num_generations=4,
            max_completion_length=8,
            max_steps=int(options.get("steps", 3)),
            learning_rate=float(options.get("lr", 3e-3)),
            optim="sgd",  # Adam divides rounding noise by itself where a gradient is zero
            logging_steps=1,
            report_to=[],
            use_cpu=True,
            bf16=False,
            disable_tqdm=True,
            use_vllm=True,
            vllm_max_model_length=48,
            vllm_tensor_parallel_size=int(options.get("tp", 1)),
            save_strategy="steps" if "save" in options else "no",
            save_steps=2,
            save_only_model=False,
        )
        trainer = GRPOTrainer(
            model=tiny_model(tied="tied" in options),
            reward_funcs=digits,
            args=config,
            train_dataset=Dataset.from_dict({"prompt": [f"sort {i * 7919 % 1000}=" for i in range(32)]}),
            processing_class=character_tokenizer(),
            peft_config=LoraConfig(r=4, target_modules="all-linear") if "lora" in options else None,
        )
        trainer.train(resume_from_checkpoint=options.get("resume"))
        logs = [log for log in trainer.state.log_history if "loss" in log]
        report["runs"].append(
            {
                "seen": list(seen),
                "loss": [log["loss"] for log in logs],
                "grad_norm": [float(log["grad_norm"]) for log in logs],
                "gap": [log["sampling/sampling_logp_difference/max"] for log in logs],
                "version": trainer.session.freshness.engine_version,
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
