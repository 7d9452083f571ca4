"""The model and lengths that a benchmark measures, the same for all contestants, and the settings that may differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .lengths import Lengths


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """The model and the workload, the same for all contestants of a benchmark.

    Attributes:
        config: config of a Qwen2 model with random weights.
        prompt_tokens: length of each prompt.
        cases: how many completions, and how long.
        kv_cache_bytes: KV cache of each engine. It is given, because vLLM's profiling would count what the other arm's
            process allocates meanwhile as its own.
        repetitions: default number of repetitions.
    """

    config: Mapping[str, Any]
    prompt_tokens: int
    cases: Sequence[Lengths]
    kv_cache_bytes: int
    repetitions: int

    @property
    def longest(self) -> int:
        """The tokens of the longest sequence, prompt and completion."""
        return self.prompt_tokens + max(lengths.longest for lengths in self.cases)

    @property
    def max_num_seqs(self) -> int:
        """The largest number of sequences of all cases.

        One engine serves all cases, so that it is built once: its CUDA graphs fit the smaller batches as well.
        """
        return max(lengths.sequences for lengths in self.cases)


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """The settings of one contestant's trainer and engine.

    Attributes:
        model_dtype: dtype of the trainer's model, as transformers names it; "auto" for the folder's.
        engine_dtype: dtype that the engine computes in; None leaves it to TRL and to our engine.
        lora_rank: rank of an adapter on all linear layers; 0 trains the model itself.
        weights: our weight path.
        sleep: vLLM's sleep mode.
        eager: no CUDA graphs, for measurements that do not depend on them: the engine is built in half the time.
        checkpointing: gradient checkpointing, TRL's default.
        detokenize: TRL's default, in which vLLM turns each token into text. Ours never does.
        engine_args: further fields of `vllm.EngineArgs`, of TRL's engine and ours.
        hybrid: further fields of our trainer's `HybridConfig`.
    """

    model_dtype: str = "auto"
    engine_dtype: str | None = None
    lora_rank: int = 0
    weights: str = "auto"
    sleep: bool = False
    eager: bool = False
    checkpointing: bool = True
    detokenize: bool = True
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    hybrid: Mapping[str, Any] = field(default_factory=dict)

    @property
    def generation_kwargs(self) -> dict[str, Any]:
        """The value of TRL's argument `generation_kwargs`."""
        return {"ignore_eos": True} | ({} if self.detokenize else {"detokenize": False})
