"""One process of the benchmark reshard_grpo: the trainer, with a clock for its steps and weight syncs."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from datasets import Dataset
from torch.distributed.tensor import DTensor
from transformers import PrinterCallback, TrainerCallback
from trl import GRPOConfig
from trlx_hybrid import GRPOTrainer, HybridConfig, hookimpl

from tests.support.fsdp import use_fsdp_on_cpu

from .harness import synchronise
from .rollout import SCALES, tokenizer

GROUP = 8  # completions per prompt, and rows of a forward pass
GAP = "sampling/sampling_logp_difference"  # between engine and trainer, as TRL logs it


class _Clock(TrainerCallback):  # type: ignore[misc]
    """A callback that records the seconds of each step: rollout, loss, backward pass and optimizer."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._started = 0.0

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        synchronise()
        self._started = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        synchronise()
        self.seconds.append(time.perf_counter() - self._started)


class _Syncs:
    """A plugin that keeps the reports of all weight syncs."""

    def __init__(self) -> None:
        self.reports: list[Any] = []

    @hookimpl
    def trlx_sync_end(self, report: Any) -> None:
        self.reports.append(report)


class _Even:
    """A reward that can be learned: the share of even ids, half at first. It keeps digests of the completions."""

    __name__ = "even"

    def __init__(self) -> None:
        self.digests: list[str] = []

    def __call__(self, completion_ids: list[list[int]], **_: Any) -> list[float]:
        self.digests.append(hashlib.sha256(json.dumps(completion_ids).encode()).hexdigest())
        return [sum(i % 2 == 0 for i in ids) / max(1, len(ids)) for ids in completion_ids]


def build(fields: Mapping[str, Any], attention: str) -> Any:
    """Build a model with the same random weights on every rank, each on its own device."""
    from transformers import AutoConfig, AutoModelForCausalLM

    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    with device:
        config = AutoConfig.for_model("qwen2", **fields, eos_token_id=0, pad_token_id=0)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention)


def prompts(order: Mapping[str, Any]) -> Dataset:
    """Return a dataset of different prompts, of words that are a token each."""
    import random

    scale, draw = SCALES[order["model"]], random.Random(0)
    words = [f"{word:x}" for word in range(1, scale.config["vocab_size"])]
    count = order["steps"] * order["processes"] * GROUP
    return Dataset.from_dict({"prompt": [" ".join(draw.choices(words, k=scale.prompt_tokens)) for _ in range(count)]})


def trainer_of(order: Mapping[str, Any], even: _Even, clock: _Clock, syncs: _Syncs) -> Any:
    """Set up GRPO as a user would; weights="auto" finds its path by itself."""
    scale, cuda = SCALES[order["model"]], torch.cuda.is_available()
    return GRPOTrainer(
        model=build(scale.config, order["attention"]),
        reward_funcs=even,
        args=GRPOConfig(
            output_dir=order["folder"],
            per_device_train_batch_size=GROUP,
            num_generations=GROUP,
            max_completion_length=order["tokens"],
            generation_kwargs={"ignore_eos": True},
            max_steps=order["steps"],
            learning_rate=1e-5,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            bf16=cuda,
            use_cpu=not cuda,
            use_vllm=True,
            vllm_mode="colocate",
            vllm_tensor_parallel_size=order["tp"],
            vllm_max_model_length=scale.prompt_tokens + order["tokens"],
        ),
        train_dataset=prompts(order),
        processing_class=tokenizer(scale.config["vocab_size"]),
        callbacks=[clock],
        hybrid=HybridConfig(
            engine_options={
                "max_num_seqs": 64,
                "enforce_eager": not order["graphs"],
                "kv_cache_memory_bytes": order["kv_cache_mib"] << 20,
            }
        ),
        plugins=[syncs],
    )


def check(trainer: Any, syncs: _Syncs) -> None:
    """Check that FSDP2 and resharding ran: accelerate silently turns FSDP2 into DDP where it thinks that it must.

    Raises:
        RuntimeError: one of the two did not run.
    """
    kind = str(trainer.accelerator.distributed_type)
    whole = [name for name, p in trainer.model.named_parameters() if not isinstance(p, DTensor)]
    if kind != "DistributedType.FSDP" or whole or {report.weights for report in syncs.reports} != {"reshard"}:
        why = trainer.session.weights_why
        raise RuntimeError(f"Not FSDP2 with resharding: {kind}, {len(whole)} parameters in full, weights {why}.")


def main(order: Mapping[str, Any]) -> None:
    even, clock, syncs = _Even(), _Clock(), _Syncs()
    if not torch.cuda.is_available():
        use_fsdp_on_cpu()
    trainer = trainer_of(order, even, clock, syncs)
    trainer.remove_callback(PrinterCallback)  # the result has all numbers that are needed
    trainer.train()
    check(trainer, syncs)
    everyone: list[Any] = [None] * dist.get_world_size()
    mine = [(report.seconds, report.bytes, seen) for report, seen in zip(syncs.reports, even.digests, strict=True)]
    dist.all_gather_object(everyone, mine)
    logs = [log for log in trainer.state.log_history if "reward" in log]
    steps = []
    for seconds, ranks, log in zip(clock.seconds, zip(*everyone, strict=True), logs, strict=True):
        slowest = max(taken for taken, *_ in ranks)
        steps.append(
            {
                "seconds": seconds,
                "reshard_seconds": slowest,
                "share": slowest / seconds,
                "received_gb": max(moved for _, moved, _ in ranks) / 1e9,
                "sampled": [digest for *_, digest in ranks],
                "reward": log["reward"],
                "loss": log["loss"],
                "grad_norm": log["grad_norm"],
                "gap_mean": log[f"{GAP}/mean"],
                "gap_max": log[f"{GAP}/max"],
            }
        )
    found = {
        "steps": steps,
        "summary": trainer.session.weights.summary,
        "probe_gap": syncs.reports[0].logprob_gap,
        "distributed_type": str(trainer.accelerator.distributed_type),
        "why": trainer.session.weights_why,
    }
    if trainer.accelerator.process_index == 0:
        (Path(order["folder"]) / "found.json").write_text(json.dumps(found))
    trainer.session.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
