"""Launched by tests/test_manifest.py on two ranks: a run starts again in a folder, and each rank writes a report.

    restart_distributed.py OUT FOLDER [sharded]

With `sharded`, under FSDP2, whose ranks each write a part of a checkpoint.
"""

import contextlib
import io
import json
import logging
import os
import sys
from pathlib import Path

from trlx_hybrid.testing.models import sorting_prompts, tiny_grpo

from tests.support.fsdp import FSDP2, use_fsdp_on_cpu

if "sharded" in sys.argv:
    os.environ.update(FSDP2 | {"FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT"})
    use_fsdp_on_cpu()

import torch
from trl import GRPOConfig
from trlx_hybrid import GRPOTrainer
from trlx_hybrid.testing.models import character_tokenizer, tiny_model


def main(out: Path, folder: Path) -> None:
    os.environ["TRLX_HYBRID_RESUME"] = "1"
    said, rollouts = io.StringIO(), []
    logging.getLogger("trlx_hybrid").addHandler(logging.StreamHandler(said))

    def digits(completions, **kwargs):
        rollouts.append(len(completions))
        return [float(sum(c.isdigit() for c in text)) for text in completions]

    settings = {"save_strategy": "steps", "save_steps": 1, "use_vllm": False}
    trainer = GRPOTrainer(
        model=tiny_model(),
        reward_funcs=digits,
        args=GRPOConfig(**tiny_grpo(folder, per_device_train_batch_size=4, **settings)),
        train_dataset=sorting_prompts(),
        processing_class=character_tokenizer(),
    )
    with contextlib.redirect_stderr(said):
        trainer.train()
    report = {
        "rank": int(os.environ["RANK"]),
        "rollouts": len(rollouts),
        "steps": trainer.state.global_step,
        "manifest": json.loads((folder / "checkpoint-3" / "trlx_hybrid_manifest.json").read_text()),
        "said": said.getvalue(),
    }
    (out / f"rank{report['rank']}.json").write_text(json.dumps(report))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
