"""What is measured: a model of random weights and how much it generates, and what differs between contestants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .lengths import Lengths


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """The same for all contestants of a benchmark.

    Attributes:
        config: of a Qwen2 model.
        prompt_tokens: length of each prompt.
        cases: how many completions, and how long.
        kv_cache_bytes: of each engine; given rather than profiled, because vLLM's profiler would take what the other
            arm's process allocates meanwhile for its own.
        repetitions: unless told otherwise.
    """

    config: Mapping[str, Any]
    prompt_tokens: int
    cases: Sequence[Lengths]
    kv_cache_bytes: int
    repetitions: int

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence, prompt and completion."""
        return self.prompt_tokens + max(lengths.longest for lengths in self.cases)

    @property
    def max_num_seqs(self) -> int:
        """One engine serves all cases, so that it is built once: CUDA graphs fit the smaller batches as well."""
        return max(lengths.sequences for lengths in self.cases)


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """How one contestant's trainer and engine are set up.

    Attributes:
        model_dtype: of the trainer's model, as transformers names it; "auto" as in the folder.
        engine_dtype: what the engine computes in; None leaves it to TRL and to our engine.
        lora_rank: of an adapter on all linear layers; 0 trains the model itself.
        weights: our weight path.
        sleep: vLLM's sleep mode.
        eager: no CUDA graphs, for what does not depend on them: the engine is built in half the time.
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
        """TRL's argument of that name."""
        return {"ignore_eos": True} | ({} if self.detokenize else {"detokenize": False})
