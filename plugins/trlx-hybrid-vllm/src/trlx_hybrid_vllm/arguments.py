"""The arguments that vLLM's engine is built with, from the user's options, the live model and the available memory."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from trlx_hybrid.errors import did_you_mean
from trlx_hybrid.policy.adapters import untied_head
from trlx_hybrid.policy.policy import Policy, layer_kinds

from .options import VLLMOptions
from .positions import refuses_positions
from .private.distributed import layers_of_stages
from .private.models import (
    adapter_ranks,
    attention_of,
    dummy_load_format,
    is_latent,
    only_attends,
    unimportable,
    unquantised,
    without_adapters,
)
from .versions import untested
from .weights.lora import active_adapters, lora_layers

if TYPE_CHECKING:
    from peft import LoraConfig
    from peft.tuners.lora.layer import LoraLayer
    from transformers import TrainingArguments
    from trlx_hybrid.session import Session

CPU_KV_CACHE_LIMIT = 4 << 30
STATIC_SHARE = 0.3  # of the GPU, for an engine that does not sleep: TRL's default
UNCHECKED = 0.01  # where the cache's size is given, vLLM only checks that this share is free
MARGIN = 0.03  # of what this process may have of the GPU, left for what torch's allocator cannot use
LEAST_MARGIN = 1 << 30  # bytes; NCCL and CUDA allocate between our measurement of the free memory and vLLM's
KV_BLOCK = 32  # tokens per KV block on a CPU; vLLM's attention there wants a multiple of 32
SPARE_BLOCKS = 8
WITHOUT_KV = ("linear_attention", "conv", "moe", "mlp")  # these layers keep a state per sequence, or nothing
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # vllm/v1/attention/backends/cpu_attn.py
CPU_LATENT_SIZE = 576  # vllm/v1/attention/backends/mla/cpu_mla.py
GRAPH_TOKENS = 512  # of a step that reads prompts: what vLLM takes by itself for 256 sequences and more
HOPPER = 90  # compute capability
OF_GRAPHS = {  # of vllm.EngineArgs, and what goes with them
    "attention_backend",
    "attention_config",
    "compilation_config",
    "cudagraph_capture_sizes",
    "max_cudagraph_capture_size",
    "optimization_level",
}
WORKSPACE = 6 << 30  # bytes: activations of the profiling run, CUDA graphs and sampling, seen below 4 GiB for 7B


# --- what speaks against it -------------------------------------------------------------------------------------------


def refuses(policy: Policy, world: int, options: VLLMOptions, slots: bool = True) -> str | None:
    """Return why vLLM cannot serve this model with these options, and what to change; None where it can.

    Args:
        world: the number of training processes, which must be a multiple of the number of processes of one engine.
        slots: whether a weight sync can write LoRA adapters into the engine; False for engines in other processes.
    """
    model = policy.base
    config = model.config.get_text_config()
    size, stages = options.tensor_parallel_size, options.pipeline_parallel_size
    heads, layers = getattr(config, "num_attention_heads", None), getattr(config, "num_hidden_layers", stages)
    if world % (size * stages):
        which = f"tensor_parallel_size={size}" + f" times pipeline_parallel_size={stages}" * (stages > 1)
        return f"{which} does not divide the {world} processes. Choose one that does."
    if heads is not None and heads % size:
        return f"tensor_parallel_size={size} does not divide the model's {heads} attention heads. Choose one that does."
    if stages > layers:
        return f"pipeline_parallel_size={stages} is more than the model's {layers} layers. Choose fewer stages."
    return (
        _weights(policy, slots and options.pipeline_parallel_size == 1)
        or _architecture(policy.architecture, options)
        or refuses_positions(config, options.max_model_len)
        or _cpu(policy, heads)
        or _unknown_arguments(options)
    )


def _weights(policy: Policy, slots: bool) -> str | None:
    reason = policy.refuses_gather(merge=False)
    if reason is not None or (merging := policy.refuses_gather()) is None:
        return reason
    why = unserved(policy, None) if slots else "remote engines and pipeline stages have no slots for it"
    return None if why is None else f"{merging} Here it is not: {why}."


def _architecture(name: str, options: VLLMOptions) -> str | None:
    from vllm import ModelRegistry

    known = name in ModelRegistry.get_supported_archs()
    reason = unimportable(name) if known and options.model_impl != "transformers" else None
    if reason is not None:
        return f"{reason}. Install what is missing, or set engine='transformers'."
    if options.model_impl != "vllm" or known:
        return None
    return f"vLLM has no model for {name}. Set vllm_model_impl='transformers', or engine='transformers'."


def _cpu(policy: Policy, heads: int | None) -> str | None:
    if not on_cpu():
        return None
    config = policy.base.config.get_text_config()
    head_size = getattr(config, "head_dim", None) or (config.hidden_size // heads if heads else None)
    if is_latent(policy.base.config):
        latent = config.kv_lora_rank + config.qk_rope_head_dim
        if latent != CPU_LATENT_SIZE:
            return (
                f"vLLM's CPU kernel of latent attention is for kv_lora_rank + qk_rope_head_dim = {CPU_LATENT_SIZE}, "
                f"and this model's is {latent}. Use a GPU, or engine='transformers'."
            )
    elif head_size is not None and head_size not in CPU_HEAD_SIZES:
        return (
            f"vLLM's CPU attention has no kernel for head size {head_size}; it has {CPU_HEAD_SIZES}. Change "
            "head_dim, or hidden_size and num_attention_heads, or take engine='transformers'."
        )
    return None


def on_cpu() -> bool:
    """Return whether vLLM computes on a CPU here."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def refuses_routing(options: VLLMOptions) -> str | None:
    """Return why completions cannot say which experts computed each token, as router replay needs, or None."""
    if options.pipeline_parallel_size > 1:
        return "each stage of a replica knows the experts of its own layers only. Set pipeline_parallel_size=1."
    if options.tensor_parallel_size > 1 and not returns_no_experts():
        return "vLLM returns the experts of tokens on the first rank of a replica only. Set tensor_parallel_size=1."
    return None


