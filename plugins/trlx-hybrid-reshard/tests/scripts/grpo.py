"""Launched by test_grpo.py: GRPO with FSDP2 and a tensor-parallel vLLM on a CPU, three times; each rank reports."""

import functools
import json
import os
import sys
from pathlib import Path

import accelerate.state as state
import torch
from accelerate.utils import DistributedType
from datasets import Dataset
from peft import LoraConfig
from torch.distributed.tensor import DTensor
from trl import GRPOConfig
from trlx_hybrid import GRPOTrainer, HybridConfig, hookimpl
from trlx_hybrid.testing.models import character_tokenizer, tiny_model
from trlx_hybrid_vllm.internals import model_of

FSDP2 = {
    "fsdp_version": 2,
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_transformer_layer_cls_to_wrap": "Qwen3DecoderLayer",
    "fsdp_reshard_after_forward": True,
    "fsdp_state_dict_type": "FULL_STATE_DICT",
    "fsdp_cpu_ram_efficient_loading": False,
}
FROZEN = "layers.1.mlp"
ADAPTED = ("q_proj", "k_proj", "v_proj", "down_proj")
RUNS = [
    {"engine": {}, "tied": False},
    {"engine": {"dtype": "bfloat16", "enable_sleep_mode": True}, "tied": True},
    {"engine": {}, "tied": False, "lora": True},
]
RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def use_fsdp_on_cpu():
    """accelerate 1.15 turns its FSDP setting into DDP on a CPU in silence; honoured, FSDP2 over gloo is real."""
    os.environ.update({"ACCELERATE_USE_CPU": "true", "ACCELERATE_USE_FSDP": "true"})
    os.environ.update({key.upper(): str(value) for key, value in FSDP2.items()})
    original = state.AcceleratorState.__init__

    @functools.wraps(original)
    def init(self, *args, fsdp_plugin=None, **kwargs):
        original(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if self.distributed_type == DistributedType.MULTI_CPU and fsdp_plugin is not None:
            self.distributed_type = DistributedType.FSDP
            self.fsdp_plugin = fsdp_plugin
            state.PartialState._shared_state["distributed_type"] = self.distributed_type

    state.AcceleratorState.__init__ = init


class Poisoned:
    """Before each sync the engine's memory is NaN, except for weights that rest there. It is looked at after."""

    def __init__(self, rests):
        self.rests = rests
        self.syncs = []

    @hookimpl
    def trlx_sync_start(self, session, plan):
        whole = session.live_engine.weights_lost or not self.syncs
        for name, p in model_of(session.live_engine.llm).named_parameters():
            if whole or not self.rests(name):
                p.data.fill_(torch.nan)

    @hookimpl
    def trlx_sync_end(self, session, report):
        engine, moves = session.live_engine, session.weights.moves
        parameters = model_of(engine.llm).named_parameters()
        self.syncs.append(
            {
                "weights": report.weights,
                "bytes": report.bytes,
                "floor": moves.floor_bytes,
                "tensors": report.tensors,
                "gap": report.logprob_gap,
                "differing": engine.differing(session.policy.full_weights()),
                "unwritten": [name for name, p in parameters if p.isnan().any()],
            }
        )


def main(folder, index):
    wanted = RUNS[index]
    lora = wanted.get("lora", False)
    plugin = Poisoned(lambda name: ("qkv_proj" not in name and "down_proj" not in name) if lora else FROZEN in name)
    model = tiny_model(tied=wanted["tied"])
    for name, p in model.named_parameters():
        p.requires_grad_(FROZEN not in name)
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [float(sum(c.isdigit() for c in text)) for text in completions],
        args=GRPOConfig(
            output_dir=str(folder / f"run{index}"),
            per_device_train_batch_size=4,
            num_generations=4,
            max_completion_length=8,
            max_steps=3,
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
            save_strategy="no",
        ),
        train_dataset=Dataset.from_dict({"prompt": [f"sort {i * 7919 % 1000}=" for i in range(32)]}),
        processing_class=character_tokenizer(),
        hybrid=HybridConfig(engine_options=wanted["engine"], verify_every=1),
        plugins=[plugin],
        peft_config=LoraConfig(r=4, lora_alpha=12, target_modules=list(ADAPTED)) if lora else None,
    )
    trainer.train()
    report = {
        "distributed_type": str(trainer.accelerator.distributed_type),
        "sharded": all(isinstance(p, DTensor) for p in trainer.model.parameters()),
        "why": trainer.session.weights_why,
        "syncs": plugin.syncs,
        "loss": [log["loss"] for log in trainer.state.log_history if "loss" in log],
    }
    trainer.session.close()
    return report


if __name__ == "__main__":
    use_fsdp_on_cpu()
    out = Path(sys.argv[1])
    seen = [main(out, index) for index in range(len(RUNS))]
    (out / f"rank{RANK}.json").write_text(json.dumps(seen))
    torch.distributed.destroy_process_group()
