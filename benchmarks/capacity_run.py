"""One trainer with a model and an engine, run as a child of `benchmarks.capacity`; it prints its memory as JSON.

    python -m benchmarks.capacity_run '{"kind": "trl", "size": "7b", "share": 0.35, "steps": 0, "folder": "/tmp/x"}'

`kind` is "trl" or "hybrid"; `share` is TRL's share of the GPU, or for "hybrid" the peak in bytes that it must not
exceed, and null leaves the choice to the trainer; `steps` are optimizer steps, 0 makes one rollout; `folder` is for the
files that TRL's engine reads; `eager` builds our engine without CUDA graphs; `rows` are the fields of
`benchmarks.capacity.Rows`; `memory` lets only so many bytes of the GPU be used. Progress goes to standard error.
"""

from __future__ import annotations

import json
import os
import struct
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from .building import prepare_process, stock_engine
from .capacity import LORA_RANK, SHAPES, Rows
from .child import answer, progress
from .lengths import Lengths
from .scale import Scale, Variant

GIB = 1 << 30
SAMPLED_TOKENS = 16  # of a rollout that only fills the caches
INTERVAL = 0.005  # seconds between two readings of the GPU's memory


class Watch:
    """A clock, with the peak of the GPU's memory that all processes used.

    Attributes:
        peak: bytes; measured when a stage is reached, and continuously once the engine is built.
        stages: what was reached, after how many seconds, and the peak since the stage before.
    """

    def __init__(self) -> None:
        self.peak = 0
        self.stages: list[str] = []
        self._started = time.perf_counter()
        self._recent = 0
        self._blocked: Any = None

    def block(self, memory: int) -> None:
        """Take all but `memory` bytes of the GPU, and count them nowhere: the run has a smaller GPU."""
        import torch

        free, total = torch.cuda.mem_get_info()
        memory -= total - free  # what CUDA itself has taken
        self._blocked = torch.empty(free - memory, dtype=torch.uint8, device="cuda") if free > memory else None

    def keep_looking(self) -> None:
        """Measure continuously from now on.

        Not before the engine is built: a call from another thread may spoil the capture of a CUDA graph.
        """
        threading.Thread(target=self._keep_looking, daemon=True).start()

    def _keep_looking(self) -> None:
        while True:
            self._look()
            time.sleep(INTERVAL)

    def _look(self) -> None:
        import torch

        if torch.cuda.is_available():
            free, total = torch.cuda.mem_get_info()
            blocked = 0 if self._blocked is None else self._blocked.nbytes
            self._recent = max(self._recent, total - free - blocked)
            self.peak = max(self.peak, self._recent)

    def reached(self, stage: str) -> None:
        """Record a stage, and print it where the parent reads it."""
        self._look()
        recent, self._recent = self._recent, 0
        self.stages.append(f"{time.perf_counter() - self._started:.1f} s: {stage}, at most {recent / GIB:.2f} GiB")
        progress(self.stages[-1])


def random_model(size: str, context: int) -> Any:
    """Return a model with random weights, drawn on the device: in bf16 on a GPU, in fp32 on a CPU.

    Args:
        context: the tokens of its longest row.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    shape = {"model_type": "qwen2", "max_position_embeddings": max(8192, context), **SHAPES[size]}
    config = AutoConfig.for_model(**shape, eos_token_id=0, pad_token_id=0)
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def write_zeros(file: Path, tensors: Mapping[str, Any]) -> None:
    """Write a safetensors file of zeros that takes no room on the disk, whatever its length.

    TRL's engine must load a checkpoint. TRL discards what was loaded (`sleep(level=2)`) and syncs before it samples, so
    neither its content nor the minutes of writing it belong to what is measured.
    """
    import torch

    names = {torch.bfloat16: "BF16", torch.float32: "F32"}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": names[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as opened:
        opened.write(struct.pack("<Q", len(text)) + text)
        opened.truncate(8 + len(text) + end)


def write_folder(folder: Path, model: Any, words: Any) -> None:
    """Write the folder that TRL's engine loads, and set its path in the model."""
    folder.mkdir(exist_ok=True)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    words.save_pretrained(folder)
    write_zeros(folder / "model.safetensors", model.state_dict())
    model.config._name_or_path = model.name_or_path = str(folder)


def engine_share(model: Any, peak: float) -> float:
    """Return the share of the GPU for an engine that shares the policy's weights: the peak minus what else is held."""
    import torch

    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    layers = [m for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not model.get_output_embeddings()]
    adapter = sum(4 * LORA_RANK * (layer.in_features + layer.out_features) for layer in layers)
    return float((peak - (total - free - weights) - adapter) / total)


def trl_engine(size: str) -> AbstractContextManager[Any]:
    """Return a context for TRL's engine: none on a GPU, where TRL builds it as usual; `stock_engine` on a CPU."""
    import torch

    if torch.cuda.is_available():
        return nullcontext()
    scale = Scale(
        config=SHAPES[size],
        prompt_tokens=1,
        cases=(Lengths(sequences=1, longest=1),),
        kv_cache_bytes=64 << 20,
        repetitions=1,
    )
    return stock_engine(scale, Variant())