def returns_no_experts() -> bool:
    """Return whether vLLM cannot return which experts computed each token; True on CPUs, whose model runner cannot."""
    return on_cpu()


def refuses_support(options: VLLMOptions, setting: str) -> str | None:
    """Return why vLLM cannot report the ids that each token was sampled from (what top-k, top-p and min-p leave).

    Return None where vLLM can report the ids. With speculative decoding it cannot.

    Args:
        setting: name of the sampling setting that leaves some ids out, for the message.
    """
    if options.speculative_config is None:
        return None
    return (
        f"with speculative_config vLLM does not say which ids it kept, and {setting} leaves some out. Leave one out, "
        "or set vllm_importance_sampling_correction=False."
    )


MASKS = "return_sampling_mask"
"""The name of vLLM's engine argument that makes it return the ids that each token was sampled from."""


def returns_no_masks() -> bool:
    """Return whether vLLM cannot return the ids that each token was sampled from; True on CPUs.

    The model runner that vLLM uses on CPUs cannot return the experts of a token either.
    """
    return returns_no_experts()


def _unknown_arguments(options: VLLMOptions) -> str | None:
    import dataclasses

    from vllm import EngineArgs

    known = {f.name for f in dataclasses.fields(EngineArgs)}
    for name in options.engine_args:
        if name not in known:
            return f"engine_args has {name!r}, which vllm.EngineArgs does not know.{did_you_mean(name, known)}"
    return None


def engine_dtype(options: VLLMOptions, policy: Policy, args: TrainingArguments) -> torch.dtype:
    """Return the dtype that the engine computes in.

    This is the option's, unless it is "auto". Then a float32 policy gets bfloat16 or float16 if `bf16` or `fp16` is set
    in the training arguments, and any other policy its own dtype.
    """
    if options.dtype != "auto":
        chosen: torch.dtype = getattr(torch, options.dtype)
        return chosen
    if policy.dtype is torch.float32:
        return torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else torch.float32
    return policy.dtype


# --- arguments --------------------------------------------------------------------------------------------------------


def engine_arguments(session: Session, options: VLLMOptions, dtype: torch.dtype) -> dict[str, Any]:
    """Return the keyword arguments of `vllm.LLM`, without the model's folder. The user's `engine_args` win.

    Raises:
        MemoryPlanError: what was asked for cannot fit; raised before anything is built.
    """
    cpu = on_cpu()
    arguments = shared_arguments(session, options, dtype, cpu) | {
        "distributed_executor_backend": "external_launcher",
        "enable_sleep_mode": options.enable_sleep_mode and not cpu,
    }
    arguments |= _memory(session, options, dtype, cpu) | dict(options.engine_args)
    if not cpu and serves_scheduler(arguments):
        arguments.setdefault("scheduler_cls", "trlx_hybrid_vllm.private.scheduler.DecodeScheduler")
    return arguments


