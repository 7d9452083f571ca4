"""TRL's own colocate engine, made exact on a CPU, for comparisons with stock TRL."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def plain_colocate() -> Iterator[dict[str, Any]]:
    """Let TRL's own colocated vLLM work exactly on a CPU, by changing the arguments with which TRL builds the engine.

    vLLM's CPU build repacks linear weights, after which TRL's in-place loading fails; here it does not. Whatever the
    engine draws from the trainer's random generators is undone, as in trlx_hybrid: these generators decide how TRL
    shuffles a batch into optimizer steps.

    Yields:
        A dict for further arguments of `vllm.LLM`, which a test may fill before the trainer is built.
    """
    import torch
    import vllm
    from trl.generation import vllm_generation
    from trlx_hybrid.rollout.seeding import preserved_generators

    changes: dict[str, Any] = {}

    def plain_llm(**arguments: Any) -> Any:
        arguments |= {
            "enforce_eager": True,
            "dtype": "float32",  # "auto" turns a float32 checkpoint into bfloat16
            "kv_cache_memory_bytes": 64 << 20,
            "block_size": 32,
            "worker_cls": "trlx_hybrid_vllm.private.cpu.PlainWeightsCPUWorker",
        } | changes
        with preserved_generators():
            llm = vllm.LLM(**arguments)
        generate = llm.generate

        def neutral(*args: Any, **kwargs: Any) -> Any:
            with preserved_generators():
                return generate(*args, **kwargs)

        llm.generate = neutral
        return llm

    original = vllm_generation.LLM
    vllm_generation.LLM = plain_llm
    torch.compiler.set_stance("force_eager")
    try:
        yield changes
    finally:
        torch.compiler.set_stance("default")
        vllm_generation.LLM = original
