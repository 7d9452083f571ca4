"""Functions that set up a contestant's process, model and engine."""

from __future__ import annotations

import multiprocessing
import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from .scale import Scale, Variant

GPU_SHARE = 0.3  # of each engine: TRL's default


def prepare_process(folder: str) -> None:
    """Set the environment variables of a contestant's process; call it before vLLM is imported.

    Two processes that compile the same model at once must not share a cache folder; a later process of the same name
    finds what was compiled.
    """
    import torch
    from trlx_hybrid.testing.processes import free_port

    os.environ["VLLM_CACHE_ROOT"] = str(Path(folder) / f"vllm-cache-{multiprocessing.current_process().name}")
    os.environ["MASTER_PORT"] = str(free_port())  # TRL would use 29500, as other jobs on this machine may
    if not torch.cuda.is_available():
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # it compiles for 14 s at the first call, without use


def load(folder: str, variant: Variant) -> tuple[Any, Any]:
    """Load the trainer's model, as a script does, and its tokenizer. Every process initializes adapters alike."""
    import torch
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=variant.model_dtype).to(device)
    if variant.lora_rank:
        from peft import get_peft_model

        torch.manual_seed(0)
        model = get_peft_model(model, adapter(variant))
    # AutoTokenizer would take Qwen2's own class, which encodes any text as nothing with this vocabulary.
    return model, PreTrainedTokenizerFast.from_pretrained(folder)


def adapter(variant: Variant) -> Any:
    """Return PEFT's configuration, as in TRL's examples."""
    from peft import LoraConfig

    return LoraConfig(r=variant.lora_rank, target_modules="all-linear", task_type="CAUSAL_LM")


def stock_engine(scale: Scale, variant: Variant) -> AbstractContextManager[Any]:
    """Return a context in which TRL builds its engine with arguments that VLLMGeneration has no way to pass on.

    The cache size is given to both arms. On a CPU stock TRL further needs fp32, unless another dtype is given, weights
    that are not prepacked and a worker that can sleep; our engine chooses these by itself there.
    """
    import torch
    import vllm
    from trl.generation import vllm_generation

    arguments: dict[str, Any] = {"kv_cache_memory_bytes": scale.kv_cache_bytes, "enforce_eager": variant.eager}
    if not torch.cuda.is_available():
        arguments |= {
            "dtype": "float32",
            "enforce_eager": True,
            "enable_sleep_mode": False,
            "block_size": 32,
            "worker_cls": "trlx_hybrid_vllm.private.cpu.PlainWeightsCPUWorker",
        }
    if variant.engine_dtype is not None:
        arguments["dtype"] = variant.engine_dtype
    arguments |= variant.engine_args
    return patch.object(vllm_generation, "LLM", lambda **given: vllm.LLM(**(given | arguments)))


def engine_options(scale: Scale, variant: Variant) -> dict[str, Any]:
    """Return `HybridConfig.engine_options` with the settings that `stock_engine` gives to TRL's engine."""
    options: dict[str, Any] = {"kv_cache_memory_bytes": scale.kv_cache_bytes, "max_num_seqs": scale.max_num_seqs}
    if variant.engine_dtype is not None:
        options["dtype"] = variant.engine_dtype
    return options | {"enforce_eager": variant.eager, "engine_args": dict(variant.engine_args)}