def shared_arguments(session: Session, options: VLLMOptions, dtype: torch.dtype, cpu: bool) -> dict[str, Any]:
    """Return the arguments of vLLM that an engine in the trainer's process and a remote engine have in common.

    The arguments for the executor and for memory are not among them.
    """
    arguments: dict[str, Any] = {
        "load_format": dummy_load_format(),
        "dtype": str(dtype).removeprefix("torch."),
        "tensor_parallel_size": options.tensor_parallel_size,
        "pipeline_parallel_size": options.pipeline_parallel_size,
        "max_model_len": options.max_model_len,
        "max_num_seqs": options.sequences,
        "max_num_batched_tokens": _batched_tokens(session, options, whole_prompts=cpu),
        "enforce_eager": bool(options.enforce_eager) or cpu,
        "model_impl": options.model_impl,
        "trust_remote_code": options.trust_remote_code,
        "quantization": options.quantization,
        "logprobs_mode": "processed_logprobs",  # importance sampling needs the distribution that was sampled from
        "seed": 0,  # every request brings its own
    }
    if session.config.router_replay:
        if returns_no_experts():
            arguments["enable_prefix_caching"] = False  # tokens that are not computed are not routed
        else:
            arguments["enable_return_routed_experts"] = True
    if session.over_support and session.sampling.truncated_by() is not None and not returns_no_masks():
        arguments[MASKS] = True
    if options.speculative_config is not None:
        arguments["speculative_config"] = dict(options.speculative_config)
    if not cpu and _records_prompts(session, options, dtype):
        arguments |= _graphs_for_prompts(options, arguments["max_num_batched_tokens"])
    if cpu:
        arguments["worker_cls"] = "trlx_hybrid_vllm.private.cpu.PlainWeightsCPUWorker"
        arguments["block_size"] = KV_BLOCK
        arguments["enable_chunked_prefill"] = False  # vLLM's CPU sampler fails on a seeded prompt read in parts
        config = session.policy.base.config
        if "linear_attention" in layer_kinds(config.get_text_config()):
            arguments["enable_prefix_caching"] = False  # its states are kept where prompts are read in parts
        if is_latent(config):
            arguments["attention_backend"] = "CPU_MLA"  # the backend for AMX repacks a weight and drops the original
    return arguments


def _graphs_for_prompts(options: VLLMOptions, batched_tokens: int) -> dict[str, Any]:
    """Return the arguments for CUDA graphs of steps that decode and also read short prompts or tool results.

    By vLLM's defaults, the largest graph for 64 sequences has 128 tokens. A step that decodes 64 sequences and reads
    two tool results of 40 tokens is larger, and takes 25 ms. In a smaller step that reads prompts, attention is
    launched from Python between the layers' graphs, which takes 11 ms. As one graph, a step takes 5 ms
    (docs/benchmarks.md).

    Args:
        batched_tokens: the largest number of tokens of one step.
    """
    graphs: dict[str, Any] = {"cudagraph_mode": "FULL"}
    if options.sequences is not None and 2 * options.sequences < GRAPH_TOKENS:  # else it is vLLM's own choice
        graphs["max_cudagraph_capture_size"] = min(GRAPH_TOKENS, batched_tokens)
    return {"compilation_config": graphs}


def _records_prompts(session: Session, options: VLLMOptions, dtype: torch.dtype) -> bool:
    """Return whether to capture CUDA graphs of steps that read prompts.

    True where requests are added while others decode, and vLLM can capture such steps. Requests are added so by
    rollouts of conversations, and by any rollout whose rows stay in flight over optimizer steps. vLLM can capture such
    steps with FlashAttention 3, which it takes on Hopper for models whose layers have attention only. With chunked
    attention, vLLM refuses to capture them. With other attention, vLLM would compile the model for whole graphs, and
    then capture no graph of a step that reads prompts.
    """
    from vllm.platforms import current_platform

    rollout, config = session.selection.rollout, session.policy.base.config
    return (
        rollout is not None
        and ("streams" in rollout.component.needs or session.config.options("rollout").get("max_staleness", 0) > 0)
        and not options.enforce_eager
        and options.speculative_config is None
        and options.pipeline_parallel_size == 1
        and not OF_GRAPHS & options.engine_args.keys()
        and dtype.itemsize == 2
        and current_platform.is_device_capability_family(HOPPER)
        and not is_latent(config)
        and getattr(config.get_text_config(), "attention_chunk_size", None) is None
        and layer_kinds(config.get_text_config()) <= {"full_attention", "sliding_attention"}
        and only_attends(session.policy.architecture)
    )


