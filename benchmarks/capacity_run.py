"""One trainer with a model and an engine, which says in one line of JSON what it held: `benchmarks.capacity`'s child.

    python -m benchmarks.capacity_run trl|hybrid SIZE SHARE STEPS FOLDER

SHARE is TRL's share of the GPU, or for `hybrid` the peak in bytes that must not be exceeded; "None" leaves the choice
to the trainer.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from .capacity import CONTEXT, SEQUENCES, SHAPES


class Peak:
    """The most of the GPU's memory that was in use, by anyone, sampled every 5 ms."""

    def __init__(self) -> None:
        self.bytes = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        import torch

        while not self._stop.wait(0.005):
            if torch.cuda.is_available():
                free, total = torch.cuda.mem_get_info()
                self.bytes = max(self.bytes, total - free)


def build(kind: str, size: str, share: float | None, steps: int, folder: str) -> Any:
    """The trainer, on a bf16 model of random weights."""
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoConfig, AutoModelForCausalLM
    from trl import GRPOConfig, GRPOTrainer

    from .rollout import tokenizer

    cuda = torch.cuda.is_available()
    config = AutoConfig.for_model("qwen2", **SHAPES[size], eos_token_id=0, pad_token_id=0, max_position_embeddings=8192)
    words = tokenizer(SHAPES[size]["vocab_size"])
    torch.manual_seed(0)
    with torch.device("cuda" if cuda else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if cuda else torch.float32)
    if kind == "trl":  # its engine loads a folder
        path = Path(folder) / size
        if not path.exists():
            model.save_pretrained(path)
            words.save_pretrained(path)
        model.config._name_or_path = model.name_or_path = str(path)
    length = 64 if size == "tiny" else CONTEXT
    options: dict[str, Any] = {"enforce_eager": True}
    arguments: dict[str, Any] = {
        "output_dir": folder,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": SEQUENCES,
        "num_generations": SEQUENCES,
        "max_completion_length": length - 16,
        "generation_kwargs": {"ignore_eos": True},
        "max_steps": max(1, steps),
        "logging_steps": 1,
        "learning_rate": 1e-4,
        "bf16": cuda,
        "use_cpu": not cuda,
        "gradient_checkpointing": True,
        "use_liger_kernel": False,
        "report_to": [],
        "save_strategy": "no",
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_enable_sleep_mode": True,
        "vllm_max_model_length": length,
    }
    extra: dict[str, Any] = {}
    if kind == "hybrid":
        from trlx_hybrid import GRPOTrainer as Hybrid
        from trlx_hybrid import HybridConfig

        if share is not None and cuda:  # bytes of the peak: the policy is parked, so the engine may have all of it
            total = torch.cuda.get_device_properties(0).total_memory
            options["gpu_memory_utilization"] = share / total
        extra["hybrid"] = HybridConfig(engine="vllm", engine_options=options)
    elif share is not None:
        arguments["vllm_gpu_memory_utilization"] = share
    trainer_class = Hybrid if kind == "hybrid" else GRPOTrainer
    return trainer_class(
        model=model,
        reward_funcs=lambda completions, **_: [float(len(c) % 7) for c in completions],
        args=GRPOConfig(**arguments),
        train_dataset=Dataset.from_dict({"prompt": ["1 2 3 4"] * 64}),
        processing_class=words,
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
        **extra,
    )


def engine_of(trainer: Any) -> Any:
    """vLLM's LLM, whoever built it."""
    return trainer.session.live_engine.llm if hasattr(trainer, "session") else trainer.vllm_generation.llm


def main(kind: str, size: str, share: float | None, steps: int, folder: str) -> dict[str, Any]:
    """Build, then roll out once or train; what was held."""
    started = time.perf_counter()
    trainer = build(kind, size, share, steps, folder)
    with Peak() as peak:
        if steps:
            trainer.train()
        elif kind == "hybrid":
            with trainer.session.rollout_phase(True):
                trainer.session.generate([[5, 6, 7]] * SEQUENCES, num_generations=SEQUENCES)
        else:
            trainer.vllm_generation.max_completion_length = 16
            trainer.vllm_generation.sync_weights()
            trainer.vllm_generation.generate([[5, 6, 7]] * SEQUENCES, None, SEQUENCES)
    cache = engine_of(trainer).llm_engine.vllm_config.cache_config
    steps_seconds = [log["step_time"] for log in trainer.state.log_history if "step_time" in log]
    return {
        "kind": kind,
        "size": size,
        "share": share,
        "kv_tokens": cache.num_gpu_blocks * cache.block_size,
        "peak_bytes": peak.bytes,
        "seconds": round(time.perf_counter() - started, 1),
        "step_seconds": steps_seconds,
        "parameters": sum(p.numel() for p in trainer.model.parameters()),
    }


if __name__ == "__main__":
    name, shape, given, count, where = sys.argv[1:]
    answer = main(name, shape, None if given == "None" else float(given), int(count), where)
    print(json.dumps(answer), flush=True)
    os._exit(0)  # two engines' worth of destructors are not what was asked about
