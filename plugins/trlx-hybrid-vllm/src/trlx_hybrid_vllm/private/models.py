"""Functions that tell how vLLM treats a model, from its config and architecture, or from the layers that vLLM built."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar, get_args

import torch
from torch import Tensor

from . import Patch, replaced

if TYPE_CHECKING:
    from transformers import PretrainedConfig
    from vllm.config import ModelConfig, VllmConfig
    from vllm.config.model_arch import ModelArchitectureConfig
    from vllm.model_executor.layers.attention.mla_attention import MLAAttention
    from vllm.v1.attention.backend import AttentionImpl

T = TypeVar("T")

PATCHES = (
    Patch(
        of=("vllm.model_executor.model_loader.dummy_loader.DummyModelLoader",),
        when="while an engine is built, through the argument `load_format`",
        why="It fills buffers with random numbers, too: those that vLLM computes are in no checkpoint, and stay so.",
        until="it leaves buffers alone",
    ),
    Patch(
        of=("vllm.model_executor.models.registry._run_in_subprocess",),
        when="while a model's class is looked at, and while an engine starts",
        why="A class that is new on a machine is inspected in a process that imports torch and vLLM: ten seconds.",
        until="vLLM inspects a class in the process that has imported it",
    ),
)


@contextmanager
def inspected_here() -> Iterator[None]:
    """A context in which vLLM inspects model classes in this process, rather than in another one.

    vLLM starts the other process so that the inspection, which imports the class, cannot initialise CUDA where vLLM
    forks its workers later. Here nothing is forked: the engine lives in this process, and imports the class as well.
    """
    from vllm.model_executor.models import registry

    def here(look: Callable[[], T]) -> T:
        return look()

    with replaced(registry, "_run_in_subprocess", here):
        yield


def attention_of(config: PretrainedConfig) -> list[tuple[int, int]]:
    """Return for each layer its number of KV heads, and how many elements each head caches per token.

    The numbers come from the model's config, and count keys and values. Where vLLM caches compressed keys and values
    (multi-head latent attention), a layer has one head, with the size of the latent.
    """
    model = _described(config)
    layers = [model[layer] for layer in range(model.total_num_hidden_layers)]
    if model.is_deepseek_mla:
        return [(1, layer.head_size) for layer in layers]
    return [(layer.total_num_kv_heads, 2 * layer.head_size) for layer in layers]


def is_latent(config: PretrainedConfig) -> bool:
    """Return whether vLLM caches latents for a model of this config (multi-head latent attention, as in DeepSeek)."""
    return bool(_described(config).is_deepseek_mla)


def _described(config: PretrainedConfig) -> ModelArchitectureConfig:
    import vllm.config  # noqa: F401 - first: the next import is part of a circle
    from vllm.transformers_utils.model_arch_config_convertor import (
        MODEL_ARCH_CONFIG_CONVERTORS,
        ModelArchConfigConvertorBase,
    )

    config = unquantised(config)
    convertor = MODEL_ARCH_CONFIG_CONVERTORS.get(config.model_type, ModelArchConfigConvertorBase)
    return convertor(config, config.get_text_config()).convert()


def unquantised(config: PretrainedConfig) -> PretrainedConfig:
    """Return a copy of a model's config without `quantization_config`, which describes the trainer's base only.

    Whether the engine quantises is one of its own options.
    """
    config = copy.deepcopy(config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    return config


def unimportable(architecture: str) -> str | None:
    """Return why vLLM's own class for an architecture of transformers cannot be imported, or None."""
    from vllm import ModelRegistry

    try:
        with inspected_here():
            ModelRegistry.models[architecture].inspect_model_cls()
        ModelRegistry.models[architecture].load_model_cls()  # vLLM may have kept on disk what it inspected long ago
    except Exception as error:  # whatever an import raises
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
    with inspected_here():
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


def causal_pictures(config: VllmConfig) -> str | None:
    """Return why vLLM cannot serve this model's prompts with images correctly on this device, or None.

    Some models, such as Gemma 3, let the tokens of an image attend to each other in both directions. vLLM's attention
    cannot do this on some platforms, for instance on CPUs.

    Args:
        config: the engine's `VllmConfig`, in the process that holds the model.
    """
    if not config.model_config.is_mm_prefix_lm:
        return None
    layers = config.compilation_config.static_forward_context.values()
    backends = {layer.attn_backend for layer in layers if hasattr(layer, "attn_backend")}
    causal = sorted(backend.get_name() for backend in backends if not backend.supports_mm_prefix())
    if not causal:
        return None
    return (
        f"In {config.model_config.architecture} the tokens of a picture see each other, and vLLM's attention here "
        f"({', '.join(causal)}) shows each only those before it, so it would sample from another model. Generate with "
        "engine='transformers', or on a device for which vLLM has an attention that serves them."
    )


def adapter_ranks() -> tuple[int, ...]:
    """Return the adapter ranks for which vLLM can allocate LoRA slots, ascending."""
    from vllm.config.lora import MaxLoRARanks

    return tuple(sorted(get_args(MaxLoRARanks)))


# --- the layers of a built model --------------------------------------------------------------------------------------


def latent_attention(model: torch.nn.Module) -> Iterator[tuple[str, MLAAttention]]:
    """Return vLLM's layers of multi-head latent attention, with their names.

    After each load of weights, such a layer computes two matrices from `kv_b_proj` and keeps them as parameters.
    """
    from vllm.model_executor.layers.attention.mla_attention import MLAAttention

    return ((name, module) for name, module in model.named_modules() if isinstance(module, MLAAttention))


