"""The engine's options: fields for what people set most, and the rest of vLLM's engine arguments by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trlx_hybrid.errors import ConfigError, did_you_mean

DTYPES = {
    "auto": "auto",
    **dict.fromkeys(("bfloat16", "bf16"), "bfloat16"),
    **dict.fromkeys(("float16", "half", "fp16"), "float16"),
    **dict.fromkeys(("float32", "float", "fp32"), "float32"),
}
"""The names that `VLLMOptions.dtype` takes, with torch's name for each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VLLMOptions:
    """Settings of `engine="vllm"`: `HybridConfig.engine_options`. TRL's `vllm_*` arguments fill the fields of the same
    name.

    A replica is one engine, on one rank or on several.

    Attributes:
        dtype: "auto" takes the mixed-precision dtype of the training (`bf16`, `fp16`), else the model's own. Otherwise
            "bfloat16", "float16" or "float32", under any of the names in DTYPES, or torch's object.
        tensor_parallel_size: ranks that share each layer of a replica.
        pipeline_parallel_size: stages of a replica, each with a part of the layers on `tensor_parallel_size` ranks. The
            number of processes must be a multiple of a replica's ranks.
        gpu_memory_utilization: share of the GPU's memory for weights, activations and KV cache. If it is left out, the
            KV cache of an engine with sleep mode gets the memory that is free during rollouts, up to what
            `max_num_seqs` sequences of `max_model_len` fill; an engine that does not sleep gets 0.3, TRL's default.
        kv_cache_memory_bytes: size of the KV cache in bytes, instead of the share. On a CPU the default is what
            `max_num_seqs` sequences of `max_model_len` need, at most 4 GiB.
        max_model_len: longest prompt plus completion in tokens; the model's own by default.
        max_num_seqs: sequences decoded at once, for each pipeline stage.
        max_num_batched_tokens: tokens per engine step while prompts are read; at least `max_num_seqs` are taken.
        enforce_eager: no CUDA graphs and no compilation: starts faster, decodes slower. Always on for a CPU.
        enable_sleep_mode: free weights and KV cache while the trainer trains, after each rollout phase.
        model_impl: "vllm", "transformers" or "auto".
        trust_remote_code: run code that came with the model.
        quantization: how the engine quantises the weights, e.g. "fp8"; every weight sync quantises anew.
        speculative_config: vLLM's settings of speculative decoding.
        engine_args: any other field of `vllm.EngineArgs`.
    """

    dtype: str = "auto"
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    gpu_memory_utilization: float | None = None
    kv_cache_memory_bytes: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int = 4096
    enforce_eager: bool | None = None
    enable_sleep_mode: bool = False
    model_impl: str = "vllm"
    trust_remote_code: bool = False
    quantization: str | None = None
    speculative_config: Mapping[str, Any] | None = None
    engine_args: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        dtype = str(self.dtype).removeprefix("torch.")
        if dtype not in DTYPES:
            raise ConfigError(
                f"The vllm engine computes in no dtype {dtype!r}.{did_you_mean(dtype, DTYPES)} It takes "
                f"{', '.join(DTYPES)}."
            )
        object.__setattr__(self, "dtype", DTYPES[dtype])
        sizes = ("tensor_parallel_size", "pipeline_parallel_size", "max_model_len", "max_num_seqs")
        for name in (*sizes, "max_num_batched_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"HybridConfig.engine_options: {name} must be 1 or more, got {value}.")
        share = self.gpu_memory_utilization
        if share is not None and not 0 < share <= 1:
            raise ConfigError(
                f"HybridConfig.engine_options: gpu_memory_utilization is a share of the GPU above 0 and up to 1, got "
                f"{share}."
            )
        for name in self.engine_args:
            if name in self.__slots__:
                raise ConfigError(f"engine_args has {name!r}, an option of its own: engine_options={{{name!r}: …}}.")

    @property
    def ranks(self) -> int:
        """The number of ranks that one replica of the engine runs on: tensor-parallel size times pipeline stages."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def sequences(self) -> int | None:
        """The number of sequences that a replica decodes at once, or None where `max_num_seqs` is not set."""
        return self.max_num_seqs and self.max_num_seqs * self.pipeline_parallel_size


ROUNDINGS = ("nearest", "stochastic")
"""The values that `MergedOptions.rounding` takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MergedOptions:
    """Settings of `weights="merged"`: `HybridConfig.weights_options`.

    Attributes:
        rounding: how base plus adapter are rounded to the engine's dtype: "nearest", or "stochastic", to one of the two
            neighbours with the probability that makes the mean exact (engines in bfloat16). Seeded from run seed and
            weight version.
    """

    rounding: str = "nearest"

    def __post_init__(self) -> None:
        if self.rounding not in ROUNDINGS:
            raise ConfigError(
                f"HybridConfig.weights_options: no rounding {self.rounding!r}."
                f"{did_you_mean(str(self.rounding), ROUNDINGS)} There are {' and '.join(ROUNDINGS)}."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferOptions:
    """Settings of `weights="transfer"`: `HybridConfig.weights_options`.

    Attributes:
        backend: one of vLLM's weight-transfer engines by name: "nccl", or any other that is registered with vLLM where
            trainer and engines run. "auto" takes `nccl` on GPUs, and this plugin's `gloo`, through host memory, on CPUs
            and where vLLM cannot use NCCL.
        backend_options: further fields of that backend's trainer-side init info.
        deadline: seconds that joining the engines may take, and each sync.
    """

    backend: str = "auto"
    backend_options: Mapping[str, Any] = field(default_factory=dict)
    deadline: float = 600.0

    def __post_init__(self) -> None:
        if not self.deadline > 0:
            raise ConfigError(f"HybridConfig.weights_options: deadline={self.deadline}: seconds above 0.")
