"""The forecast of `trlx-hybrid train RECIPE --forecast`: a prediction of a run's memory from its settings and its
model's config, without weights or a GPU."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Set
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D
from transformers.quantizers import HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module

from ..contract.activations import Activations, PlannedLoss
from ..errors import ConfigError, MemoryPlanError
from ..memory.estimate import GIB, LEAVING, ParameterSize, Prediction, predict_fitting
from ..memory.ledger import parameter_sizes, table
from ..memory.trainer_memory import ENGINES
from ..plugins.host import Host
from ..plugins.selection import Selection, choose_algorithms, select
from ..policy.policy import Policy
from ..policy.positions import beyond_positions
from ..trl.arguments import trainer_arguments

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from .recipe import RecipeSettings

RESERVED = 0.1
"""The share of a GPU's memory that is not counted as room for the KV cache: it is left for CUDA itself, CUDA graphs,
and what sampling allocates."""

CUDA = 3 << 28
"""Bytes of a GPU that are taken beside all tensors once a model is on it: 0.61 to 0.75 GiB for models of 8B to 32B, the
stage "model built" in benchmarks/results/long_context and capacity_training."""

TILE = (4096, 32768)
"""The number of tokens and of vocabulary entries for which TRL's fused LM head computes logits at once."""

BLOCK, NESTED_BLOCK = 64, 256
"""Block sizes of bitsandbytes' `Params4bit`: BLOCK elements share a scale, and NESTED_BLOCK scales share a scale of
their own."""


class GPUs(NamedTuple):
    """A number of ranks, and the memory of each rank's GPU in bytes."""

    ranks: int
    bytes: int


