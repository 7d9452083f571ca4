"""Launched by test_sharded_adapters.py: adapters of many kinds on a policy under FSDP2, merged as the engine gets them;
each rank reports how far the logits of a plain model with these weights are from the policy's."""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from peft import HRAConfig, IA3Config, LoHaConfig, LoraConfig, OFTConfig, VeraConfig, get_peft_model
from torch.distributed.fsdp import fully_shard
from trlx_hybrid.policy.policy import Policy
from trlx_hybrid.testing.models import tiny_model

TARGETS = ["q_proj", "down_proj"]
KINDS = {
    "lora": LoraConfig(r=4, target_modules=TARGETS),
    "dora": LoraConfig(r=4, target_modules=TARGETS, use_dora=True),
    "ia3": IA3Config(target_modules=TARGETS, feedforward_modules=["down_proj"]),
    "oft": OFTConfig(r=0, oft_block_size=4, target_modules=TARGETS),
    "loha": LoHaConfig(r=4, target_modules=TARGETS),
    "vera": VeraConfig(r=4, target_modules=["q_proj"]),
    "hra": HRAConfig(r=4, target_modules=TARGETS),
}


@torch.no_grad()
def gaps(config):
    """Of two merges in turn."""
    torch.manual_seed(0)
    model = get_peft_model(tiny_model("qwen3"), config).eval()
    for p in model.parameters():
        if p.requires_grad:
            p.add_(0.05 * torch.randn_like(p))
    ids = torch.arange(3, 20)[None]
    wanted = model(input_ids=ids).logits
    for layer in model.get_base_model().model.layers:
        fully_shard(layer)
    fully_shard(model)
    policy = Policy(lambda: model, None, torch.device("cpu"), fsdp_version=2)
    found = []
    for _ in range(2):
        plain = tiny_model("qwen3").eval()
        plain.load_state_dict(dict(policy.full_weights()))
        found.append(float((plain(input_ids=ids).logits - wanted).abs().max()))
    same = torch.equal(model(input_ids=ids).logits, wanted)
    policy.reshard()
    return {"gaps": found, "same": same, "sharded": all(hasattr(p, "full_tensor") for p in model.parameters())}


def main(folder):
    dist.init_process_group("gloo")
    report = {name: gaps(config) for name, config in KINDS.items()}
    (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(report))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