def build(
    kind: str, size: str, rows: Rows, share: float | None, steps: int, folder: str, eager: bool, watch: Watch
) -> Any:
    """Build the trainer; TRL's has its engine already."""
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from trl import GRPOConfig, GRPOTrainer
    from trlx_hybrid import GRPOTrainer as HybridTrainer
    from trlx_hybrid import HybridConfig

    from .rollout import tokenizer

    cuda = torch.cuda.is_available()
    watch.reached("imported")
    words = tokenizer(SHAPES[size]["vocab_size"])
    model = random_model(size, rows.context)
    watch.reached("model built")
    arguments: dict[str, Any] = {
        "output_dir": str(Path(folder) / "runs"),
        "per_device_train_batch_size": rows.at_once,
        "gradient_accumulation_steps": rows.number // rows.at_once,
        "num_generations": rows.number,
        "max_completion_length": rows.sampled if steps else SAMPLED_TOKENS,
        "generation_kwargs": {"ignore_eos": True},
        "max_steps": max(1, steps),
        "logging_steps": 1,
        "learning_rate": 1e-4,
        "bf16": cuda,
        "use_cpu": not cuda,
        "gradient_checkpointing": True,
        "report_to": [],
        "save_strategy": "no",
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_enable_sleep_mode": True,
        "vllm_max_model_length": rows.context,
    }
    extra: dict[str, Any] = {}
    if kind == "hybrid":
        options: dict[str, Any] = {"enforce_eager": eager} | ({"max_num_seqs": rows.number} if rows.long else {})
        if share is not None and cuda:
            options["gpu_memory_utilization"] = engine_share(model, share)
        extra["hybrid"] = HybridConfig(engine="vllm", engine_options=options)
    else:
        write_folder(Path(folder) / size, model, words)
        watch.reached("folder written")
        arguments["vllm_gpu_memory_utilization"] = share

    def reward(completions: list[Any], **_: Any) -> list[float]:
        watch.reached("sampled")
        return [float(index) for index, _ in enumerate(completions)]

    prompt = " ".join(f"{index + 1:x}" for index in range(rows.context - rows.sampled))
    trainer_class = HybridTrainer if kind == "hybrid" else GRPOTrainer
    with trl_engine(size) if kind == "trl" else nullcontext():
        trainer = trainer_class(
            model=model,
            reward_funcs=reward,
            args=GRPOConfig(**arguments),
            train_dataset=Dataset.from_dict({"prompt": [prompt] * 64}),
            processing_class=words,
            peft_config=LoraConfig(r=LORA_RANK, lora_alpha=2 * LORA_RANK, target_modules="all-linear"),
            **extra,
        )
    watch.reached("trainer built")
    return trainer


def train(trainer: Any, watch: Watch) -> None:
    """Train all steps. Its callback is called after the hybrid trainer's own callback, which builds the engine."""
    from transformers import TrainerCallback

    class Saying(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            watch.reached("training begins")
            watch.keep_looking()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            watch.reached(f"step {state.global_step} done")

    trainer.add_callback(Saying())
    trainer.train()


def roll_out(trainer: Any, kind: str, rows: Rows, watch: Watch) -> None:
    """Make one rollout, with fresh weights."""
    prompts = [[5, 6, 7]] * rows.number
    if kind == "hybrid":
        trainer.session.open()
        watch.reached("engine built")
    watch.keep_looking()
    if kind == "hybrid":
        with trainer.session.rollout_phase(True):
            trainer.session.generate(prompts, num_generations=rows.number)
    else:
        trainer.vllm_generation.sync_weights()
        trainer.vllm_generation.generate(prompts, None, rows.number)
    watch.reached("rolled out")


def run(
    kind: str,
    size: str,
    share: float | None,
    steps: int,
    folder: str,
    eager: bool = False,
    rows: Mapping[str, int] | None = None,
    memory: int | None = None,
) -> dict[str, Any]:
    """Build the trainer, then roll out once or train; return its cache, memory peak and times."""
    watch, lengths = Watch(), Rows(**rows) if rows else Rows.of(size)
    prepare_process(folder)
    if memory is not None:
        watch.block(memory)
    trainer = build(kind, size, lengths, share, steps, folder, eager, watch)
    if steps:
        train(trainer, watch)
    else:
        roll_out(trainer, kind, lengths, watch)
    llm = trainer.session.live_engine.llm if kind == "hybrid" else trainer.vllm_generation.llm
    cache = llm.llm_engine.vllm_config.cache_config
    return {
        "kind": kind,
        "size": size,
        "share": share,
        "eager": eager,
        "kv_tokens": cache.num_gpu_blocks * cache.block_size,
        "peak_bytes": watch.peak,
        "parameters": sum(p.numel() for p in trainer.model.parameters()),
        "stages": watch.stages,
        "step_seconds": logged(trainer, "step_time"),
        "loss_seconds": logged(trainer, "hybrid/step/loss_seconds"),
        "rollout_seconds": logged(trainer, "hybrid/step/rollout_seconds"),
    }


def logged(trainer: Any, name: str) -> list[float]:
    """Return a metric's value of each step; of TRL's trainer, some are not there."""
    return [log[name] for log in trainer.state.log_history if name in log]


def main(arguments: str) -> int:
    """Print the answer, and return the exit status."""
    try:
        answer(run(**json.loads(arguments)))
    except Exception:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    os._exit(main(sys.argv[1]))  # at once: an engine's destructors are not measured, and may hang