def serves_scheduler(arguments: dict[str, Any]) -> bool:
    """Return whether this plugin's `DecodeScheduler` may replace vLLM's scheduler in an engine with these arguments.

    It may where this release of vLLM was tested, and where vLLM would use its own `AsyncScheduler`. The second
    condition repeats vLLM's own rule, as far as the rule can be read from the arguments.
    """
    return (
        untested() is None
        and arguments.get("async_scheduling") is not False
        and arguments.get("speculative_config") is None
        and arguments.get("diffusion_config") is None
        and arguments.get("pipeline_parallel_size", 1) == 1
    )


def context_length(session: Session, options: VLLMOptions) -> int:
    """Return the longest prompt plus completion, in tokens: the option's value, or what the model supports."""
    config = session.policy.base.config.get_text_config()
    return int(options.max_model_len or config.max_position_embeddings)


def _batched_tokens(session: Session, options: VLLMOptions, whole_prompts: bool) -> int:
    """Return `max_num_batched_tokens` for vLLM, the largest number of tokens of one step.

    The result is the option's number, within two limits. It is at least one token for each sequence, so that all
    sequences can decode in one step. It is at most the number of tokens of all sequences at full length: with more
    tokens, vLLM's GPU profiling run would read past its block tables.

    Args:
        whole_prompts: whether prompts are never read in parts. Then the result is at least the longest sequence.
    """
    length = context_length(session, options)
    sequences = options.sequences or options.max_num_batched_tokens
    wanted = min(max(options.max_num_batched_tokens, sequences), sequences * length)
    return max(wanted, length) if whole_prompts else wanted


# --- LoRA slots -------------------------------------------------------------------------------------------------------


UNSERVED = {
    "use_dora": "DoRA scales the merged weight, which no LoRA slot holds",
    "modules_to_save": "it trains whole modules beside the LoRA layers",
    "trainable_token_indices": "it trains rows of the embeddings",
    "target_parameters": "it adapts fused expert parameters, not layers",
    "lora_bias": "vLLM's slots have no bias",
    "layer_replication": "it repeats layers that share base weights",
    "alora_invocation_tokens": "an activated LoRA starts in the middle of a sequence",
    "arrow_config": "Arrow routes each token between adapters",
}
"""Fields of LoraConfig that change what an adapter computes, with the reason that vLLM's slots cannot serve them.

Other variants are found on the layers themselves.
"""


def lora_arguments(policy: Policy, dtype: torch.dtype | None = None) -> dict[str, Any] | str:
    """Return the engine arguments with which vLLM can hold this policy's LoRA adapter, or a text that says why not.

    vLLM wraps only the layers that the adapter targets, and a fused layer if any of its parts is targeted. A wrapped
    layer costs two more kernels per step and memory for A and B, and vLLM refuses to wrap the head of vocabularies
    above 258,048.

    Args:
        policy: the live policy, before the engine is built.
        dtype: the dtype that the engine will compute in; None where it is not known yet.
    """
    reason = unserved(policy, dtype)
    if reason is not None:
        return reason
    layers = lora_layers(policy)
    rank = largest_rank(layers)
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_cpu_loras": 1,
        "max_lora_rank": next(size for size in adapter_ranks() if size >= rank),
        "lora_target_modules": sorted({name.rpartition(".")[2] for name in layers}),
    }


def unserved(policy: Policy, dtype: torch.dtype | None) -> str | None:
    """Return why vLLM's LoRA slots (its tensors for an adapter's A and B) cannot hold what this policy trains, or None.

    Args:
        policy: the live policy.
        dtype: the dtype that the engine will compute in; None where it is not known yet.
    """
    if not policy.adapters:
        return "the policy is not a PEFT model: there is no adapter to serve"
    reason = _unserved_config(policy) or _unserved_layers(policy) or without_adapters(policy.architecture)
    if reason is not None:
        return reason
    if policy.fsdp_version == 1:
        return "FSDP1 flattens the adapter's parameters. Set `fsdp_version: 2` in the accelerate config"
    for name, p in policy.module.named_parameters():
        if hasattr(p, "ds_id"):
            return f"{name} is in ZeRO-3's flat buffers: gather merges the adapter instead. Or use FSDP2"
    if dtype is torch.float32 and not on_cpu():
        return "vLLM's LoRA kernels compute in 16 bits, and the engine in float32. Set engine_options dtype='bfloat16'"
    rank, largest = largest_rank(lora_layers(policy)), adapter_ranks()[-1]
    return f"the adapter's rank is {rank}, and vLLM's largest is {largest}" if rank > largest else None


