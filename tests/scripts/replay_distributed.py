"""Launched by tests/test_replay.py: two ranks record a run and replay it; each writes what it saw as JSON."""

import json
import os
import sys
from pathlib import Path

import torch
from trl import GRPOConfig
from trlx_hybrid import GRPOTrainer
from trlx_hybrid.errors import ConfigError
from trlx_hybrid.testing.models import character_tokenizer, sorting_prompts, tiny_grpo, tiny_model


def digits(completions, **kwargs):
    return [float(sum(c.isdigit() for c in text)) for text in completions]


def main(out: Path) -> None:
    rank = int(os.environ["RANK"])
    recording = out / "recording"

    def start(**hybrid):
        settings = tiny_grpo(
            out / "run", use_vllm=False, per_device_train_batch_size=4, max_steps=2, optim="adamw_torch"
        )
        return GRPOTrainer(
            model=tiny_model(),
            reward_funcs=digits,
            args=GRPOConfig(**settings),
            train_dataset=sorting_prompts(),
            processing_class=character_tokenizer(),
            hybrid=hybrid,
        )

    def seen(trainer):
        trainer.train()
        logs = [log for log in trainer.state.log_history if "grad_norm" in log]
        kept = ("loss", "grad_norm", "reward", "num_tokens", "completions/mean_length")
        return [[log[name] for name in kept] for log in logs], list(trainer.model.parameters())

    recorded, weights = seen(start(record=str(recording)))
    replayed, again = seen(start(replay=str(recording)))
    report = {"recorded": recorded, "replayed": replayed}
    report["same_weights"] = all(torch.equal(a, b) for a, b in zip(weights, again, strict=True))
    if rank == 1:
        (recording / "rank1" / "train-000001-0.safetensors").unlink()
    torch.distributed.barrier()
    try:
        start(replay=str(recording))
    except ConfigError as error:
        report["torn"] = str(error)
    (out / f"rank{rank}.json").write_text(json.dumps(report))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
