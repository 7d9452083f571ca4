"""Launched by tests/test_reference_distributed.py: two adapters train with `beta > 0`, then resume from step 2.

    python reference_distributed.py OUT MOMENTUM [fsdp STATE_DICT_TYPE]

Each rank writes as JSON what it saw; rank 0 writes the adapters that training ended with beside it.
"""

import json
import os
import sys
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from trl import GRPOConfig
from trlx_hybrid import GRPOTrainer, HybridConfig
from trlx_hybrid.testing.models import character_tokenizer, sorting_prompts, tiny_grpo, tiny_model

from tests.support.fsdp import FSDP2, use_fsdp_on_cpu

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
NAMES = ["first", "second"]


def adapted():
    """A policy with two active adapters, neither of which starts from zero."""
    torch.manual_seed(0)
    given = {"target_modules": ["q_proj", "down_proj"], "init_lora_weights": False, "task_type": "CAUSAL_LM"}
    model = get_peft_model(tiny_model(), LoraConfig(r=4, **given), adapter_name=NAMES[0])
    model.add_adapter(NAMES[1], LoraConfig(r=2, **given))
    model.base_model.set_adapter(NAMES)
    return model


def adapters(model):
    """Return the parameters of all adapters, in full, by name."""
    found = {name: p for name, p in model.named_parameters() if "lora_" in name}
    return {name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone() for name, p in found.items()}


def trained(folder, weights, momentum, resume=None):
    trainer = GRPOTrainer(
        model=adapted(),
        reward_funcs=lambda completions, **_: [float(sum(c.isdigit() for c in text)) for text in completions],
        args=GRPOConfig(
            **tiny_grpo(
                folder,
                per_device_train_batch_size=8 // WORLD,
                learning_rate=1e-2,
                optim_args=f"momentum={momentum}",
                beta=0.1,
                save_strategy="steps",
                save_steps=2,
                vllm_tensor_parallel_size=WORLD if weights == "reshard" else 1,
            )
        ),
        train_dataset=sorting_prompts(),
        processing_class=character_tokenizer(),
        hybrid=HybridConfig(weights=weights, verify_every=1),
    )
    start = adapters(trainer.model)
    trainer.train(resume_from_checkpoint=resume)
    end = adapters(trainer.model)
    report = {
        "active": trainer.model.active_adapters,
        "kl": [log["kl"] for log in trainer.state.log_history if "kl" in log],
        "moved": [
            adapter
            for adapter in trainer.model.peft_config
            if any(bool((end[name] != start[name]).any()) for name in end if adapter in name.split("."))
        ],
    }
    trainer.session.close()
    return report, end


def main(out, weights, momentum):
    report, end = trained(out / "whole", weights, momentum)
    if WORLD > 1:
        again, others = trained(out / "resumed", weights, momentum, str(out / "whole" / "checkpoint-2"))
        report["resumed_kl"] = again["kl"]
        report["differing"] = [name for name in end if not torch.equal(end[name], others[name])]
    if RANK == 0:
        torch.save(end, out / "adapters.pt")
    (out / f"rank{RANK}.json").write_text(json.dumps(report))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    folder, momentum, *fsdp = sys.argv[1:]
    os.environ["ACCELERATE_USE_CPU"] = "true"
    if fsdp:
        os.environ.update(FSDP2 | {"FSDP_STATE_DICT_TYPE": fsdp[1]})
        use_fsdp_on_cpu()
    main(Path(folder), "reshard" if fsdp else "auto", float(momentum))