def _unserved_config(policy: Policy) -> str | None:
    configs = cast("dict[str, LoraConfig]", policy.module.peft_config)
    for name, config in configs.items():
        kind = getattr(config.peft_type, "value", config.peft_type)
        if kind != "LORA":
            return f"adapter {name!r} is of type {kind}; vLLM serves LoRA"
    active = active_adapters(lora_layers(policy))
    if len(active) != 1:
        return f"{len(active)} adapters are active ({', '.join(active)}); vLLM applies one. Use `set_adapter`"
    config = configs[active[0]]
    if config.bias != "none":
        return f"adapter {active[0]!r} trains biases of the base (bias={config.bias!r})"
    for field, why in UNSERVED.items():
        if getattr(config, field):
            return f"adapter {active[0]!r} has {field}: {why}"
    return None


def _unserved_layers(policy: Policy) -> str | None:
    from peft.tuners.lora.layer import Linear
    from peft.utils.other import AuxiliaryTrainingWrapper

    plain = {Linear, getattr(sys.modules.get("peft.tuners.lora.bnb"), "Linear4bit", Linear)}

    for name, module in policy.base.named_modules():
        if isinstance(module, AuxiliaryTrainingWrapper):
            return f"{name} is trained as a whole ({type(module).__name__})"
    layers = lora_layers(policy)
    (adapter,) = active_adapters(layers)
    head = policy.base.get_output_embeddings()
    for name, layer in layers.items():
        if type(layer) not in plain:  # subclasses compute something else: sharded or adaptive layers
            return f"{name} is adapted by PEFT's {type(layer).__name__} layer; vLLM's slots hold plain linear ones"
        if layer is head:
            return f"{name} is the output head: vLLM would scale a slot with the vocabulary and drop prompt log-probs"
        if name.rpartition(".")[2].isdigit():
            return (
                f"{name} ends in a number: vLLM goes by the last part of a name, and would choose whole blocks, too. "
                "Leave it out of the adapter's target_modules"
            )
        variant = layer.lora_variant.get(adapter)
        if variant is not None:
            return f"{name} computes a variant of LoRA ({type(variant).__name__})"
        if layer.lora_bias.get(adapter):
            return f"{name} has lora_bias: {UNSERVED['lora_bias']}"
    return None


def largest_rank(layers: dict[str, LoraLayer]) -> int:
    """Return the largest rank that an active adapter has in any layer: PEFT's `rank_pattern` may change it by layer."""
    active = active_adapters(layers)
    return max(int(layer.r[a]) for layer in layers.values() for a in active if a in layer.r)


# --- memory -----------------------------------------------------------------------------------------------------------


def _memory(session: Session, options: VLLMOptions, dtype: torch.dtype, cpu: bool) -> dict[str, Any]:
    """Return vLLM's arguments for the size of the KV cache, and make room on the device to build the engine.

    The options may give the size, in bytes or as a share of the GPU. Otherwise, an engine with sleep mode gets the
    memory that is free during rollouts according to the session's memory ledger. It gets no more than `max_num_seqs`
    sequences of full length can fill: a larger cache would be mapped at each rollout and never used. An engine that
    does not sleep gets a fixed share of the GPU. An engine on a CPU gets at most 4 GiB.

    To make room, the trainer's tensors that are offloaded during rollouts are moved to host memory before the engine is
    built. The policy is moved as well, if vLLM is to fill a share of the GPU and the policy's parameters will become
    views of the engine's memory. Thus no weights are held twice.

    Raises:
        MemoryPlanError: the engine cannot fit beside the trainer.
    """
    memory, share = session.memory, options.gpu_memory_utilization
    wanted, shared = kv_cache_bytes(session, options, dtype), _becomes_the_engines(session, options, dtype)
    size = options.kv_cache_memory_bytes
    if size is None and cpu:
        size = min(wanted, CPU_KV_CACHE_LIMIT)
    weights = memory.engine_weight_bytes(dtype.itemsize, options.ranks)
    plan = memory.check_fit(
        kv_cache_bytes=size or kv_cache_bytes(session, options, dtype, least=True),
        shared=shared,
        engine_weight_bytes=weights,
        workspace=WORKSPACE,
        sleeps=options.enable_sleep_mode,
    )
    memory.make_room_to_build(plan)
    if size is not None or cpu:
        return {"kv_cache_memory_bytes": size, "gpu_memory_utilization": UNCHECKED}
    if share is None and not options.enable_sleep_mode:
        share = STATIC_SHARE
    fits = share is None and wanted + weights + WORKSPACE <= memory.free_bytes_in_rollout()
    if not session.ranks.any(not fits):  # the ranks of an engine build it alike
        return {"kv_cache_memory_bytes": wanted, "gpu_memory_utilization": UNCHECKED}
    if shared:
        memory.park_policy()
    total = torch.cuda.get_device_properties(session.policy.device).total_memory
    free = memory.free_bytes_in_rollout() - max(MARGIN * memory.capacity(), LEAST_MARGIN)
    return {"gpu_memory_utilization": share or free / total}


