"""Rollouts of one trainer in three ways over the same engine: TRL's loop, the same with concurrent tools, and ours."""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trlx_hybrid.contract.conversation import Conversation, Dialogue, Limits, RequestMaker
from trlx_hybrid.contract.protocols import Rollout, Run
from trlx_hybrid.contract.types import Completion, Request, Sampling

from .building import engine_options, load, prepare_process
from .harness import Timed
from .multiturn_clock import StepClock
from .multiturn_talk import Arguments, Turns, Waiting, compute, prompt, talker
from .replay import Trace
from .scale import Scale, Variant

ROLLOUTS = ("single_turn", "multi_turn", "multi_turn_processes")


class Traced(Rollout):
    """A rollout whose requests sample as many tokens as the trace says, and which keeps its conversations."""

    name = "traced"

    def __init__(self, inner: Rollout, trace: Trace) -> None:
        self._inner, self._trace, self.converses = inner, trace, inner.converses
        self.conversations: list[Conversation] = []

    def run(self, session: Run, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """Sample a turn of all conversations, for TRL's loop."""
        return self._inner.run(session, [self._measured(request) for request in requests], sampling)

    def converse(
        self, session: Run, dialogues: Sequence[Dialogue], limits: Limits, request: RequestMaker
    ) -> list[Conversation]:
        """Run the conversations with our rollout."""

        def measured(
            index: int, turn: int, prompt_ids: list[int], images: list[Any] | None, max_tokens: int | None
        ) -> Request:
            return self._measured(request(index, turn, prompt_ids, images, max_tokens))

        self.conversations = self._inner.converse(session, dialogues, limits, measured)
        return self.conversations

    def _measured(self, request: Request) -> Request:
        return dataclasses.replace(request, max_tokens=self._trace.tokens[request.row][request.turn])


class Rollouts:
    """A trainer whose `_generate` is called again and again, each time with the first seeds and an empty prefix cache.

    Args:
        folder: holds the model.
        scale: the model's scale.
        trajectories: number of trajectories at most.
        tokens: tokens of the longest conversation after the prompt.
        observed: tokens of a tool's answer.
    """

    def __init__(self, folder: str, scale: Scale, *, trajectories: int, tokens: int, observed: int) -> None:
        prepare_process(folder)
        from datasets import Dataset
        from trl import GRPOConfig
        from trlx_hybrid import GRPOTrainer, HybridConfig

        self._scale, self._words, self._observed = scale, scale.prompt_tokens - 4, observed
        self.waiting = Waiting(" ".join(f"{word:x}" for word in range(1, observed - 2)))
        self._talker = talker(scale.config["vocab_size"])
        model, _ = load(folder, Variant())
        self._trainer: Any = GRPOTrainer(
            model=model,
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=GRPOConfig(
                output_dir=str(Path(folder) / "runs"),
                per_device_train_batch_size=8,
                max_completion_length=tokens,
                vllm_max_model_length=scale.prompt_tokens + tokens + 1,
                generation_kwargs={"ignore_eos": True},
                bf16=False,
                use_cpu=True,
                report_to=[],
                disable_tqdm=True,
            ),
            train_dataset=Dataset.from_dict({"prompt": [prompt(1, [])] * 8}),
            processing_class=self._talker,
            tools=[self.waiting.wait, compute],
            hybrid=HybridConfig(
                engine="vllm",
                engine_options=engine_options(scale, Variant())
                # vLLM's CPU runner cannot take a seeded prompt in parts: a step must hold all first prompts.
                | {"max_num_seqs": trajectories, "max_num_batched_tokens": 64 * trajectories + scale.prompt_tokens},
                rollout="multi_turn",
                verify_every=0,
            ),
        )
        with self.session.rollout_phase(True):
            self._rollouts = self._made()
            self._engine: Any = self.session.live_engine

    def _made(self) -> dict[str, Rollout]:
        from trlx_hybrid.plugins.builtin import SingleTurn
        from trlx_hybrid_multiturn.multi_turn import MultiTurn
        from trlx_hybrid_multiturn.options import MultiTurnOptions

        made = SingleTurn(), *(MultiTurn(self.session, MultiTurnOptions(tools=m)) for m in ("thread", "process"))
        return dict(zip(ROLLOUTS, made, strict=True))

    @property
    def session(self) -> Any:
        """The trainer's session."""
        session: Any = self._trainer.session
        return session

    @property
    def block_size(self) -> int:
        """The tokens of a block of the engine's cache."""
        return int(self._engine.llm.llm_engine.vllm_config.cache_config.block_size)

    def close(self) -> None:
        """Close the rollouts and the session, which frees the engine."""
        for rollout in self._rollouts.values():
            rollout.close()
        self.session.close()

    # --- one rollout ------------------------------------------------------------------------------------------------

    def repeat(self, trace: Trace, rollout: str, clock: StepClock, *, early: bool = False, loops: int = 0) -> Timed:
        """Run all trajectories of a trace; the result is every token of each.

        Args:
            trace: the trace.
            rollout: one of ROLLOUTS.
            clock: times the engine's steps.
            early: call the tools of a turn at once, see `Waiting.call`.
            loops: if not 0, call the tool that computes instead, with this many loops for each of the trace's seconds.
        """
        trainer, session, turns = self._trainer, self.session, Turns()

        def call(word: int) -> tuple[str, Arguments]:
            row = word - 1
            turn = turns.next(row)
            seconds = trace.latencies[row][turn] if turn < len(trace.latencies[row]) else 0.0
            if loops:
                return "compute", {"loops": int(loops * seconds)}
            if early and turn < len(trace.latencies[row]):
                self.waiting.call(row, turn, seconds)
            return "wait", {"row": row, "turn": turn, "seconds": seconds}

        self._talker.call = call
        trainer.max_tool_calling_iterations = len(trace.latencies[0])
        tools = {"compute": compute} if loops else {"wait": self.waiting.wait}
        trainer._sync_tool_dicts = [tools] * len(trace.tokens)
        trainer._async_tool_dicts = [{}] * len(trace.tokens)
        traced = session.rollout = Traced(self._rollouts[rollout], trace)
        self._as_new()
        prompts = [prompt(row + 1, words) for row, words in enumerate(self._draw(len(trace.tokens)))]
        with clock.listening(self._engine):
            started = time.perf_counter()
            generated = trainer._generate(prompts)
            seconds = time.perf_counter() - started
        self.conversations = traced.conversations
        return Timed(seconds, [list(ids) for ids in generated[1]])

    def tool_free(self, waves: Sequence[int], trace: Trace, clock: StepClock, seed: int) -> Timed:
        """Run the trace without its tools, to measure what an engine step costs.

        Every turn follows immediately on the one before, with as many observed tokens in between, so that requests come
        and go, prompts grow, and the prefix cache serves them as in the conversations themselves.

        Args:
            waves: how many of the trace's trajectories run at once, one wave after another.
            trace: the trace.
            clock: times the engine's steps.
            seed: seed of the prompts and observed tokens.
        """
        self._as_new()
        draw = random.Random(seed)
        with self.session.rollout_phase(True), clock.listening(self._engine):
            started = time.perf_counter()
            with self._engine.stream(self.session.sampling) as stream:
                for size in waves:
                    wave(stream, trace.tokens[:size], draw, self._scale, self._observed)
            return Timed(time.perf_counter() - started)

    def _as_new(self) -> None:
        """Reset seeds and prefix cache: the next rollout draws the first seeds again and finds no cached prompt."""
        self.session.sampler.forget()
        self._engine.forget_computed()

    def _draw(self, rows: int) -> list[list[int]]:
        draw = random.Random(rows)
        return [draw.choices(range(1, self._scale.config["vocab_size"]), k=self._words) for _ in range(rows)]


def wave(stream: Any, tokens: Sequence[Sequence[int]], draw: random.Random, scale: Scale, observed: int) -> None:
    """Run trajectories with the given tokens per turn, each from its first turn to its last, with no tools in between.

    Args:
        stream: the engine's stream.
        tokens: tokens to sample, per trajectory and turn.
        draw: source of prompts and observed tokens.
        scale: the model's scale.
        observed: tokens that replace a tool's answer.
    """
    vocabulary = range(1, scale.config["vocab_size"])
    live: dict[int, tuple[int, int, list[int]]] = {}

    def add(row: int, turn: int, prompt_ids: list[int]) -> None:
        request = Request(
            prompt_ids=prompt_ids, seed=draw.getrandbits(32), row=row, turn=turn, max_tokens=tokens[row][turn]
        )
        live[stream.add(request)] = row, turn, prompt_ids

    for row in range(len(tokens)):
        add(row, 0, draw.choices(vocabulary, k=scale.prompt_tokens))
    while stream.busy:
        for key, completion in stream.step(True)[0]:
            row, turn, prompt_ids = live.pop(key)
            if turn + 1 < len(tokens[row]):
                answer = draw.choices(vocabulary, k=observed)
                add(row, turn + 1, [*prompt_ids, *completion.token_ids, *answer])


def loops_per_second(seconds: float = 0.2) -> int:
    """Return how many loops of `compute` take a second when it runs alone."""
    loops, taken = 1000, 0.0
    while taken < seconds:
        loops *= 2
        started = time.perf_counter()
        compute(loops)
        taken = time.perf_counter() - started
    return int(loops / taken)
