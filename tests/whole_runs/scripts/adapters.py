"""GRPO with two active LoRA adapters, neither of which starts from zero, and every flag of TRL and of HybridConfig."""

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, ModelConfig, TrlParser
from trlx_hybrid import GRPOTrainer, HybridConfig

NAMES = ["first", "second"]


def reward(completion_ids, **kwargs):
    return [float(sum(ids) % 7) for ids in completion_ids]


def adapted(model):
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(
        model.model_name_or_path, dtype=model.dtype, attn_implementation=model.attn_implementation
    )
    given = {"target_modules": model.lora_target_modules, "init_lora_weights": False, "task_type": "CAUSAL_LM"}
    policy = get_peft_model(base, LoraConfig(r=16, **given), adapter_name=NAMES[0])
    policy.add_adapter(NAMES[1], LoraConfig(r=8, **given))
    policy.base_model.set_adapter(NAMES)
    return policy


def values(policy):
    """Return all parameters in full, by name, on the CPU."""
    found = ((name, p.detach()) for name, p in policy.named_parameters())
    return {name: (p.full_tensor() if hasattr(p, "full_tensor") else p).cpu().clone() for name, p in found}


if __name__ == "__main__":
    config, model, hybrid = TrlParser((GRPOConfig, ModelConfig, HybridConfig)).parse_args_and_config()
    rows = Dataset.from_dict({"prompt": [f"what follows {n}? " for n in range(64)]})
    trainer = GRPOTrainer(
        model=adapted(model),
        reward_funcs=reward,
        args=config,
        train_dataset=rows,
        eval_dataset=rows.select(range(8)),
        hybrid=hybrid,
    )
    policy = trainer.accelerator.unwrap_model(trainer.model)
    before = values(policy)
    trainer.train(resume_from_checkpoint=config.resume_from_checkpoint)
    after = values(policy)
    moved = [name for name in after if not torch.equal(before[name], after[name])]
    counts = {adapter: sum(adapter in name.split(".") for name in moved) for adapter in NAMES}
    if trainer.is_world_process_zero():
        print(f"MOVED {counts} BASE {sum('lora_' not in name for name in moved)}", flush=True)
