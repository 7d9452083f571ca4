"""Access to the inside of an in-process vLLM engine: its model, caches and request queue, and hooks on its methods."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from trlx_hybrid.errors import EngineError

from . import Patch

if TYPE_CHECKING:
    from vllm import LLM
    from vllm.config import VllmConfig
    from vllm.lora.request import LoRARequest
    from vllm.model_executor.layers.attention.mla_attention import MLAAttention
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner
    from vllm.v1.worker.worker_base import WorkerBase


PATCHES = (
    Patch(
        of=("vllm.v1.engine.input_processor.InputProcessor.process_inputs",),
        when="as long as the engine lives",
        why="Custom rollouts queue requests in `LLM` themselves. These would sample from the base rather than from the "
        "adapter, or while the engine sleeps.",
        until="`LLM` takes a default `LoRARequest` and refuses requests while it sleeps",
    ),
    Patch(
        of=("vllm.multimodal.processing.processor.BaseMultiModalProcessor._apply_prompt_updates",),
        when="as long as the engine lives",
        why="vLLM expands the image tokens of a prompt that the trainer's processor has expanded already.",
        until="vLLM takes token ids whose image tokens are expanded",
    ),
    Patch(
        of=("vllm.v1.engine.output_processor.OutputProcessor.process_outputs",),
        when="as long as a remote engine lives",
        why="vLLM turns the array of ids that a token was sampled from into a list, for each token: with top-k off, "
        "that is the whole vocabulary.",
        until="vLLM hands the sampling mask over as an array",
    ),
)


def config_of(llm: LLM) -> VllmConfig:
    """Return the configuration of an in-process engine."""
    return llm.llm_engine.vllm_config


def max_model_len(llm: LLM) -> int:
    """Return the longest prompt plus completion that an engine takes, in tokens."""
    return int(llm.llm_engine.model_config.max_model_len)


def model_of(llm: LLM) -> nn.Module:
    """Return the model inside an in-process engine."""
    return model_in(llm.llm_engine.model_executor.driver_worker)


def model_in(worker: WorkerBase) -> nn.Module:
    """Return the model that one of vLLM's workers holds."""
    model: nn.Module = worker.model_runner.model
    return model


def runner_of(llm: LLM) -> GPUModelRunner:
    """Return vLLM's model runner of an in-process engine, which holds the model and the KV caches."""
    return llm.llm_engine.model_executor.driver_worker.model_runner


def kv_caches(llm: LLM) -> list[torch.Tensor]:
    """Return the KV cache's tensors; several may share a storage."""
    return flat(runner_of(llm).kv_caches)


def flat(caches: Iterable[Any]) -> list[torch.Tensor]:
    """Return all tensors of a model runner's caches: a layer has one tensor, or a list of states (linear attention)."""
    return [tensor for cache in caches for tensor in (cache if isinstance(cache, list | tuple) else [cache])]


def prefixes(llm: LLM) -> int:
    """Return how many KV blocks vLLM's prefix cache holds."""
    pool = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    return len(pool.cached_block_hash_to_block)


def derive_from_weights(layers: Iterable[MLAAttention], dtype: torch.dtype) -> None:
    """Let latent-attention layers compute their derived matrices again, after their weights have changed.

    The matrices are written in place, because CUDA graphs read them at their addresses.

    Args:
        layers: vLLM's layers of multi-head latent attention.
        dtype: the dtype that the engine computes in.
    """
    for layer in layers:
        layer.process_weights_after_loading(dtype)


def forget_images(llm: LLM) -> None:
    """Drop the embeddings of images that an engine keeps; does nothing for text models."""
    if llm.llm_engine.model_config.is_multimodal_model:
        llm.llm_engine.reset_encoder_cache()


def drain(llm: LLM, steps: int = 16) -> None:
    """Run the engine core until no step is in flight.

    One or two steps are still in flight when the last request has finished.

    Args:
        steps: how many steps to run at most.

    Raises:
        EngineError: requests are still running, so their KV cache can neither be freed nor dropped.
    """
    client = llm.llm_engine.engine_core
    core = client.engine_core
    for _ in range(steps):
        if not core.scheduler.has_requests() and not core.batch_queue:
            return
        client.get_output()
    running, waiting = core.scheduler.get_request_counts()
    raise EngineError(
        f"{running + waiting} requests are still in vLLM's queue at the end of the rollout, so its KV cache cannot be "
        "given back or forgotten. A custom rollout must finish or abort what it adds (`llm.llm_engine.abort_request`)."
    )


def serve_directly(llm: LLM, own: Callable[[], Callable[[], LoRARequest | None] | None]) -> None:
    """Make vLLM's `LLM` call a method of this plugin's engine before it queues a request.

    The method may refuse the request, and chooses the adapter of a request that names none. Thus the requests that
    custom rollouts add to the `LLM` are also sampled from the current policy.

    Args:
        llm: vLLM's LLM.
        own: a weak reference to the method. It raises to refuse the request, or returns a `LoRARequest`, or None to
            sample without an adapter.
    """
    processor = llm.llm_engine.input_processor
    plain = processor.process_inputs

    @functools.wraps(plain)
    def process_inputs(*args: Any, lora_request: LoRARequest | None = None, **kwargs: Any) -> EngineCoreRequest:
        asked = own()
        default = None if asked is None else asked()
        return plain(*args, lora_request=lora_request or default, **kwargs)

    processor.process_inputs = process_inputs


def keep_expanded_prompts(llm: LLM | AsyncLLM) -> None:
    """Make vLLM leave prompts unchanged in which the image tokens are expanded already, as in the trainer's prompts.

    An expanded prompt has one image token for each embedding of an image. vLLM would expand the first image token once
    more, and sample from another prompt than the one that is scored. Prompts with one image token per image are still
    expanded. Does nothing for text models.
    """
    processor = llm.renderer.mm_processor
    if processor is None:
        return
    expand = processor._apply_prompt_updates

    def keep_or_expand(token_ids: list[int], updates: Any) -> Any:
        found = processor._find_mm_placeholders(token_ids, updates)
        if all(len(found.get(modality, ())) == len(items) for modality, items in updates.items()):
            return token_ids, found
        return expand(token_ids, updates)

    processor._apply_prompt_updates = keep_or_expand


def outside(request_id: str) -> str:
    """Return the id under which the caller added a request, given vLLM's internal id of the request.

    vLLM appends "-" and random characters to the caller's id.
    """
    return request_id.rpartition("-")[0] or request_id


def hand_over_masks(llm: AsyncLLM, returned: Callable[[str, int, Any], None]) -> None:
    """Pass the ids that each token was sampled from to a function as they come, and take them out of vLLM's outputs.

    vLLM would turn each token's array of ids into a list.

    Args:
        llm: an `AsyncLLM`.
        returned: called for each token with vLLM's internal id of the request, 0, and the ids: (n,) int32, ascending.
            The 0 is in place of the number of prompt tokens, which is not known here.
    """
    processor = llm.output_processor
    process = processor.process_outputs

    def without_masks(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        for output in outputs:
            if output.new_sampling_mask is not None:
                if output.request_id in processor.request_states:  # else it was aborted
                    returned(output.request_id, 0, output.new_sampling_mask.token_ids)
                output.new_sampling_mask = None
        return process(outputs, *args, **kwargs)

    processor.process_outputs = without_masks
