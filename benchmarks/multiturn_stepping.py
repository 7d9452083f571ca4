"""GRPO trainers with a tool, TRL's own and ours, that pause until a step is requested."""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

from . import stepping
from .building import load
from .contestants import GROUP
from .harness import Timed
from .multiturn_cases import waves
from .multiturn_clock import StepClock, computed_prompts, prefix_share
from .multiturn_rollouts import wave
from .multiturn_talk import Arguments, prompt, talker
from .replay import StepTime, Trace, asynchronous, fit
from .scale import Scale, Variant
from .stepping import Stepper

FITTED_BEFORE = 4
"""The step of our trainer before which the engine is timed: after two steps in lock-step and one in our rollout."""


class Answering:
    """A tool whose calls take the same times in every step and for every trainer, in the order of calls.

    Args:
        answer: text that the tool returns.
        rows: rows of a step.
        turns: turns of each row.
        sigma: sigma of the lognormal latencies.
    """

    def __init__(self, answer: str, rows: int, turns: int, sigma: float = 1.0) -> None:
        draw, self._calls = random.Random(0), rows * (turns - 1)
        self._factors = [draw.lognormvariate(0.0, sigma) for _ in range(self._calls)]
        self._answer, self._lock, self._threads = answer, threading.Lock(), ThreadPoolExecutor(rows)
        self.begin(0.0, early=False)

    def begin(self, median: float, *, early: bool) -> None:
        """Begin a step.

        Args:
            median: median latency in seconds; 0 answers at once.
            early: begin calls when they are read, see `multiturn_talk.Waiting.call`.
        """
        self._seconds, self._early = iter([median * factor for factor in self._factors]), early
        self.seconds_of: dict[int, float] = {}  # seconds of each call, by its number in reading order
        self._called: deque[Future[str]] = deque()
        self.slept, self._calls_read = 0.0, 0

    def read(self, word: int) -> tuple[str, Arguments]:
        """Return the call of a turn that was read; calls of the last turn are never made."""
        call = self._calls_read
        if self._early and call < self._calls:
            self._called.append(self._threads.submit(self._wait, call))
        self._calls_read += 1
        return "ask", {"call": call}

    def ask(self, call: int) -> str:
        """Return the answer after this call's latency.

        Args:
            call: number of the call.
        """
        return self._called.popleft().result() if self._early else self._wait(call)

    def _wait(self, call: int) -> str:
        with self._lock:
            seconds = self.seconds_of[call] = next(self._seconds)
            self.slept += seconds
        if seconds:
            time.sleep(seconds)
        return self._answer