def gpus_of(text: str) -> GPUs:
    """Parse the value of `--forecast`: "24" is one GPU of 24 GiB, "8x80" are eight GPUs of 80 GiB.

    Raises:
        ConfigError: the text has neither form.
    """
    found = re.fullmatch(r"(?:([1-9]\d*)x)?(\d+(?:\.\d+)?)", text)
    if found is None or float(found[2]) == 0:
        raise ConfigError(f"--forecast {text}: write the GiB of a GPU, as 24, or of several, as 8x80.")
    return GPUs(int(found[1] or 1), int(float(found[2]) * GIB))


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSize:
    """The memory of the engine on one rank, in bytes, and what determines it.

    Attributes:
        weights: bytes of the engine's weights.
        shared: whether these weights are the policy's own memory.
        kv_cache: bytes of the KV cache: the configured size; else enough for `sequences` sequences, or for as many as
            fit into memory.
        sequence: bytes of the KV cache that one sequence of `length` tokens takes.
        sequences: the largest number of sequences that the engine computes at once.
        length: the longest prompt plus completion, in tokens.
        sleeps: whether the engine gives memory back while the trainer trains.
    """

    weights: int
    shared: bool
    kv_cache: int
    sequence: int
    sequences: int
    length: int
    sleeps: bool

    def __str__(self) -> str:
        room = min(self.kv_cache // self.sequence, self.sequences)
        return f"KV cache: room for {room} of {self.sequences} sequences of {self.length} tokens at once"

    def check(self) -> None:
        """Check that the KV cache holds at least one sequence.

        Raises:
            MemoryPlanError: the KV cache is smaller than one sequence.
        """
        if self.kv_cache < self.sequence:
            raise MemoryPlanError(
                f"The KV cache has {self.kv_cache / GIB:.2f} GiB, and one sequence of {self.length} tokens takes "
                f"{self.sequence / GIB:.2f}. Lower vllm_max_model_length, raise vllm_gpu_memory_utilization if set, or "
                "let less stay beside the engine: offload='all', load_in_4bit, a smaller model.",
                owner="KV cache",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """A forecast of a run's memory on one rank.

    Attributes:
        gpus: the GPUs of the run.
        prediction: the bytes of each owner in each phase, without activations.
        engine: the memory of the engine; None where there is none on this rank.
        loss: the largest pass of the loss.
        activations: the memory that this pass takes; None where the scoring does not say.
        inputs: bytes of the inputs of all layers in this pass, without shared prompts.
        others: what is not counted, as texts.
    """

    gpus: GPUs
    prediction: Prediction
    engine: EngineSize | None
    loss: PlannedLoss
    activations: Activations | None
    inputs: int
    others: tuple[str, ...]

    @property
    def left(self) -> int:
        """The bytes that are left for activations while the trainer trains."""
        return self.gpus.bytes - sum(self.prediction.phases["train"].values())

    @property
    def peaks(self) -> dict[str, int]:
        """The bytes that each phase needs at its peak, activations and CUDA included."""
        device = 0 if self.activations is None else self.activations.device
        totals = {phase: sum(held.values()) + CUDA for phase, held in self.prediction.phases.items()}
        return totals | {"train": totals["train"] + device}

    def check(self) -> None:
        """Check that policy, gradients, optimizer, engine and activations fit into the GPU.

        Raises:
            MemoryPlanError: they do not fit; names what is too large and the setting to change.
        """
        self.prediction.check(self.gpus.bytes)
        if self.engine is not None:
            self.engine.check()
        if self.activations is not None and self.activations.device + CUDA > self.left:
            checkpoints = self.loss.args.gradient_checkpointing or checkpointed_by_fsdp(self.loss.args)
            raise MemoryPlanError(
                f"{self.rows} take {self.activations.device / GIB:.2f} GiB of activations ({self.activations.layers}), "
                f"and {(self.left - CUDA) / GIB:.2f} GiB are left for them. Lower per_device_train_batch_size or the "
                f"length of rows{'' if checkpoints else ', set gradient_checkpointing=True'}, or let less stay beside "
                f"them: {'' if self.loss.quantised else 'load_in_4bit, '}a smaller model.",
                owner="other",
            )

    @property
    def rows(self) -> str:
        """The number of rows and their length, as a text."""
        return f"{self.loss.rows} {'row' if self.loss.rows == 1 else 'rows'} of {self.loss.length} tokens"

    def lines(self) -> list[str]:
        """Return the lines of the forecast."""
        gpus = self.gpus
        of_what = "1 GPU" if gpus.ranks == 1 else f"each of {gpus.ranks} GPUs"
        return [
            f"{of_what} of {gpus.bytes / GIB:g} GiB",
            *table(self.prediction),
            *([str(self.engine)] if self.engine else []),
            *self._training(),
            *(f"not counted: {what}" for what in self.others),
        ]

    def _training(self) -> list[str]:
        found, left = self.activations, f"training: {self.left / GIB:.2f} GiB left for activations"
        if found is None:
            return [f"{left}, of which the inputs of all layers take {self.inputs / GIB:.2f} for {self.rows}"]
        loss, once = self.loss, ""
        if found.tokens < loss.rows * loss.length:
            prompts = f"{loss.prompts} prompts" if loss.prompts > 1 else "a prompt"
            once = f", {prompts} of {loss.length - loss.completion} computed once"
        phases = ", ".join(f"{phase} {peak / GIB:.2f}" for phase, peak in self.peaks.items())
        return [
            f"{left}, which take {found.device / GIB:.2f} for {self.rows}{once}",
            f"layers: {found.layers}; logits of {loss.tile[0]} tokens at a time",
            *([f"host: {found.host / GIB:.2f} GiB of pinned memory on each rank"] if found.host else []),
            f"peaks with activations and {CUDA / GIB:g} of CUDA, GiB: {phases}",
        ]


def forecast(given: RecipeSettings, gpus: GPUs) -> list[str]:
    """Return the lines of a forecast: the bytes of policy, gradients, optimizer, engine weights and KV cache on one
    rank in each phase, how many sequences the KV cache holds, and how the layers are computed, with the bytes that
    activations take on the device and on the host.

    Raises:
        MemoryPlanError: the run does not fit; the message names the largest use of memory and the setting to change.
        ConfigError, ComponentError: a setting is wrong; the run itself would raise this error at its start.
    """
    found = forecast_of(given, gpus)
    found.check()
    return found.lines()


def forecast_of(given: RecipeSettings, gpus: GPUs, positions: bool = True) -> Forecast:
    """Return the forecast of a run, which may not fit.

    Args:
        positions: whether rows that are longer than the model's positions are refused.

    Raises:
        ConfigError, ComponentError: a setting is wrong.
    """
    from ..trl.recipe import model_arguments  # here, since it imports trl

    given = with_context(given)
    args, mode = given.training, given.hybrid.offload
    if given.model.model_name_or_path is None:
        raise ConfigError("model_name_or_path is not set: name a model of the hub, or its folder.")
    if given.model.load_in_8bit:
        raise ConfigError("load_in_8bit: a base in 8 bits is served by no engine. Take load_in_4bit, or neither.")
    host = Host.load(given.hybrid.disable_plugins or ())
    selection = select(
        given.hybrid, trainer_arguments(args, given.recipe.tools, None, given.hybrid.options("rollout")), host.registry
    )
    choose_algorithms(given.hybrid, host.registry)  # raises for wrong names or options
    host.require(given.hybrid.options("plugin"), "HybridConfig.plugin_options")
    adapter = model_arguments(given.model, args)["peft_config"]
    policy = model_without_memory(given.model.model_name_or_path, **args.model_init_kwargs)
    context = given.recipe.context
    if context is not None and positions:
        reason = beyond_positions(policy.config.get_text_config(), context, "context")
        if reason is not None:
            raise ConfigError(reason)
    bits = four_bits(given, policy.config)
    quantised = set() if bits is None else quantised_weights(policy, bits)
    if adapter is not None:
        from peft import get_peft_model

        with torch.device("meta"):
            policy = get_peft_model(policy, adapter)
    parameters = parameter_sizes(policy) if bits is None else sizes_in_4_bits(policy, quantised, bits.nested)
    sharded = bool(args.fsdp) and gpus.ranks > 1
    if sharded:
        parameters = [shard(p, gpus.ranks, upcast=args.bf16 or args.fp16) for p in parameters]
    remote = selection.engine is not None and selection.engine.component.remote
    engine = None
    if selection.engine is not None and not remote:
        own = sharded or bits is not None
        engine = engine_size(given, selection, policy, sum(p.bytes for p in parameters), gpus, own=own)
    leaving = () if engine is None or not engine.sleeps or mode == "none" else LEAVING[: 2 if engine.shared else 3]
    prediction = predict_fitting(
        gpus.bytes,
        leaving,
        least=len(leaving) if mode == "all" else 0,
        parameters=parameters,
        optimizer=str(getattr(args.optim, "value", args.optim)),
        engine_weight_bytes=engine.weights if engine else 0,
        kv_cache_bytes=engine.kv_cache if engine else 0,
        shared=engine is not None and engine.shared,
        asleep=ENGINES if engine and engine.sleeps else (),
    )
    text, rows = policy.config.get_text_config(), args.per_device_train_batch_size
    length = context or (engine.length if engine is not None else args.max_completion_length)
    inputs = text.num_hidden_layers * rows * length * text.hidden_size * base_dtype(policy).itemsize
    train = prediction.phases["train"]
    loss = PlannedLoss(
        policy=policy_of(policy, bits is not None),
        args=args,
        rows=rows,
        prompts=prompts_of(args, rows),
        length=length,
        completion=min(args.max_completion_length, length - 1),
        free=gpus.bytes - CUDA - sum(train.values()) + train["gradients"],
        tile=TILE,
        accumulates=args.gradient_accumulation_steps > 1,
        sharded=sharded,
        recomputed=sharded and checkpointed_by_fsdp(args),
        quantised=bits is not None,
    )
    others = {
        "the engines, which have GPUs of their own": remote,
        "the reference model of beta": bool(args.beta) and adapter is None,
        "the reward model": given.recipe.reward_model_name_or_path is not None,
    }
    return Forecast(
        gpus=gpus,
        prediction=prediction,
        engine=engine,
        loss=loss,
        activations=selection.scoring.component.forecast(loss, selection.scoring.options),
        inputs=inputs,
        others=tuple(what for what, there in others.items() if there),
    )


def with_context(given: RecipeSettings) -> RecipeSettings:
    """Return the settings of a run whose rows have as many tokens as `context` says; without it, the same settings."""
    length = given.recipe.context
    if length is None:
        return given
    training, options = copy.copy(given.training), given.hybrid.options("engine")
    training.vllm_max_model_length = length
    if "max_model_len" in options:
        options["max_model_len"] = length
    return given._replace(training=training, hybrid=replace(given.hybrid, engine_options=options or None))


def prompts_of(args: Any, rows: int) -> int:
    """Return how many different prompts a micro-batch has at most.

    Where its rows may be chosen, the rows of a prompt are put together. They may not be chosen where a rollout is
    trained in several optimizer steps, or where the loss depends on which rows are together (`trl/refusals.py`,
    REGROUPED).

    Args:
        args: TRL's config.
        rows: the number of rows in the micro-batch.
    """
    apart = (
        (getattr(args, "steps_per_generation", None) or 0) > args.gradient_accumulation_steps
        or getattr(args, "loss_type", None) == "bnpo"
        or getattr(args, "top_entropy_quantile", 1.0) < 1.0
        or getattr(args, "entropy_coef", 0.0) != 0.0
        or getattr(args, "use_adaptive_entropy", False)
    )
    if apart:
        return rows
    alike: int = args.num_generations
    if alike % rows == 0 or rows % alike == 0:
        return max(1, rows // alike)
    return min(rows, math.ceil(rows / alike) + 1)


def checkpointed_by_fsdp(args: Any) -> bool:
    """Return whether FSDP lets all layers be recomputed, beside which transformers refuses gradient checkpointing of
    its own."""
    return bool(args.fsdp) and bool((args.fsdp_config or {}).get("activation_checkpointing"))


def policy_of(model: Any, quantised: bool) -> Policy:
    """Return a view of a model on the meta device.

    Args:
        quantised: whether the base is held in 4 bits; TRL then keeps adapters in bfloat16.
    """
    if quantised:
        for p in model.parameters():
            p.data = p.data.to(torch.bfloat16) if p.requires_grad else p.data
    nobody: Any = None  # no tokenizer is read
    return Policy(lambda: model, nobody, torch.device("meta"))


def engine_size(
    given: RecipeSettings, selection: Selection, policy: PreTrainedModel, held: int, gpus: GPUs, own: bool
) -> EngineSize:
    """Return the memory that the run's engine will take on one rank.

    Without a configured size, the KV cache gets the memory that is left during rollouts, but no more than the keys and
    values of all layers of all its sequences take. Models with sliding windows, latent attention or states of a fixed
    size need less than this estimate.

    Args:
        given: the settings of the run.
        selection: the components that were chosen for the run.
        policy: the policy on the meta device.
        held: bytes of the policy on one rank.
        own: whether the engine cannot share the policy's memory, because the policy is sharded or in 4 bits.
    """
    args = given.training
    assert selection.engine is not None
    options = selection.engine.options
    base = base_dtype(policy)
    mixed = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else torch.float32
    told = getattr(torch, str(getattr(options, "dtype", None)), None)  # None for "auto"
    dtype = told or (mixed if base is torch.float32 else base)
    ranks = getattr(options, "ranks", 1)
    if gpus.ranks % ranks:
        raise ConfigError(f"An engine takes {ranks} GPUs, which do not divide the {gpus.ranks} of --forecast.")
    text = policy.config.get_text_config()
    shared = (
        any(path.component.shares_memory for path in selection.weight_paths)
        and not own
        and (ranks, dtype, getattr(options, "quantization", None)) == (1, base, None)
    )
    weights = sum(p.numel() for p in policy.parameters()) * dtype.itemsize // ranks
    length = getattr(options, "max_model_len", None) or text.max_position_embeddings
    sequences = getattr(options, "max_num_seqs", None) or 256
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    sequence = 2 * text.num_hidden_layers * math.ceil(heads / ranks) * size * dtype.itemsize * length
    sleeps = getattr(options, "enable_sleep_mode", False)
    share = getattr(options, "gpu_memory_utilization", None)
    stays = held if shared or not sleeps or given.hybrid.offload != "all" else 0
    room = gpus.bytes * share - weights if share else gpus.bytes * (1 - RESERVED) - stays - (0 if shared else weights)
    return EngineSize(
        weights=weights,
        shared=shared,
        kv_cache=getattr(options, "kv_cache_memory_bytes", None) or max(0, min(sequence * sequences, int(room))),
        sequence=sequence,
        sequences=sequences,
        length=length,
        sleeps=sleeps,
    )


def base_dtype(policy: PreTrainedModel) -> torch.dtype:
    """Return the dtype of the policy's base model, without its adapters."""
    frozen = [p for p in policy.parameters() if not p.requires_grad]
    dtype: torch.dtype = (frozen or list(policy.parameters()))[0].dtype
    return dtype


def model_without_memory(name: str, *, dtype: str, trust_remote_code: bool, **others: Any) -> PreTrainedModel:
    """Return the model that TRL would load, but on the meta device, where it takes no memory, and not quantised.

    Args:
        name: a name of the hub, or a folder with a config.json.
        dtype: as in TRL's `ModelConfig`.
        others: further arguments of `from_pretrained`: `revision` and `attn_implementation` are read, the others are
            ignored, since they do not change sizes.
    """
    import transformers

    revision = others.get("revision") or "main"
    try:
        config = transformers.AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=trust_remote_code)
    except OSError as error:  # no such model, or no network
        raise ConfigError(f"model_name_or_path: the config of {name!r} cannot be read: {error}") from error
    kind = getattr(transformers, (config.architectures or [""])[0], None)
    if others.get("attn_implementation") is not None:
        config._attn_implementation = others["attn_implementation"]
    with torch.device("meta"):
        if kind is not None:
            model = kind(config)
        else:
            model = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
        model.to(getattr(torch, dtype, None) or config.dtype or torch.float32)
        model.tie_weights()
        return model


class FourBits(NamedTuple):
    """The settings of a 4-bit base model of bitsandbytes.

    Attributes:
        nested: whether the scales of the weights, one for each 64 elements, are themselves quantised to one byte
            (double quantisation).
        skipped: names of layers that are not quantised; with None, transformers decides.
    """

    nested: bool
    skipped: list[str] | None


def four_bits(given: RecipeSettings, config: PretrainedConfig) -> FourBits | None:
    """Return the 4-bit settings of a run's base model, from its flags or from the checkpoint's config; None for a base
    model that is not quantised.

    Raises:
        ConfigError: the checkpoint is quantised in another way.
    """
    told = getattr(config, "quantization_config", None)
    if told is None:
        return FourBits(given.model.use_bnb_nested_quant, None) if given.model.load_in_4bit else None
    told = told if isinstance(told, dict) else told.to_dict()
    if not told.get("load_in_4bit"):
        raise ConfigError(
            f"model_name_or_path: {given.model.model_name_or_path!r} is quantised "
            f"({told.get('quant_method', 'unknown')}), which --forecast knows in 4 bits of bitsandbytes only. Name the "
            "model that it was made of, with load_in_4bit where memory is short."
        )
    return FourBits(bool(told.get("bnb_4bit_use_double_quant")), told.get("llm_int8_skip_modules"))


def quantised_weights(model: PreTrainedModel, bits: FourBits) -> set[int]:
    """Return the `id`s of the parameters that bitsandbytes holds in 4 bits: those of linear layers, as transformers
    chooses them.

    Args:
        model: the model on the meta device, without adapters.
    """
    kept = HfQuantizer.get_modules_to_not_convert(model, bits.skipped, model._keep_in_fp32_modules)
    layers = ((name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D))
    return {id(layer.weight) for name, layer in layers if should_convert_module(name, kept)}


def sizes_in_4_bits(policy: PreTrainedModel, quantised: Set[int], nested: bool) -> list[ParameterSize]:
    """Return the sizes of all parameters in a QLoRA run, in which TRL keeps the adapter in bfloat16.

    Args:
        policy: the policy on the meta device.
        quantised: `id`s of the parameters in 4 bits, from `quantised_weights`.
        nested: whether the scales of 4-bit parameters are themselves quantised to one byte.
    """
    found = []
    for p in policy.parameters():
        if p.requires_grad or id(p) not in quantised:
            found.append(
                ParameterSize(
                    shape=tuple(p.shape), itemsize=2 if p.requires_grad else p.itemsize, trainable=p.requires_grad
                )
            )
            continue
        scales = math.ceil(p.numel() / BLOCK)
        found.append(ParameterSize(shape=(math.ceil(p.numel() / 2),), itemsize=1, trainable=False))
        found.append(ParameterSize(shape=(scales,), itemsize=1 if nested else 4, trainable=False))
        if nested:
            found.append(ParameterSize(shape=(math.ceil(scales / NESTED_BLOCK),), itemsize=4, trainable=False))
    return found


def shard(p: ParameterSize, ranks: int, upcast: bool) -> ParameterSize:
    """Return the size of the largest shard of a parameter that FSDP2, which splits along the first dimension, gives to
    a rank.

    Args:
        upcast: whether shards of trainable parameters are float32, as accelerate keeps them with mixed precision.
    """
    shape = (math.ceil(p.shape[0] / ranks), *p.shape[1:]) if p.shape else ()
    return replace(p, shape=shape, itemsize=4 if upcast and p.trainable else p.itemsize)
