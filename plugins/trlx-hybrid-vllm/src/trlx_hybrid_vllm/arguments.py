"""What vLLM's engine is built with: from our options, the live model, and the memory there is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from trlx_hybrid.memory.ledger import policy_tensors, storages

from . import kv_cache

if TYPE_CHECKING:
    from trlx_hybrid.session import Session

    from .options import VLLMOptions

CPU_KV_CACHE_LIMIT = 4 << 30
STATIC_SHARE = 0.3  # of the GPU, for an engine that does not sleep: TRL's default
UNCHECKED = 0.01  # where the cache's size is given, vLLM still wants this share to be free, and uses it for nothing
MARGIN = 0.03  # of the GPU, left for what torch's allocator cannot use
WORKSPACE = 6 << 30  # bytes: activations of the profiling run, CUDA graphs and sampling, seen below 4 GiB for 7B


def engine_arguments(session: Session, options: VLLMOptions, dtype: torch.dtype) -> dict[str, Any]:
    """Keyword arguments of `vllm.LLM`, the model's folder left out. The user's `engine_args` win.

    Raises:
        MemoryPlanError: what was asked for cannot fit, said before anything is built.
    """
    from vllm.platforms import current_platform

    cpu: bool = current_platform.is_cpu()
    arguments = shared_arguments(session, options, dtype, cpu) | {
        "distributed_executor_backend": "external_launcher",
        "enable_sleep_mode": options.enable_sleep_mode and not cpu,
    }
    arguments |= _memory(session, options, dtype, cpu) | dict(options.engine_args)
    if not cpu and _schedules_ahead(arguments):
        arguments.setdefault("scheduler_cls", "trlx_hybrid_vllm.scheduling.DecodeScheduler")
    return arguments


def shared_arguments(session: Session, options: VLLMOptions, dtype: torch.dtype, cpu: bool) -> dict[str, Any]:
    """Those that do not depend on whose process the engine lives in, nor on the memory there."""
    from .dummy_loader import LOAD_FORMAT

    arguments: dict[str, Any] = {
        "load_format": LOAD_FORMAT,
        "dtype": str(dtype).removeprefix("torch."),
        "tensor_parallel_size": options.tensor_parallel_size,
        "max_model_len": options.max_model_len,
        "max_num_seqs": options.max_num_seqs,
        "max_num_batched_tokens": _batched_tokens(session, options, whole_prompts=cpu),
        "enforce_eager": bool(options.enforce_eager) or cpu,
        "model_impl": options.model_impl,
        "trust_remote_code": options.trust_remote_code,
        "quantization": options.quantization,
        "logprobs_mode": "processed_logprobs",  # importance sampling needs what was sampled from
        "seed": 0,  # every request brings its own
    }
    if options.speculative_config is not None:
        arguments["speculative_config"] = dict(options.speculative_config)
    if cpu:
        arguments["worker_cls"] = "trlx_hybrid_vllm.cpu_worker.PlainWeightsCPUWorker"
        arguments["block_size"] = kv_cache.BLOCK
        arguments["enable_chunked_prefill"] = False  # vLLM's CPU sampler fails on a seeded prompt read in parts
    return arguments


def _schedules_ahead(arguments: dict[str, Any]) -> bool:
    """Whether vLLM will schedule asynchronously with its usual scheduler: its own rule, as far as we can go."""
    return (
        arguments.get("async_scheduling") is not False
        and arguments.get("speculative_config") is None
        and arguments.get("diffusion_config") is None
        and arguments.get("pipeline_parallel_size", 1) == 1
    )


def context_length(session: Session, options: VLLMOptions) -> int:
    """Longest prompt plus completion, in tokens: as told, or what the model supports."""
    config: Any = session.policy.base.config.get_text_config()
    return int(options.max_model_len or config.max_position_embeddings)


def _batched_tokens(session: Session, options: VLLMOptions, whole_prompts: bool) -> int:
    """As many as asked for, or as one prompt may have where prompts are read whole.

    Never more than can be scheduled: vLLM's GPU profiling run reads beyond its block tables otherwise."""
    length = context_length(session, options)
    sequences = options.max_num_seqs or options.max_num_batched_tokens
    wanted = min(options.max_num_batched_tokens, sequences * length)
    return max(wanted, length) if whole_prompts else wanted


# --- memory -----------------------------------------------------------------------------------------------------------


def _memory(session: Session, options: VLLMOptions, dtype: torch.dtype, cpu: bool) -> dict[str, Any]:
    """The KV cache's size: as told, or a share of the GPU as told, or what the ledger finds free during ROLLOUT.

    The latter up to what `max_num_seqs` sequences of full length can fill: more would be mapped at each rollout and
    never used. Where vLLM is to fill a share of the GPU, the policy waits in host memory while the engine is built, if
    it is going to be the engine's memory afterwards: nothing is ever held twice.
    """
    memory, share = session.memory, options.gpu_memory_utilization
    wanted = kv_cache_bytes(session, options, dtype)
    size = options.kv_cache_memory_bytes
    if size is None and cpu:
        size = min(wanted, CPU_KV_CACHE_LIMIT)
    memory.check_fit(
        kv_cache_bytes=size or kv_cache_bytes(session, options, dtype, least=True),
        shared=_becomes_the_engines(session, options, dtype),
        engine_itemsize=dtype.itemsize,
        ranks_per_replica=options.tensor_parallel_size,
        sleeps=options.enable_sleep_mode,
    )
    if size is not None or cpu:
        return {"kv_cache_memory_bytes": size, "gpu_memory_utilization": UNCHECKED}
    if share is None and not options.enable_sleep_mode:
        share = STATIC_SHARE
    weights = sum(s.nbytes() for s in storages(policy_tensors(session.policy.base)))
    if share is None and wanted + weights + WORKSPACE <= memory.free_bytes_in_rollout():
        return {"kv_cache_memory_bytes": wanted, "gpu_memory_utilization": UNCHECKED}
    if _becomes_the_engines(session, options, dtype):
        memory.park_policy()
    total = torch.cuda.get_device_properties(session.policy.device).total_memory
    return {"gpu_memory_utilization": share or memory.free_bytes_in_rollout() / total - MARGIN}


def kv_cache_bytes(session: Session, options: VLLMOptions, dtype: torch.dtype, least: bool = False) -> int:
    """What `max_num_seqs` sequences (256 if not given) of full length fill on one rank; `least`: what one does."""
    length = context_length(session, options)
    return kv_cache.kv_cache_bytes(
        session.policy.base.config,
        sequences=1 if least else options.max_num_seqs or 256,
        length=length,
        in_flight=2 * _batched_tokens(session, options, whole_prompts=False),  # of two steps, scheduled ahead
        ranks=options.tensor_parallel_size,
        itemsize=dtype.itemsize,
        hybrid=not options.engine_args.get("disable_hybrid_kv_cache_manager"),
        least=least,
    )


def _becomes_the_engines(session: Session, options: VLLMOptions, dtype: torch.dtype) -> bool:
    """Whether the policy's weights will be aliased: one replica per rank, unsharded, in the engine's dtype."""
    chosen = session.selection.weights
    wanted = chosen is None or chosen.component.name in ("alias", "lora")
    plain = all(type(p) is torch.nn.Parameter for p in session.policy.base_parameters().values())
    same = session.policy.dtype == dtype
    return wanted and plain and same and options.tensor_parallel_size == 1 and options.quantization is None
