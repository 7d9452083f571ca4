"""Recorders of two things that vLLM does not return on CPUs: the experts that each token was routed to, and the
vocabulary ids that each token could be sampled from.

On GPUs vLLM returns both (`enable_return_routed_experts`, `return_sampling_mask`), with its second model runner, which
needs Triton. On CPUs its first model runner runs. There, one recorder gets the experts from a callback that the routers
call, the other one gets the ids from the log-probs that the sampler computes. Both look up in the runner's batch which
request each token belongs to.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from vllm.model_executor.layers.fused_moe.routed_experts_capturer import bind_routed_experts_capturer

from . import Patch
from .engine import config_of, model_of, runner_of

if TYPE_CHECKING:
    from vllm import LLM
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

PATCHES = (
    Patch(
        of=(
            "vllm.v1.worker.gpu_model_runner.GPUModelRunner.execute_model",
            "vllm.v1.sample.sampler.Sampler.sample",
        ),
        when="as long as the engine lives, on CPUs, where completions name experts or the ids sampled from",
        why="vLLM's older model runner returns neither.",
        until="vLLM's second model runner runs on CPUs",
    ),
)

MISSING = -1
Experts = np.ndarray[tuple[int, ...], np.dtype[np.int16]]


class RoutingCapture:
    """Records which experts the routers of an in-process engine choose for each token of unfinished requests.

    The engine must have no prefix cache: tokens from a cache are not computed again, and so not routed.

    Args:
        llm: vLLM's LLM.
    """

    def __init__(self, llm: LLM) -> None:
        runner, config = runner_of(llm), config_of(llm).model_config
        self._shape = config.get_total_num_hidden_layers(), config.get_num_experts_per_tok()
        self._step: dict[int, Tensor] = {}  # by layer: the experts that its router chose in this step
        self._steps: defaultdict[str, list[tuple[int, Experts]]] = defaultdict(list)
        bind_routed_experts_capturer(model_of(llm), self)  # takes whatever has `capture`
        runner.execute_model = partial(self._execute, runner, runner.execute_model)

    def capture(self, layer: int, chosen: Tensor) -> None:
        """Record the experts that a layer's router chose in this step; vLLM's routers call this.

        Args:
            layer: the layer's number.
            chosen: (tokens, experts per token), int.
        """
        self._step[layer] = chosen

    def _execute(
        self, runner: GPUModelRunner, execute: Callable[..., Any], scheduled: SchedulerOutput, *args: Any, **kwargs: Any
    ) -> Any:
        self._step.clear()
        output = execute(scheduled, *args, **kwargs)
        if not self._step:  # nothing was computed
            return output
        counts, computed = scheduled.num_scheduled_tokens, computed_tokens(scheduled)
        requests = [key for key in runner.input_batch.req_ids if key in counts]
        rows = torch.full((sum(counts.values()), *self._shape), MISSING, dtype=torch.int16)
        for layer, chosen in self._step.items():
            rows[:, layer] = chosen[: len(rows)]
        for key, part in zip(requests, torch.split(rows, [counts[key] for key in requests]), strict=True):
            self._steps[key].append((computed[key], part.numpy()))
        return output

    def take(self, request_id: str, tokens: int) -> Experts:
        """Return the experts that a finished request's first `tokens` tokens were routed to, and drop its record.

        Args:
            request_id: vLLM's internal id.
            tokens: how many tokens of the sequence, prompt included.

        Returns:
            (tokens, layers, experts per token) int16, -1 (MISSING) where a layer has no experts.
        """
        rows = np.full((tokens, *self._shape), MISSING, np.int16)
        for start, part in self._steps.pop(request_id):  # one that was preempted comes twice: the last counts
            rows[start : start + len(part)] = part[: max(0, tokens - start)]
        return rows

    def clear(self) -> None:
        """Drop the records of all requests, such as aborted ones, that nobody took."""
        self._steps.clear()


class SampledRows:
    """Reports the log-probs from which the sampler of vLLM's older model runner chooses each token.

    Args:
        runner: vLLM's model runner, in this process.
        seen: called after each step in which log-probs were computed. Its arguments are vLLM's internal ids of the
            step's requests, for each the index of the sampled token in its sequence, and the log-probs after all
            processing (temperature, top-k and the like), (requests, vocabulary).

    Attributes:
        active: whether `seen` is called.
    """

    def __init__(self, runner: GPUModelRunner, seen: Callable[[Sequence[str], Sequence[int], Tensor], None]) -> None:
        self.active = False
        self._runner, self._seen = runner, seen
        self._places: dict[str, int] = {}  # by request: the place in its sequence of the token of this step
        runner.execute_model = partial(self._execute, runner.execute_model)
        runner.sampler.sample = partial(self._sample, runner.sampler.sample)

    def _execute(self, execute: Callable[..., Any], scheduled: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
        if self.active:
            computed = computed_tokens(scheduled)
            self._places = {key: computed[key] + count for key, count in scheduled.num_scheduled_tokens.items()}
        return execute(scheduled, *args, **kwargs)

    def _sample(self, sample: Any, *args: Any, **kwargs: Any) -> Any:
        sampled, logprobs = sample(*args, **kwargs)
        if self.active and logprobs is not None:
            requests = self._runner.input_batch.req_ids
            self._seen(requests, [self._places[key] for key in requests], logprobs)
        return sampled, logprobs


def computed_tokens(scheduled: SchedulerOutput) -> dict[str, int]:
    """Return how many tokens of each request of a step were computed in the steps before.

    Args:
        scheduled: vLLM's `SchedulerOutput`.
    """
    cached = scheduled.scheduled_cached_reqs
    computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    return computed | {request.req_id: request.num_computed_tokens for request in scheduled.scheduled_new_reqs}
