"""The contestants of the step benchmark: GRPO trainers that pause until a step is requested."""

from __future__ import annotations

import math
import os
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

from transformers import PrinterCallback, TrainerCallback

from .building import GPU_SHARE, adapter, engine_options, load, prepare_process, stock_engine
from .contestants import GROUP
from .harness import Timed, synchronise
from .lengths import batches, prescribe_hybrid, prescribe_stock
from .profile import Profile
from .scale import Scale, Variant

PROFILED = ("_prepare_inputs", "sync_weights", "vLLM.generate", "compute_loss")
"""TRL's profiled spans that are recorded: rollout with scoring, sync, generation, and the loss's forward pass."""


class Stepper:
    """A trainer whose `train()` runs in a thread and waits before each step. A step lasts until the next one begins.

    Args:
        kind: "trl"; "hybrid", ours with the engine options of all arms; or "import", ours without a setting.
        folder: folder of the model.
        scale: the model and its lengths.
        variant: settings of trainer and engine.
        batch: rows of one forward pass.
        steps: number of steps of the training run.
    """

    def __init__(self, kind: str, folder: str, scale: Scale, variant: Variant, batch: int, steps: int) -> None:
        prepare_process(folder)
        self._scale, self._variant = scale, variant
        self.spans: defaultdict[str, float] = defaultdict(float)
        self._go: queue.Queue[None] = queue.Queue()
        self._done: queue.Queue[Timed | BaseException] = queue.Queue()
        self._lengths: list[int] = []
        self._profile: Profile | None = None
        self._bytes_in_use = 0
        self._note_spans()
        model, tokenizer = load(folder, Variant(model_dtype=variant.model_dtype))  # TRL adds the adapter
        arguments = {
            "model": model,
            "reward_funcs": self._reward,
            "args": arguments_of(Path(folder) / f"runs-{os.getpid()}", scale, variant, batch, steps),
            "train_dataset": prompts_of(scale, steps),
            "processing_class": tokenizer,
            "peft_config": adapter(variant) if variant.lora_rank else None,
            "callbacks": [_Pausing(self)],
        }
        self._trainer = TRAINERS[kind](scale, variant, arguments)
        self._trainer.remove_callback(PrinterCallback)  # 26 lines of numbers that the result does not need
        self._prescribe()
        self._note_rollouts()
        self._note_forwards()
        self._thread = threading.Thread(target=self._train, daemon=True)
        self._thread.start()
        self._answer()  # the engine is built, and the first step waits

    def _train(self) -> None:
        try:
            self._trainer.train()
        except BaseException as error:
            self._done.put(error)
            raise

    def _answer(self) -> Timed:
        answer = self._done.get()
        if isinstance(answer, BaseException):
            raise RuntimeError(f"Training failed: {answer!r}") from answer
        return answer

    def step(self, turn: int) -> Timed:
        """Take one optimizer step; its result is the length of each completion, the same in all contestants."""
        self.spans.clear()
        self._lengths = []
        retries = _allocator_retries()
        self._go.put(None)
        timed = self._answer()
        self.spans["training"] = timed.seconds - self.spans["rollout"]
        self.spans["allocator_retries"] = _allocator_retries() - retries
        return timed

    def profiled(self, turn: int, file: str) -> None:
        """Take a step whose training half is profiled, which slows it down."""
        self._profile = Profile(Path(file))
        self.step(turn)

    def split(self) -> dict[str, float]:
        """Return the parts of the last step.

        Returns:
            Seconds: `rollout`, TRL's `_generate` with all in it; `training`, the rest; TRL's profiled spans within, and
            of ours `bring_up` and `put_down`, the beginning and end of a rollout, in which memory and weights are
            handed over.
            Tokens: `tokens_real`, of prompts and completions; `tokens_in_loss`, the model's input where gradients were
            wanted, padding included; `tokens_without_gradients`, its input otherwise.
            `passes_in_loss`: forward passes with gradients; `layers_recomputed`: layers that ours recomputed in the
            last of these, if it decides that. `allocator_retries`: how often torch freed all cached memory because none
            was left. `training_flops_per_second`: FLOPs that training on the real tokens needs, divided by the seconds
            it took; `training_mfu`: their share of the device's peak, where the peak is known. `device_bytes_in_use`:
            bytes that all processes used on the device after the step.
        """
        from trlx_hybrid.policy.policy import Policy
        from trlx_hybrid.trl.metrics.flops import model_flops, peak

        found = dict(self.spans)
        rows = [self._scale.prompt_tokens + tokens for tokens in self._lengths]
        model = self._trainer.model
        policy = Policy(lambda: model, None, model.device)
        flops, best = model_flops(policy), peak(policy, self._trainer.args)
        assert flops is not None  # of a Qwen2
        needed = flops.of(sum(rows), sum(self._lengths), sum(tokens * (tokens + 1) // 2 for tokens in rows))
        found["training_flops_per_second"] = needed / found["training"]
        if best is not None:
            found["training_mfu"] = found["training_flops_per_second"] / best
        found["tokens_real"] = sum(rows)
        session = getattr(self._trainer, "session", None)
        if session is not None:
            found["sync_weights"] = session.metrics.get("hybrid/sync_seconds", 0.0)
            recomputation = getattr(session.scoring, "recomputation", None)
            if recomputation is not None and recomputation.recomputed is not None:
                found["layers_recomputed"] = recomputation.recomputed
        if self._bytes_in_use:
            found["device_bytes_in_use"] = self._bytes_in_use
        return found

    def engine_weights(self) -> str:
        """Return the name of the weight path."""
        session = getattr(self._trainer, "session", None)
        return session.weights.name if session is not None else "trl"

    def at_begin(self, started: float | None) -> float:
        """Report the step that began at `started`, wait until the next one is requested, and return its begin."""
        synchronise()
        if self._profile is not None:
            self._profile.stop()
            self._profile = None
        seconds = time.perf_counter() - started if started is not None else 0.0
        self._bytes_in_use = _device_bytes_in_use()
        self._done.put(Timed(seconds, list(self._lengths)))
        self._go.get()
        self.prepare()
        synchronise()
        return time.perf_counter()

    def prepare(self) -> None:
        """Prepare a step before its time starts, in the trainer's thread; a hook for subclasses."""

    def _reward(self, completion_ids: list[list[int]], **_: Any) -> list[float]:
        """Return rewards that differ within a group and cost nothing, and record the lengths."""
        self._lengths += [len(ids) for ids in completion_ids]
        return [sum(ids) % 7 / 7 for ids in completion_ids]

    def _prescribe(self) -> None:
        """Give each row its own length where lengths are drawn, for which TRL has no setting."""
        (lengths,) = self._scale.cases
        if lengths.median is None:
            return
        session = getattr(self._trainer, "session", None)
        if session is None:
            prescribe_stock(self._trainer.vllm_generation.llm, batches(lengths))
        else:
            prescribe_hybrid(session.sampler, batches(lengths))

    def _note_rollouts(self) -> None:
        self._trainer._generate = self._timed(self._trainer._generate, "rollout", self._rolled_out)
        session = getattr(self._trainer, "session", None)
        if session is not None:
            session._bring_up = self._timed(session._bring_up, "bring_up")
            session._put_down = self._timed(session._put_down, "put_down")

    def _timed(self, function: Any, name: str, after: Callable[[], None] = lambda: None) -> Any:
        """Return the function, with its seconds until the device is idle added up as a span."""

        def timed(*arguments: Any) -> Any:
            synchronise()
            started = time.perf_counter()
            result = function(*arguments)
            synchronise()
            self.spans[name] += time.perf_counter() - started
            after()
            return result

        return timed

    def _rolled_out(self) -> None:
        if self._profile is not None:
            self._profile.start()

    def _note_forwards(self) -> None:
        """Count the tokens of every forward pass, which embeds them once; recomputation begins after the embeddings."""
        import torch

        def note(module: Any, given: tuple[Any, ...]) -> None:
            wanted = torch.is_grad_enabled()
            self.spans["tokens_in_loss" if wanted else "tokens_without_gradients"] += given[0].numel()
            self.spans["passes_in_loss"] += wanted

        self._trainer.model.get_input_embeddings().register_forward_pre_hook(note)

    def _note_spans(self) -> None:
        """Record the spans that TRL times and reports only to trackers, in both contestants."""
        from trl.extras.profiling import ProfilingContext

        def note(context: Any, seconds: float) -> None:
            name = context.name.partition(".")[2]
            if name in PROFILED:
                self.spans[name] += seconds

        patch.object(ProfilingContext, "_log_metrics", note).start()


def _allocator_retries() -> int:
    import torch

    return torch.cuda.memory_stats().get("num_alloc_retries", 0) if torch.cuda.is_available() else 0


def _device_bytes_in_use() -> int:
    import torch

    if not torch.cuda.is_available():
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free


class _Pausing(TrainerCallback):  # type: ignore[misc]
    def __init__(self, stepper: Stepper) -> None:
        self._stepper = stepper
        self._started: float | None = None

    def on_log(self, args: Any, state: Any, control: Any, logs: Any, **kwargs: Any) -> None:
        """Raise FloatingPointError where the gradient's norm is not finite: such a step is not worth measuring."""
        if not math.isfinite(logs.get("grad_norm", 0.0)):
            raise FloatingPointError(f"The gradient's norm of step {state.global_step} is {logs['grad_norm']}.")

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self._started = self._stepper.at_begin(self._started)


def _stock(scale: Scale, variant: Variant, arguments: dict[str, Any]) -> Any:
    import trl

    with stock_engine(scale, variant):
        return trl.GRPOTrainer(**arguments)


def _hybrid(scale: Scale, variant: Variant, arguments: dict[str, Any]) -> Any:
    from trlx_hybrid import GRPOTrainer, HybridConfig

    fields = {"weights": variant.weights, **variant.hybrid}
    config = HybridConfig(engine="vllm", engine_options=engine_options(scale, variant), **fields)
    return GRPOTrainer(**arguments, hybrid=config)


def _import(scale: Scale, variant: Variant, arguments: dict[str, Any]) -> Any:
    from trlx_hybrid import GRPOTrainer

    return GRPOTrainer(**arguments)


TRAINERS = {"trl": _stock, "hybrid": _hybrid, "import": _import}


def arguments_of(output: Path, scale: Scale, variant: Variant, batch: int, steps: int) -> Any:
    """Return the training arguments; those not named are TRL's defaults."""
    import torch
    from trl import GRPOConfig

    cuda = torch.cuda.is_available()
    (lengths,) = scale.cases
    return GRPOConfig(
        output_dir=str(output),
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=lengths.sequences // batch,
        gradient_checkpointing=variant.checkpointing,
        num_generations=GROUP,
        max_completion_length=lengths.longest,
        generation_kwargs=variant.generation_kwargs,
        max_steps=steps,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        bf16=cuda,
        use_cpu=not cuda,
        use_vllm=True,
        vllm_mode="colocate",
        vllm_enable_sleep_mode=variant.sleep,
        vllm_gpu_memory_utilization=GPU_SHARE,
        vllm_max_model_length=scale.longest,
    )


def prompts_of(scale: Scale, steps: int) -> Any:
    """Return enough different prompts, of `prompt_tokens` words that are a token each."""
    import random

    from datasets import Dataset

    draw, (lengths,) = random.Random(0), scale.cases
    words = range(1, scale.config["vocab_size"])
    count = lengths.sequences // GROUP * (steps + 1)
    return Dataset.from_dict(
        {"prompt": [" ".join(f"{w:x}" for w in draw.choices(words, k=scale.prompt_tokens)) for _ in range(count)]}
    )