def kv_cache_bytes(session: Session, options: VLLMOptions, dtype: torch.dtype, least: bool = False) -> int:
    """Return the bytes of KV cache that `max_num_seqs` sequences (256 if not given) of full length fill on one rank.

    The number comes from the model's config. With pipeline stages, the result is for the stage with the largest cache.

    Args:
        least: return a lower bound instead: the bytes that one sequence fills, in layers that certainly cache keys and
            values.
    """
    config = session.policy.base.config
    text = config.get_text_config()
    kinds = getattr(text, "layer_types", None)
    window: Any = getattr(text, "sliding_window", None)
    # vLLM frees blocks that left a layer's window, unless this manager is off, as it is with chunked attention.
    chunked = getattr(text, "attention_chunk_size", None) is not None
    frees = not chunked and not options.engine_args.get("disable_hybrid_kv_cache_manager")
    slides = window is not None and (frees or not kinds or set(kinds) == {"sliding_attention"})
    sequences = 1 if least else options.sequences or 256
    every = last = -(-context_length(session, options) // KV_BLOCK) * sequences
    if slides:  # the window, and beside it the tokens of two steps, which are scheduled ahead
        in_flight = 2 * _batched_tokens(session, options, whole_prompts=False)
        last = (-(-window // KV_BLOCK) + 1) * sequences + -(-in_flight // KV_BLOCK)
    shapes = attention_of(config)
    elements = [0] * len(shapes)
    for layer in range(len(shapes) - (getattr(text, "num_kv_shared_layers", None) or 0)):
        kind = kinds[layer] if kinds else "sliding_attention"
        if not (least and kind in WITHOUT_KV):
            heads, width = shapes[layer]
            blocks = min(every, last) if kind == "sliding_attention" else every
            elements[layer] = (blocks + SPARE_BLOCKS) * KV_BLOCK * -(-heads // options.tensor_parallel_size) * width
    stages = layers_of_stages(len(shapes), options.pipeline_parallel_size)
    return max(sum(elements[first:end]) for first, end in stages) * dtype.itemsize


def _becomes_the_engines(session: Session, options: VLLMOptions, dtype: torch.dtype) -> bool:
    """Return whether the weight sync will turn the policy's parameters into views of the engine's memory.

    It does so where the run may share memory (`weights="alias"` or "lora"), each rank has an engine of its own, and the
    policy is not sharded and has the engine's dtype.
    """
    wanted = any(path.component.shares_memory for path in session.selection.weight_paths)
    plain = all(type(p) is torch.nn.Parameter for p in session.policy.base_parameters().values())
    same = session.policy.dtype == dtype
    return wanted and plain and same and options.ranks == 1 and options.quantization is None


# --- the model's folder -----------------------------------------------------------------------------------------------


def write_without_weights(policy: Policy, folder: Path) -> None:
    """Write config, generation config and tokenizer of the live model into `folder`, for vLLM to build its model from.

    The weights come later, through the weight sync. The model's `name_or_path` is never read: it is empty for models
    built from a config, and stale for resized or merged ones.
    """
    model = policy.base
    config = unquantised(model.config)
    text = config.get_text_config()
    if text.model_type.startswith("cohere2") and text.sliding_window is not None:
        text.sliding_window -= 1  # vLLM adds one: its layers see a token more than the trainer's
    config.architectures = [policy.architecture]
    if untied_head(model) is not None:
        config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = False
    config.save_pretrained(folder)
    if model.generation_config is not None:
        # Not `save_pretrained`, which refuses the odd combinations that published generation configs contain.
        model.generation_config.to_json_file(folder / "generation_config.json")
    policy.processing_class.save_pretrained(folder)
