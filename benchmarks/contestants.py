"""The contestants of the rollout benchmark: a trainer's generation over one model, TRL's own and ours."""

from __future__ import annotations

import random
import time
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from .building import GPU_SHARE, engine_options, load, prepare_process, stock_engine
from .harness import Timed, synchronise
from .lengths import Lengths, prescribe_hybrid, prescribe_stock
from .profile import Profile
from .scale import Scale, Variant

GROUP = 8  # completions per prompt: GRPO's default
GREEDY_SEQUENCES, GREEDY_TOKENS = 8, 16
PROFILED_TOKENS = 96


class Contestant(ABC):
    """A trainer's generation over the model in `folder`. Subclasses build `generation` and implement how it samples.

    Attributes:
        generation: the object that GRPO calls: `generate(prompts, images, num_generations, profiler)`.
    """

    generation: Any

    def __init__(self, folder: str, scale: Scale, variant: Variant | None = None) -> None:
        prepare_process(folder)
        self._scale, self._variant = scale, variant or Variant()
        self._lengths: list[int] | None = None  # of the next batch; None leaves them to the sampling
        self.build(*load(folder, self._variant), scale)

    @abstractmethod
    def build(self, model: Any, tokenizer: Any, scale: Scale) -> None:
        """Build the engine, with the model's weights in it."""

    @abstractmethod
    def set_sampling(self, max_tokens: int, top_k: int) -> None:
        """Set the sampling: `max_tokens` from the `top_k` most probable tokens, 0 for all."""

    def phase(self) -> AbstractContextManager[None]:
        """Return a context around one batch, for what the trainer does before and after generating; it is not timed."""
        return nullcontext()

    def repeat(self, lengths: Lengths, turn: int) -> Timed:
        """Time one repetition; its result is the length of each completion."""
        return self._timed(self._generate, lengths, turn, f"{lengths.name}-{turn}")

    def profiled(self, lengths: Lengths, file: str) -> None:
        """Record some tokens of as many rows with the profiler, which slows them down."""
        few = replace(lengths, longest=min(PROFILED_TOKENS, lengths.longest), median=None)
        profile = Profile(Path(file))
        profile.start()
        self.repeat(few, -1)
        profile.stop()

    def greedy(self) -> list[list[int]]:
        """Return completions that depend only on the model."""
        self.set_sampling(GREEDY_TOKENS, top_k=1)
        self._lengths = None
        with self.phase():
            return self._generate(self._prompts("greedy", GREEDY_SEQUENCES))

    def _timed(self, generate: Any, lengths: Lengths, turn: int, seed: str) -> Timed:
        # The seed makes the prompts new, so that no arm finds an earlier round's in its prefix cache.
        prompts = self._prompts(seed, lengths.sequences)
        self._lengths = wanted = lengths.draw(turn)
        self.set_sampling(lengths.longest, top_k=0)
        with self.phase():
            synchronise()
            started = time.perf_counter()
            completions = generate(prompts)
            synchronise()
            seconds = time.perf_counter() - started
        found = [len(completion) for completion in completions]
        if found != wanted:
            raise RuntimeError(f"Wanted completions of {wanted} tokens, got {found}.")
        return Timed(seconds, found)

    def _generate(self, prompts: list[list[int]]) -> list[list[int]]:
        """Generate as GRPOTrainer._generate_single_turn does; the log-probs are computed and thrown away."""
        _, completions, logprobs, _ = self.generation.generate(
            prompts=prompts, images=None, num_generations=GROUP, profiler=None
        )
        assert len(logprobs) == len(completions)
        return list(completions)

    def _prompts(self, seed: str, sequences: int) -> list[list[int]]:
        draw, vocabulary = random.Random(seed), range(self._scale.config["vocab_size"])
        unique = [draw.choices(vocabulary, k=self._scale.prompt_tokens) for _ in range(sequences // GROUP)]
        return [prompt for prompt in unique for _ in range(GROUP)]


class StockTRL(Contestant):
    """A contestant with TRL's VLLMGeneration, built with the arguments that GRPOTrainer passes."""

    def build(self, model: Any, tokenizer: Any, scale: Scale) -> None:
        """Build the engine, which loads the folder, and make the sync that GRPO makes before its first rollout."""
        import torch
        from accelerate import Accelerator
        from trl.generation import vllm_generation

        with stock_engine(scale, self._variant):
            self.generation = vllm_generation.VLLMGeneration(
                model=model,
                accelerator=Accelerator(cpu=not torch.cuda.is_available()),
                processing_class=tokenizer,
                mode="colocate",
                tensor_parallel_size=1,
                gpu_memory_utilization=GPU_SHARE,
                max_model_length=scale.longest,
                max_num_seqs=scale.max_num_seqs,
                enable_sleep_mode=self._variant.sleep,
                model_impl="vllm",
                temperature=1.0,
                logprobs=0,
                generation_kwargs=self._variant.generation_kwargs,
            )
        self.generation.sync_weights()
        prescribe_stock(self.generation.llm, lambda: self._lengths)

    def set_sampling(self, max_tokens: int, top_k: int) -> None:
        """Set the attributes that VLLMGeneration reads at each call."""
        self.generation.max_completion_length, self.generation.top_k = max_tokens, top_k


class Hybrid(Contestant):
    """A contestant with the object that a hybrid GRPOTrainer uses in place of VLLMGeneration."""

    def build(self, model: Any, tokenizer: Any, scale: Scale) -> None:
        """Build the trainer, and its engine by one empty rollout phase, which also syncs."""
        import torch
        from datasets import Dataset
        from trl import GRPOConfig
        from trlx_hybrid import GRPOTrainer, HybridConfig

        self._trainer = GRPOTrainer(
            model=model,
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=GRPOConfig(
                output_dir=str(Path(model.name_or_path) / "runs"),
                per_device_train_batch_size=GROUP,
                num_generations=GROUP,
                temperature=1.0,
                generation_kwargs=self._variant.generation_kwargs,
                vllm_gpu_memory_utilization=GPU_SHARE,
                vllm_max_model_length=scale.longest,
                vllm_enable_sleep_mode=self._variant.sleep,
                bf16=torch.cuda.is_available(),
                use_cpu=not torch.cuda.is_available(),
                report_to=[],
            ),
            train_dataset=Dataset.from_dict({"prompt": ["never used"] * GROUP}),
            processing_class=tokenizer,
            hybrid=HybridConfig(
                engine="vllm",
                engine_options=engine_options(scale, self._variant),
                weights=self._variant.weights,
                verify_every=0,  # only the first sync is proved in full, never a timed one
                **self._variant.hybrid,
            ),
        )
        self.generation = self._trainer.vllm_generation
        prescribe_hybrid(self._trainer.session.sampler, lambda: self._lengths)
        with self.phase():
            pass

    def phase(self) -> AbstractContextManager[None]:
        """Return the rollout phase of training, which wakes, syncs and sleeps.

        There is nothing to do for an engine that stays awake with fresh weights.
        """
        return self._trainer.session.rollout_phase(True)  # type: ignore[no-any-return]

    def set_sampling(self, max_tokens: int, top_k: int) -> None:
        """Replace the sampling of the session, which a run never changes."""
        sampler = self._trainer.session.sampler
        sampler.sampling = replace(sampler.sampling, max_tokens=max_tokens, top_k=top_k)

    def repeat_seedless(self, lengths: Lengths, turn: int) -> Timed:
        """Time a repetition as `repeat` does, with the same engine and parameters but no seed on any request."""
        other_prompts = f"{lengths.name}-{-1 - turn}"  # the engine's prefix cache already has the prompts of `turn`
        return self._timed(self._generate_seedless, lengths, turn, other_prompts)

    def repeat_single(self, lengths: Lengths, turn: int) -> Timed:
        """Time a repetition as `repeat` does, with the same engine, but one decode step in each step of the engine."""
        graphs = self._trainer.session.live_engine._graphs
        if graphs is None:
            raise RuntimeError("The engine decodes without CUDA graphs of its own, one token in each step anyway.")
        with patch.object(graphs.multi_step, "most", 1):
            return self._timed(self._generate, lengths, turn, f"{lengths.name}-single-{turn}")

    def _generate_seedless(self, prompts: list[list[int]]) -> list[list[int]]:
        from trlx_hybrid.contract.types import Request

        session = self._trainer.session
        requests = [
            Request(prompt_ids=prompt, seed=None, max_tokens=tokens)  # type: ignore[arg-type]
            for prompt, tokens in zip(prompts, self._lengths or (), strict=True)
        ]
        return [c.token_ids for c in session.live_engine.generate(requests, session.sampler.sampling)]
