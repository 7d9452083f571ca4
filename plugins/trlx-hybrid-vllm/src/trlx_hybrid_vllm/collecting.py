"""Run requests to their end and keep only what training needs: token ids, and the log-prob of each.

`LLM.generate` turns every token of every step into text, log-prob and output objects, one request at a time; at 256
sequences that takes longer than the GPU needs for the step. Here the engine core's step outputs are kept as they come
and turned into lists once, at the end; where `DecodeScheduler` runs, it holds tokens back until a request finishes.
Only requests without stop strings can go this way: those need the text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from trlx_hybrid.types import Completion


@dataclass(slots=True)
class _Stream:
    """What arrived for one request so far: ids, and per step an array (tokens,) of log-probs, natural logarithm."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[np.ndarray[Any, Any]] = field(default_factory=list)
    finish_reason: str | None = None

    def completion(self) -> Completion:
        if not self.logprobs:
            return Completion(token_ids=self.token_ids, finish_reason=self.finish_reason)
        values = np.concatenate(self.logprobs)
        logprobs: list[list[float | None]] = [[value] for value in values.tolist()]
        for index in np.flatnonzero(np.isnan(values)).tolist():
            logprobs[index] = [None]
        ids = [[token] for token in self.token_ids]
        return Completion(
            token_ids=self.token_ids, logprobs=logprobs, logprob_token_ids=ids, finish_reason=self.finish_reason
        )


def collect(
    llm: Any, prompts: Sequence[dict[str, Any]], params: Sequence[Any], adapter: Any = None
) -> list[Completion]:
    """One completion per prompt, in order.

    Args:
        llm: vLLM's LLM with an in-process engine core, idle.
        params: a SamplingParams per prompt, `n=1`, no stop strings, `logprobs` None or 0.
        adapter: the LoRARequest that serves all of them, or None.
    """
    engine = llm.llm_engine
    with aborting(llm), _holding(engine.engine_core.engine_core.scheduler):
        streams = {request_id: _Stream() for request_id in llm.enqueue(prompts, params, adapter, use_tqdm=False)}
        running = len(streams)
        while running:
            finished = []
            for output in engine.engine_core.get_output().outputs:
                stream = streams[output.request_id]
                stream.token_ids += output.new_token_ids
                if output.new_logprobs is not None:
                    stream.logprobs.append(output.new_logprobs.logprobs[:, 0])  # column 0 is the sampled token's
                if output.finish_reason is not None:
                    stream.finish_reason = str(output.finish_reason)
                    output.new_token_ids, output.new_logprobs = [], None  # vLLM would make an object of each
                    finished.append(output)
            if finished:
                engine.output_processor.process_outputs(finished)  # drops vLLM's own record of the request
                running -= len(finished)
    return [stream.completion() for stream in streams.values()]


@contextmanager
def aborting(llm: Any) -> Iterator[None]:
    """Abort what was queued inside when it ends in an exception: the next run would finish it first."""
    engine = llm.llm_engine
    records = engine.output_processor.request_states
    before = set(records)
    try:
        yield
    except BaseException:
        engine.abort_request([request_id for request_id in records if request_id not in before], internal=True)
        raise


@contextmanager
def _holding(scheduler: Any) -> Iterator[None]:
    if not hasattr(scheduler, "holding"):  # vLLM's own
        yield
        return
    scheduler.holding = True
    try:
        yield
    finally:
        scheduler.holding = False
