"""The combinations of settings that a user switches on together, and the flags that say so."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

STEPS = 7
BASE = {
    "max_steps": STEPS,
    "eval_strategy": "steps",
    "eval_steps": 3,
    "save_strategy": "steps",
    "save_steps": 3,
    "logging_steps": 1,
    "per_device_train_batch_size": 8,
    "per_device_eval_batch_size": 8,
    "num_generations": 4,
    "max_completion_length": 48,
    "vllm_max_model_length": 128,
    "learning_rate": 1e-4,
    "report_to": "none",
    "disable_tqdm": True,
    "use_vllm": True,
    "vllm_mode": "colocate",
    "vllm_gpu_memory_utilization": 0.3,
    "verify_every": 1,
    "attn_implementation": "eager",  # its backward repeats bit for bit
}
ONE_STEP = {"max_steps": 1, "eval_strategy": "no", "save_strategy": "no"}
FIXED = {"ignore_eos": True}
PACKED = {
    "scoring": "packed",
    "scoring_options": json.dumps({"adaptive_checkpointing": True, "joined": True}),
    "gradient_accumulation_steps": 2,
    "attn_implementation": "sdpa",  # rows cannot be packed for "eager"
    "plugin_options": json.dumps({"training": {"lora_layers": True}}),
    "lora_dropout": 0.0,  # TRL's is 0.05, with which old log-probs take a pass of their own
}
AUTO = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
SHOWN = {"rollout": "multi_turn", "max_completion_length": 200, "vllm_max_model_length": 512}
IN_4_BITS = {"load_in_4bit": True, "use_bnb_nested_quant": True}
COMBINED = {"combo_kernels": True, "benchmark_combo_kernel": False}  # as vLLM does, without measuring
IN_FLIGHT = {"rollout_options": json.dumps({"max_staleness": 2})}
RAGGED = {"stop_token_ids": list(range(10, 16))}  # of 98 tokens: lengths are geometric, cut at the limit


def zero(stage: int) -> dict[str, object]:
    """The flag that has DeepSpeed shard the optimizer (stage 2), or the weights as well (3)."""
    config = {"zero_optimization": {"stage": stage}, "bf16": {"enabled": "auto"}} | dict.fromkeys(AUTO, "auto")
    return {"deepspeed": json.dumps(config)}


@dataclass(frozen=True)
class Case:
    """One combination.

    Attributes:
        weights: "bf16" trains in the engine's dtype, "fp32" a master beside it, "lora" an adapter on a bf16 base, and
            "merged" the same, merged into the engine's weights.
        tp, pp: ranks per engine that share each layer, and stages of layers.
        sharding: "one" process, "ddp" or "fsdp2" over two.
    """

    weights: str
    sleep: bool
    graphs: bool
    ragged: bool = False
    offload: str = "auto"
    tp: int = 1
    sharding: str = "one"
    pp: int = 1

    @property
    def name(self) -> str:
        """As pytest and docs/tested.md show it."""
        stages = [f"pp{self.pp}"] if self.pp > 1 else []
        words = [self.sharding, f"tp{self.tp}", *stages, self.weights]
        words += ["sleep" if self.sleep else "awake", "graphs" if self.graphs else "eager"]
        return "-".join([*words, "ragged" if self.ragged else "fixed", f"offload_{self.offload}"])

    @property
    def path(self) -> str:
        """The weight sync that serves it."""
        if self.weights in ("lora", "merged"):
            return self.weights
        if self.tp * self.pp > 1 or self.sharding == "fsdp2":
            return "reshard"
        return "alias" if self.weights == "bf16" else "copy"

    @property
    def repeats(self) -> bool:
        """Whether a run with gathered weights logs the same, bit for bit."""
        return self.weights != "lora"  # merged and unmerged adapters round differently

    def environment(self, folder: Path) -> dict[str, str]:
        """What keeps two runs from computing with different kernels. Those that are compiled for CUDA graphs are tried
        out by the clock, among them norms that sum in another order, and kept for all that start later."""
        if not self.graphs:
            return {}
        alike = {"TORCHINDUCTOR_DETERMINISTIC": "1", "VLLM_TRITON_FORCE_FIRST_CONFIG": "1"}
        return alike | {"VLLM_CACHE_ROOT": str(folder / "vllm")}

    def settings(self) -> dict[str, object]:
        """Of TRL's and our configs."""
        engine: dict[str, object] = {"enforce_eager": not self.graphs, "pipeline_parallel_size": self.pp}
        if self.graphs:
            engine["engine_args"] = {"compilation_config": {"inductor_compile_config": COMBINED}}
        chosen: dict[str, object] = {
            "dtype": "float32" if self.weights == "fp32" else "bfloat16",
            "bf16": True,
            "vllm_enable_sleep_mode": self.sleep,
            "vllm_tensor_parallel_size": self.tp,
            "offload": self.offload,
            "generation_kwargs": json.dumps(RAGGED if self.ragged else FIXED),
            "engine_options": json.dumps(engine),
        }
        if self.weights in ("lora", "merged"):
            chosen |= {"use_peft": True, "lora_r": 16, "lora_target_modules": "all-linear"}
        if self.weights == "merged":
            chosen |= {"weights": "merged"}
        return BASE | chosen


def flags(settings: dict[str, object], model: Path, out: Path) -> list[str]:
    """As on a command line."""
    words = ["--model_name_or_path", str(model), "--output_dir", str(out)]
    for key, value in settings.items():
        words += [f"--{key}", *map(str, value if isinstance(value, list) else [value])]
    return words
