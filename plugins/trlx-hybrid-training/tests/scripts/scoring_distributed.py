"""Launched by test_packed_distributed.py and test_joined.py: GRPO with TRL's scoring and with ours, one run after the
other; or with LoRA layers, which drop, as PEFT computes them and as we do.

scoring_distributed.py OUT [fsdp] [lora] [adaptive] [joined] [empty] [layers] [long]
"""

import json
import os
import sys
from pathlib import Path

from peft import LoraConfig
from peft.tuners.lora.layer import Linear
from trl import GRPOConfig
from trlx_hybrid import GRPOTrainer
from trlx_hybrid.session import Session
from trlx_hybrid.testing.models import character_tokenizer, sorting_prompts, tiny_grpo, tiny_model
from trlx_hybrid_training import layer_memory, recomputation, tiles
from trlx_hybrid_training.scoring import Packed

from tests.support.fsdp import use_fsdp_on_cpu


class Scripted:
    """Completions that do not depend on the model: of ragged lengths, the same in every run. Of the last rank's prompts
    the last may be empty, after the first rollout."""

    def __init__(self, empty: bool) -> None:
        self.calls, self.empty = 0, empty

    def __call__(self, prompts: list[str], trainer: GRPOTrainer) -> dict:
        self.calls += 1
        rank = trainer.accelerator.process_index
        ids = [
            [10 + (7 * i + self.calls + rank) % 80 + k for k in range(1 + (3 * i + rank) % 8)]
            for i in range(len(prompts))
        ]
        prompt_ids = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
        if self.empty and rank and self.calls > 1:
            prompt_ids[-1] = []
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": ids,
            "logprobs": [[-4.5] * len(row) for row in ids],
        }


def main(out: Path, options: set[str]) -> None:
    if "fsdp" in options:
        use_fsdp_on_cpu()
    if "adaptive" in options:  # one rank has memory to spare, the other has none
        Session.free_bytes = lambda self: self.ranks.rank << 50
    counts: list[int] = []
    if "joined" in options:
        stock = Packed.joined

        def joined(self, tokens):
            counts.append(stock(self, tokens))
            return counts[-1]

        Packed.joined = joined
        Session.free_bytes = lambda self: 1 << 50
    if "long" in options:  # rows in tiles, and inputs in host memory
        tiles.TILE, layer_memory.WORTH, recomputation.OFFLOADING = 4, 0, ("cpu",)
        Session.free_bytes = lambda self: 0
    packed = {"balanced": False, "adaptive_checkpointing": bool({"adaptive", "joined", "long"} & options)}
    packed["joined"] = "joined" in options
    arms = {"padded": {}, "packed": {"scoring": "packed", "scoring_options": packed}}
    if "layers" in options:
        arms = {"peft": {}, "layers": {"plugin_options": {"training": {"lora_layers": True}}}}
    drop = 0.1 if "layers" in options else 0.0
    runs = []
    for arm, hybrid in arms.items():
        settings = tiny_grpo(
            out / arm,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=4 if "joined" in options else 2,
            num_iterations=2,
            use_vllm=False,
            beta=0.1 if "lora" in options else 0.0,
        )
        trainer = GRPOTrainer(
            model=tiny_model(),
            reward_funcs=lambda completion_ids, **_: [float(sum(ids) % 7) for ids in completion_ids],
            args=GRPOConfig(**settings),
            train_dataset=sorting_prompts(),
            processing_class=character_tokenizer(),
            peft_config=LoraConfig(r=4, target_modules="all-linear", lora_dropout=drop) if "lora" in options else None,
            rollout_func=Scripted("empty" in options),
            hybrid=hybrid,
        )
        trainer.train()
        logs = [log for log in trainer.state.log_history if "loss" in log]
        seconds = ("step_time", "hybrid/")
        chooses = getattr(trainer.session.scoring, "recomputation", None)
        runs.append(
            {
                "logs": [{k: v for k, v in log.items() if not k.startswith(seconds)} for log in logs],
                "note": trainer.session.scoring.note(),
                "why": trainer.session.scores_apart,
                "recomputed": getattr(chooses, "recomputed", None),
                "joined": counts,
                "in_host_memory": chooses.host.bytes if chooses else 0,
                "layers": sum(isinstance(m, Linear) and "forward" in vars(m) for m in trainer.model.modules()),
                "sharded": any(hasattr(p, "full_tensor") for p in trainer.model.parameters()),
            }
        )
        trainer.session.close()
    # The process group is left to the process's end: DDP's reducer would be its last owner, and gloo's destructor
    # waits, with the interpreter's lock held, for a thread that needs it to let go of the last all-gather's tensors.
    (out / f"rank{os.environ['RANK']}.json").write_text(json.dumps(runs))


if __name__ == "__main__":
    main(Path(sys.argv[1]), set(sys.argv[2:]))