KEEPS = {
    "ColumnParallelLinear",
    "MergedColumnParallelLinear",
    "QKVParallelLinear",
    "RowParallelLinear",
    "ReplicatedLinear",
    "GateLinear",
    "VocabParallelEmbedding",
    "ParallelLMHead",
    "RMSNorm",
    "GemmaRMSNorm",
    "RoutedExperts",
    "Conv2dLayer",
    "Conv3dLayer",
}
"""Classes of vLLM 0.31's layers that compute with the very tensors that the weight loader filled, unless quantised.

Torch's own layers, which vision towers have, do so as well.
"""


UNQUANTISED = {"UnquantizedLinearMethod", "UnquantizedEmbeddingMethod", "UnquantizedFusedMoEMethod"}


EXPERTS_KEPT = {"TRITON", "BATCHED_TRITON"}
"""Names of the `UnquantizedMoeBackend` that keep the experts as loaded.

The others swap, permute, transpose or repack the experts, most of them at an unchanged shape.
"""


PADDED = {"VocabParallelEmbedding", "ParallelLMHead"}


def refuses_writes(model: torch.nn.Module) -> str | None:
    """Return why a weight sync must not write into the memory of this vLLM model's weights by itself, or None.

    A weight sync must not do so if a layer repacks its weights after loading, or derives something from them, because
    only vLLM's loader repeats this.
    """
    if hasattr(model, "process_weights_after_loading"):
        return f"{type(model).__name__} derives something from its weights after loading them"
    for name, module in model.named_modules():
        kind, method = type(module).__name__, getattr(module, "quant_method", None)
        weighty = any(p is not None for p in module._parameters.values())
        keeps = type(module).__module__.startswith("vllm.") and kind in KEEPS
        if weighty and not keeps and not type(module).__module__.startswith("torch.nn.modules."):
            return f"{name} is a {kind}, which is not known to keep what was loaded"
        if weighty and method is not None and type(method).__name__ not in UNQUANTISED:
            return f"{name} keeps its weights in the form of {type(method).__name__}"
        if kind == "RoutedExperts" and (reason := _experts(module, method)) is not None:
            return f"{name} {reason}"
        if module is model or kind in UNQUANTISED:  # what such a method does to its layer is judged above
            continue
        if hasattr(module, "process_weights_after_loading") and _derives(module, kind):
            return f"{name} is a {kind}, which derives something from its weights after loading them"
    return None


def _derives(module: Any, kind: str) -> bool:
    """Return whether a layer that has `process_weights_after_loading` derives something from its weights there.

    Args:
        kind: the name of the layer's class.
    """
    from vllm.v1.attention.backend import AttentionImpl

    if kind == "MMEncoderAttention":  # with 8 bits it derives scales
        return bool(module.fp8_enabled)
    impl = getattr(module, "impl", None)
    after = getattr(type(impl), "process_weights_after_loading", None)
    return kind != "Attention" or (after is not AttentionImpl.process_weights_after_loading and _has_sinks(impl))


def _experts(module: Any, method: Any) -> str | None:
    if module.use_ep:
        return "deals whole experts out to the ranks (expert parallelism), which has not been tried"
    backend = method.unquantized_backend
    if backend.name not in EXPERTS_KEPT and method.experts_cls.__name__ != "PlainExperts":
        return (
            f"computes with the MoE backend {backend.value}, which lays the experts out anew; on a GPU, "
            "engine_args={'moe_backend': 'triton'} in engine_options chooses one that does not"
        )
    return None


def _has_sinks(impl: AttentionImpl) -> bool:
    """Return whether an attention backend may derive something from its attention sinks after loading.

    FlashInfer's attention converts its sinks, if it has any, and nothing else. Other backends are unknown, so True.

    Args:
        impl: vLLM's `AttentionImpl` of a layer.
    """
    return type(impl).__name__ != "FlashInferImpl" or getattr(impl, "sinks", None) is not None


def pads_rows(model: torch.nn.Module, parameter: str) -> bool:
    """Return whether an engine parameter belongs to a layer that pads its rows: an embedding or a head."""
    return type(model.get_submodule(parameter.rpartition(".")[0])).__name__ in PADDED


# --- loading ----------------------------------------------------------------------------------------------------------


@functools.cache
def dummy_load_format() -> str:
    """Register a loader of random weights with vLLM, for engines that get their weights later, by a weight sync.

    Returns its name, a value for vLLM's argument `load_format`.

    vLLM's own format ("dummy") fills persistent buffers with random numbers as well. But a buffer that vLLM computes
    when it builds a model, such as Qwen2.5-VL's scale of the pixels, is in no checkpoint, so no sync would ever restore
    it.
    """
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    @register_model_loader("dummy_parameters")
    class DummyParametersLoader(DummyModelLoader):  # type: ignore[misc]
        """A loader of random parameters that leaves persistent buffers as the model's constructor made them.

        A real checkpoint would find the buffers in that state, too.
        """

        def load_weights(self, model: torch.nn.Module, model_config: ModelConfig) -> None:
            """Load random weights as vLLM does, and restore the persistent buffers."""
            buffers = [b for _, b in persistent_buffers(model) if not b.is_meta]
            kept = [b.clone() for b in buffers]
            super().load_weights(model, model_config)
            for buffer, value in zip(buffers, kept, strict=True):
                buffer.copy_(value)

    return "dummy_parameters"


def persistent_buffers(model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers in the model's state dict, with their names."""
    for prefix, module in model.named_modules():
        for key, buffer in module._buffers.items():
            if buffer is not None and key not in module._non_persistent_buffers_set:
                yield f"{prefix}.{key}".lstrip("."), buffer
