"""The parts of vLLM 0.31 outside its documented interface that this plugin uses, collected in one place.

Other files hold what they need of it for ending an engine (`engine.py`), for vLLM's scheduler, its LoRA slots and
adapted layers, its layers for CPUs, their routers and its weight transfer.

The plugin's tests run all of it, on the pinned version.
"""

from __future__ import annotations

import copy
import functools
import gc
import importlib
import io
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, redirect_stdout, suppress
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from trlx_hybrid.errors import EngineError
from trlx_hybrid.interprocess.environment_variables import restored

logger = logging.getLogger(__name__)


def model_of(llm: Any) -> torch.nn.Module:
    """Return the model inside an in-process engine."""
    return runner_of(llm).model  # type: ignore[no-any-return]


def runner_of(llm: Any) -> Any:
    """Return vLLM's model runner of an in-process engine, which holds the model and the KV caches."""
    return llm.llm_engine.model_executor.driver_worker.model_runner


def kv_caches(llm: Any) -> list[torch.Tensor]:
    """Return the KV cache's tensors; several may share a storage."""
    return flat(runner_of(llm).kv_caches)


def flat(caches: Iterable[Any]) -> list[torch.Tensor]:
    """Return all tensors of a model runner's caches: a layer has one tensor, or a list of states (linear attention)."""
    return [tensor for cache in caches for tensor in (cache if isinstance(cache, list | tuple) else [cache])]


def attention_of(config: Any) -> list[tuple[int, int]]:
    """Return for each layer its number of KV heads, and how many elements each head caches per token.

    It is read from the model's config. Where vLLM caches compressed keys and values (multi-head latent attention), it
    is one head and the latent's size.
    """
    model = _described(config)
    layers = [model[layer] for layer in range(model.total_num_hidden_layers)]
    if model.is_deepseek_mla:
        return [(1, layer.head_size) for layer in layers]
    return [(layer.total_num_kv_heads, 2 * layer.head_size) for layer in layers]


def is_latent(config: Any) -> bool:
    """Return whether vLLM caches latents for a model of this config (multi-head latent attention, as in DeepSeek)."""
    return bool(_described(config).is_deepseek_mla)


def _described(config: Any) -> Any:
    import vllm.config  # noqa: F401 - first: the next import is part of a circle
    from vllm.transformers_utils.model_arch_config_convertor import (
        MODEL_ARCH_CONFIG_CONVERTORS,
        ModelArchConfigConvertorBase,
    )

    config = unquantised(config)
    convertor = MODEL_ARCH_CONFIG_CONVERTORS.get(config.model_type, ModelArchConfigConvertorBase)
    return convertor(config, config.get_text_config()).convert()