class ToolStepper(Stepper):
    """A trainer in which every row has `turns` turns of `tokens` tokens.

    Args:
        kind: "trl" or "hybrid".
        turns: turns of a row.
        tokens: tokens of a turn.
        observed: tokens of a tool's answer.
        engine_args: as in `Variant`.
        folder, scale, batch, steps: as in `Stepper`.
    """

    def __init__(
        self,
        kind: str,
        folder: str,
        scale: Scale,
        turns: int,
        tokens: int,
        observed: int,
        batch: int,
        steps: int,
        engine_args: Mapping[str, Any],
    ) -> None:
        (lengths,) = scale.cases
        self._answering = Answering(" ".join(f"{word:x}" for word in range(1, observed - 2)), lengths.sequences, turns)
        self._talker = talker(scale.config["vocab_size"])
        self._talker.call = self._answering.read
        self._folder, self._turns, self._tokens_per_turn, self._observed = folder, turns, tokens, observed
        self._free = StepClock()  # engine steps without tools
        self._begun = 0
        self._ours: dict[str, float] = {}  # figures of the last step, if it was one of our rollout
        with (
            patch.object(stepping, "load", self._load),
            patch.object(stepping, "arguments_of", self._arguments),
            patch.object(stepping, "prompts_of", _prompts),
            patch.object(stepping, "_stock", self._with_tool(stepping._stock)),
            patch.object(stepping, "_hybrid", self._with_tool(stepping._hybrid)),
        ):
            super().__init__(kind, folder, scale, Variant(sleep=True, engine_args=engine_args), batch, steps)

    def tool_step(self, turn: int, median: float, lock_step: bool) -> Timed:
        """Take one optimizer step, with tools of this median latency in seconds.

        Args:
            turn: the step's number.
            median: median latency of the tools, in seconds; 0 answers at once.
            lock_step: for ours only: TRL's loop runs the conversations, with all tools of a turn at once.
        """
        self._answering.begin(median, early=lock_step)
        session = getattr(self._trainer, "session", None)
        if session is None:
            return self.step(turn)
        self._choose(session, lock_step)
        clock, self._ours = StepClock(), {}
        with clock.listening(session.live_engine):
            timed = self.step(turn)
        if not lock_step:
            block = session.live_engine.llm.llm_engine.vllm_config.cache_config.block_size
            self._ours = _summary(clock.steps) | (self._replayed(clock, block) if self._free.steps else {})
        return timed

    def _replayed(self, clock: StepClock, block: int) -> dict[str, float]:
        """Return figures of the last step's rollout, and the seconds of its replay."""
        trace, cost = self._trace(), fit(self._free.steps, prompts=True)
        optimum = asynchronous(computed_prompts(trace, self._conversations, block), cost)
        sampling = self.spans["rollout"] - self.spans["bring_up"] - self.spans["put_down"]
        return {
            "prefix_share": prefix_share(self._conversations, clock, block),
            "optimum": optimum,
            "sampling": sampling,
            "share_of_optimum": optimum / sampling,
        }

    def found(self) -> dict[str, float]:
        """Return figures of the last step: seconds by TRL's spans and in tools.

        For one of our rollouts it adds the engine's steps, see `_summary`. Once the cost of a step is known, it adds
        `prefix_share`, what the prefix cache found; `sampling`, the seconds of the rollout without bringing the engine
        up and putting it down; `optimum`, the seconds of the replay; and `share_of_optimum`, `optimum` divided by
        `sampling`.
        """
        return self.split() | {"tools": self._answering.slept} | self._ours

    def prepare(self) -> None:
        """Measure, before step FITTED_BEFORE of our trainer, engine steps without tools, at several numbers of rows.

        Before the first step an engine step costs more than in any rollout after it.
        """
        self._begun += 1
        if self._begun != FITTED_BEFORE or getattr(self._trainer, "session", None) is None:
            return
        session, draw, (lengths,) = self._trainer.session, random.Random(0), self._scale.cases
        tokens = [[self._tokens_per_turn] * self._turns] * lengths.sequences
        counted = vars(session.live_engine).pop("stream")  # these engine steps are not part of the trainer's step
        with session.rollout_phase(True):
            clock, engine = self._free, session.live_engine
            with clock.listening(engine), engine.stream(session.sampling) as stream:
                for rows in waves(lengths.sequences):
                    wave(stream, tokens[:rows], draw, self._scale, self._observed)
        session.live_engine.stream = counted
        self.spans.clear()

    def _trace(self) -> Trace:
        """Return the trace of the last step, with the time that each call really took."""
        tokens, latencies = [], []
        for conversation in self._conversations:
            tokens.append([turn.sampled for turn in conversation.turns])
            calls = [call for message in conversation.messages for call in message.get("tool_calls") or ()]
            numbers = [call["function"]["arguments"]["call"] for call in calls][: len(conversation.turns) - 1]
            latencies.append([self._answering.seconds_of[number] for number in numbers])
        return Trace(tokens=tokens, latencies=latencies)

    def _choose(self, session: Any, lock_step: bool) -> None:
        from trlx_hybrid.plugins.builtin import SingleTurn

        if not hasattr(self, "_own"):
            self._own, converse = session.rollout, session.rollout.converse

            def kept(*arguments: Any) -> Any:
                self._conversations = converse(*arguments)
                return self._conversations

            self._own.converse = kept
        session.rollout = SingleTurn() if lock_step else self._own

    # --- what differs from a step without tools ---------------------------------------------------------------------

    def _load(self, folder: str, variant: Variant) -> tuple[Any, Any]:
        model, _ = load(folder, variant)
        return model, self._talker

    def _arguments(self, output: Path, *others: Any) -> Any:
        arguments = _stepping_arguments(output, *others)
        arguments.max_tool_calling_iterations = self._turns - 1
        arguments.generation_kwargs = {"ignore_eos": True, "max_tokens": self._tokens_per_turn}
        return arguments

    def _with_tool(self, build: Any) -> Any:
        def built(scale: Scale, variant: Variant, arguments: dict[str, Any]) -> Any:
            return build(scale, variant, arguments | {"tools": [self._answering.ask]})

        return built


def _summary(steps: Sequence[StepTime]) -> dict[str, float]:
    """Return number and seconds of the engine's steps: of those that only sample, and of those that read a prompt."""
    reading = [step.seconds for step in steps if step.prompt_tokens]
    sampling = [step.seconds for step in steps if not step.prompt_tokens]
    return {
        "steps_sampling": len(sampling),
        "steps_reading": len(reading),
        "seconds_sampling": sum(sampling),
        "seconds_reading": sum(reading),
    }


_stepping_arguments = stepping.arguments_of


def _prompts(scale: Scale, steps: int) -> Any:
    """Return enough different prompts for every step."""
    from datasets import Dataset

    draw, (lengths,) = random.Random(0), scale.cases
    words = range(1, scale.config["vocab_size"])
    count = lengths.sequences // GROUP * (steps + 1)
    return Dataset.from_dict(
        {"prompt": [prompt(index + 1, draw.choices(words, k=scale.prompt_tokens - 4)) for index in range(count)]}
    )