def unquantised(config: Any) -> Any:
    """Return a copy of a model's config without `quantization_config`, which describes the trainer's base only.

    Whether the engine quantises is one of its own options.
    """
    config = copy.deepcopy(config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    return config


def latent_attention(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Return vLLM's layers of multi-head latent attention, with their names.

    After each load of weights, such a layer computes two matrices from `kv_b_proj` and keeps them as parameters.
    """
    from vllm.model_executor.layers.attention.mla_attention import MLAAttention

    return ((name, module) for name, module in model.named_modules() if isinstance(module, MLAAttention))


def prefixes(llm: Any) -> int:
    """Return how many KV blocks vLLM's prefix cache holds."""
    pool = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    return len(pool.cached_block_hash_to_block)


def adapter_slots_of(module: torch.nn.Module) -> list[torch.Tensor]:
    """Return the LoRA slots of one layer, the tensors in which vLLM keeps an adapter's A and B; [] without any.

    They are neither parameters nor buffers.
    """
    stacked = [*getattr(module, "lora_a_stacked", ()), *getattr(module, "lora_b_stacked", ())]
    return [tensor for tensor in stacked if isinstance(tensor, torch.Tensor)]


def processed(llm: Any, prompt_ids: list[int], params: Any, adapter: Any) -> Any:
    """Return vLLM's `EngineCoreRequest` of a prompt, checked and completed by vLLM, but not queued; see `add_like`.

    Args:
        params: vLLM's `SamplingParams`.
        adapter: a `LoRARequest`, or None.
    """
    from vllm.inputs.engine import tokens_input

    engine = llm.llm_engine
    return engine.input_processor.process_inputs(
        "pattern",
        tokens_input(prompt_ids),
        params,
        supported_tasks=engine.get_supported_tasks(),
        lora_request=adapter,
    )


def add_like(llm: Any, pattern: Any, prompt_ids: list[int], params: Any, now: float) -> str:
    """Queue a prompt as `LLM.enqueue` does, but as a copy of a request that vLLM has already checked and completed.

    Args:
        pattern: a request from `processed`. Prompt, sampling parameters, arrival time and ids are replaced.
        params: vLLM's `SamplingParams`, complete.
        now: the arrival time, from `time.time()`.

    Returns:
        vLLM's request id.
    """
    import msgspec
    from vllm.inputs.engine import tokens_input

    engine = llm.llm_engine
    engine.input_processor._validate_model_inputs(None, tokens_input(prompt_ids))
    request_id = f"trlx-{next(llm.request_counter)}"
    request = msgspec.structs.replace(
        pattern,
        request_id=request_id,
        external_req_id=request_id,
        prompt_token_ids=prompt_ids,
        sampling_params=params,
        arrival_time=now,
    )
    engine.output_processor.add_request(request, None, None, 0)
    engine.engine_core.add_request(request)
    return request_id


def outside(request_id: str) -> str:
    """Return the id that the caller gave a request, from vLLM's internal id, which adds "-" and random characters."""
    return request_id.rpartition("-")[0] or request_id


def hand_over_masks(llm: Any, returned: Callable[[str, int, Any], None]) -> None:
    """Pass on the ids that each token was sampled from as they come, before vLLM turns the arrays into lists.

    Args:
        llm: an `AsyncLLM`.
        returned: called for each token with vLLM's id of the request, 0, and the ids: (n,) int32, ascending. 0 stands
            for the number of prompt tokens, which is not known here.
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


def keep_expanded_prompts(llm: Any) -> None:
    """Make vLLM leave prompts unchanged that have an image token for each embedding of an image, as the trainer's do.

    vLLM would expand the first image token once more, and sample from another prompt than the one that is scored.
    Prompts with one image token per image are still expanded. For an `LLM` or `AsyncLLM`; does nothing for text models.
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


def drain(llm: Any, steps: int = 16) -> None:
    """Run the engine core until no step is in flight: one or two are, after the last request has finished.

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


def adapter_manager(llm: Any) -> Any:
    """Return vLLM's `LoRAModelManager`, which holds the LoRA slots of an in-process engine built with `enable_lora`.

    The CPU's and the GPU's model runner share the mixin that makes it.
    """
    return llm.llm_engine.model_executor.driver_worker.model_runner.lora_manager._adapter_manager


@contextmanager
def unwrapped(model: torch.nn.Module) -> Iterator[None]:
    """Put the model's own layers in place of vLLM's LoRA wrappers for the time of a load, which needs their names.

    Changes nothing without `enable_lora`. A wrapper can sit at several places (tied heads, routers); all are put back.
    """
    from vllm.lora.layers import BaseLayerWithLoRA

    places = [
        (parent, key, child)
        for parent in list(model.modules())
        for key, child in parent._modules.items()
        if isinstance(child, BaseLayerWithLoRA)
    ]
    try:
        for parent, key, child in places:
            layer = child
            while isinstance(layer, BaseLayerWithLoRA):
                layer = layer.base_layer
            parent._modules[key] = layer
        yield
    finally:
        for parent, key, child in places:
            parent._modules[key] = child


def bypassed(model: torch.nn.Module) -> set[int]:
    """Return the `id()` of each layer that the model also calls without the LoRA wrapper that vLLM put around it.

    The model holds such a layer at two places, and only one was wrapped, so an adapter there might have no effect.
    """
    from vllm.lora.layers import BaseLayerWithLoRA

    wrapped = {id(module.base_layer) for module in model.modules() if isinstance(module, BaseLayerWithLoRA)}
    plain = (module for module in model.modules() if not isinstance(module, BaseLayerWithLoRA))
    return wrapped & {id(child) for module in plain for child in module._modules.values()}


def unimportable(architecture: str) -> str | None:
    """Return why vLLM's own class for an architecture of transformers cannot be imported, or None."""
    from vllm import ModelRegistry

    try:
        ModelRegistry.models[architecture].inspect_model_cls()
        ModelRegistry.models[architecture].load_model_cls()  # vLLM may have kept on disk what it inspected long ago
    except Exception as error:  # whatever an import raises, there or in the process that vLLM starts for it
        return f"vLLM's {architecture} cannot be imported here: {(str(error).strip() or repr(error)).splitlines()[-1]}"
    return None


def only_attends(architecture: str) -> bool:
    """Return whether vLLM's own class for an architecture is a text model whose layers keep only keys and values.

    False where vLLM has no class of its own.
    """
    from vllm import ModelRegistry

    known = ModelRegistry.models.get(architecture)
    if known is None:
        return False
    model = known.inspect_model_cls()
    return not (model.has_inner_state or model.is_attention_free or model.supports_multimodal)


def without_adapters(architecture: str) -> str | None:
    """Return why vLLM's own class for an architecture of transformers has no LoRA slots, or None."""
    from vllm import ModelRegistry
    from vllm.model_executor.models import supports_lora

    known = ModelRegistry.models.get(architecture)
    try:
        served = known is None or supports_lora(known.load_model_cls())
    except ImportError:  # the engine itself reports it
        return None
    return None if served else f"vLLM's {architecture} has no LoRA slots"


MODULES_WITH_TENSORS = ("compressed_tensors.compressors.nvfp4.helpers", "flashinfer.quantization.fp4_quantization")
"""Modules that allocate tensors when they are imported, as seen in a history of torch's allocations on H200s."""


def import_modules_with_tensors() -> None:
    """Import the modules that allocate tensors when they are imported, before vLLM does so while it builds a model.

    Their tensors would otherwise lie in the memory that sleeps. There their contents are lost, and the memory could
    never be freed for another engine.
    """
    if torch.cuda.is_available():
        for name in MODULES_WITH_TENSORS:
            with suppress(ImportError):
                importlib.import_module(name)


@dataclass(frozen=True, slots=True)
class Replica:
    """The ranks that run one engine together.

    Attributes:
        cpu_group: their process group, over gloo.
        world_size: how many ranks there are.
        rank_in_group: this process's rank in the group.
        owned: True where this class made the group, and vLLM does not know it.
    """

    cpu_group: Any
    world_size: int
    rank_in_group: int
    owned: bool = False

    @classmethod
    def of_this_rank(cls, size: int) -> Replica:
        """Return the replica (the `size` ranks of one engine) of this rank, right after its engine was built.

        Collective over all ranks.

        vLLM has a group of the ranks that share layers (tensor parallelism), and one of the ranks with successive
        layers (pipeline stages), but none of all ranks of an engine that has both.
        """
        from vllm.distributed.parallel_state import get_pp_group, get_tp_group

        if get_pp_group().world_size == 1:
            group = get_tp_group()
            return cls(group.cpu_group, group.world_size, group.rank_in_group)
        own, _ = dist.new_subgroups(size, backend="gloo")  # type: ignore[no-untyped-call]
        return cls(own, size, dist.get_rank() % size, owned=True)

    def close(self) -> None:
        """Destroy the group, unless the script has destroyed all of them."""
        if self.owned and dist.is_initialized():
            dist.destroy_process_group(self.cpu_group)


def serve_directly(llm: Any, own: Callable[[], Callable[[], Any] | None]) -> None:
    """Make vLLM's `LLM` call a method before it queues a request, also for requests that custom rollouts add.

    Args:
        llm: vLLM's LLM.
        own: a weak reference to a method that refuses the request by raising, or returns the `LoRARequest` of requests
            that name none.
    """
    processor = llm.llm_engine.input_processor
    plain = processor.process_inputs

    @functools.wraps(plain)
    def process_inputs(*args: Any, lora_request: Any = None, **kwargs: Any) -> Any:
        asked = own()
        default = None if asked is None else asked()
        return plain(*args, lora_request=lora_request or default, **kwargs)

    processor.process_inputs = process_inputs


def may_replace(subject: str, apart: Callable[[], float], bound: float) -> bool:
    """Run a kernel of ours once, and return whether it may replace vLLM's on this machine; log if it may not.

    Args:
        subject: what the kernel computes, with its verb ("log-probs are"), for the log message.
        apart: runs the kernel, and returns by how much its result differs from vLLM's.
        bound: the largest difference that is allowed.
    """
    try:
        found = apart()
    except Exception as error:  # whatever a compiler on another machine says
        logger.warning("%s computed by vLLM's own kernels; ours does not run here: %r", subject, error)
        return False
    if not found <= bound:
        logger.warning("%s computed by vLLM's own kernels; ours differs by %g here.", subject, found)
    return found <= bound


PYTHONS_OWN = 1_000
"""The largest number of objects that Python itself may have frozen: 3.12 starts with 375.

A heap with torch in it has some hundred thousand objects.
"""


@contextmanager
def frozen_heap(kept: bool) -> Iterator[None]:
    """Keep a heap frozen that was frozen before (`gc.freeze`), while vLLM starts or ends.

    vLLM freezes the whole heap when it starts. It unfreezes all of it after a capture of graphs and at its end, since
    otherwise nothing of the engine could be collected. Python does not tell what vLLM froze from what was frozen
    before. So where something was frozen before, vLLM does neither.

    Args:
        kept: whether something was frozen before the engine was built. False, too, if the user's code has called
            `gc.freeze` since then, which froze the engine: it could not be collected.
    """
    if not kept:
        yield
        return
    with patch.object(gc, "freeze", lambda: None), patch.object(gc, "unfreeze", lambda: None):
        yield


@contextmanager
def cache_kept(wanted: int = 0) -> Iterator[None]:
    """Keep the cache of torch's allocator during vLLM's sleep and wake-up, which would return all of it to the driver.

    The trainer's next loss then need not ask the driver for the memory again, in some five hundred calls. Inside, no
    thread of the process can empty the cache. Nothing is kept if the device has fewer than `wanted` bytes free.

    Args:
        wanted: bytes that must be free on the device.
    """
    if not torch.cuda.is_available() or torch.cuda.mem_get_info()[0] < wanted:
        yield
        return
    with ExitStack() as stack:
        for module in (torch.accelerator, torch.cuda):
            stack.enter_context(patch.object(module, "empty_cache", lambda: None))
        yield


@contextmanager
def compiled_once(folder: str, joined: bool) -> Iterator[None]:
    """Let vLLM reuse what an earlier start compiled, although the model's folder has another, random name each time.

    vLLM keeps compiled models under a hash of its config, which includes the model's path. Without this, every start
    would compile anew, choose its kernels by timing anew, which may round otherwise, and leave one more folder in
    vLLM's cache. The config of the model, which the path stands for, is in the hash separately.

    Args:
        folder: the model's path.
        joined: whether vLLM's layers compute base and adapter in one product (`adapted_linear.py`), which compiles to
            other code, and so needs another hash.
    """
    from vllm.config import ModelConfig

    plain = ModelConfig.compute_hash

    @functools.wraps(plain)
    def compute_hash(config: Any) -> Any:
        path = config.model
        config.model = f"trlx-hybrid{', adapters under weights' * joined}" if path == folder else path
        try:
            return plain(config)
        finally:
            config.model = path

    with patch.object(ModelConfig, "compute_hash", compute_hash):
        yield


FLOAT32_PRODUCTS = "TRITON_F32_DEFAULT"
"""The environment variable for the precision of Triton's float32 products, read when a kernel is compiled.

By default they are TF32, and attention, and so each log-prob, is off by 1e-3. PyTorch's products, and so the trainer's,
are exact by default.
"""
EXACT = "ieee"


@contextmanager
def stdout_with_descriptor() -> Iterator[None]:
    """Give `sys.stdout` a file descriptor, which vLLM duplicates as it starts. In some notebooks it has none."""
    try:
        sys.stdout.fileno()
    except (AttributeError, io.UnsupportedOperation):
        with redirect_stdout(sys.__stdout__):
            yield
    else:
        yield


@contextmanager
def running(dtype: torch.dtype, collecting: bool = False) -> Iterator[None]:
    """Prepare the process for calls of an engine that computes in this dtype; all of its calls are made inside.

    A rollout allocates a few objects per token, so the garbage collector pauses, except for calls that run long and run
    the user's code (`collecting`). vLLM has frozen the objects that existed when it was built, so no collection visits
    them. On a CPU, torch.compile is switched off: it costs 14 s at the first call.
    """
    from vllm.platforms import current_platform

    stance: Any = torch.compiler.set_stance("force_eager") if current_platform.is_cpu() else nullcontext()
    paused = gc.isenabled() and not collecting
    with stance, restored(FLOAT32_PRODUCTS):
        if dtype == torch.float32:
            os.environ.setdefault(FLOAT32_PRODUCTS, EXACT)
        if paused:
            gc.disable()
        try:
            yield
        finally:
            if paused:
                gc.enable()


@contextmanager
def trainer_classes_kept(trained: nn.Module) -> Iterator[list[nn.Module]]:
    """Undo afterwards the changes that vLLM, building a model inside, makes to classes of the trained model.

    Yields:
        A list for the models built inside. Their modules get subclasses of their own, with the changes to the class.
    """
    classes = {c for module in trained.modules() for c in type(module).__mro__ if c is not object}
    before = {c: (c.__bases__, dict(vars(c))) for c in classes}
    built: list[nn.Module] = []
    try:
        yield built
    finally:
        for cls, (bases, attributes) in before.items():
            if cls.__bases__ != bases:
                own = _moved_into_subclass(cls, bases, attributes)
                for module in (m for model in built for m in model.modules() if type(m) is cls):
                    module.__class__ = own


def _moved_into_subclass(cls: type, bases: tuple[type, ...], attributes: dict[str, Any]) -> type:
    """Restore a class as it was before, and return a subclass of the same name with what was added to it.

    Args:
        bases: the base classes that it had before.
        attributes: the `vars()` that it had before.
    """
    added = tuple(base for base in cls.__bases__ if base not in bases)
    changed = {key: value for key, value in vars(cls).items() if attributes.get(key) is not value}
    cls.__bases__ = bases
    for key in changed:
        if key in attributes:
            setattr(cls, key, attributes[key])
        else:
            delattr(cls, key)
    return type(cls)(cls.__name__, (cls, *added), {**changed, "__module__": cls.__module__})
