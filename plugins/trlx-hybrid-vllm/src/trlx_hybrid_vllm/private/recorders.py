"""A recorder of the experts that vLLM's routers chose for each token, on CPUs, where vLLM does not return them itself.

On GPUs vLLM does (`enable_return_routed_experts`), with its second model runner, which needs Triton. On CPUs the first
one runs: its routers report their choice to the same callback, and its batch says which requests the tokens belong to.
"""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.model_executor.layers.fused_moe.routed_experts_capturer import bind_routed_experts_capturer

from . import engine as internals

MISSING = -1


class RoutingCapture:
    """Records which experts the routers of an in-process engine choose for each token, until its request is done.

    It needs an engine without prefix cache: tokens that are not computed are not routed.

    Args:
        llm: vLLM's LLM.
    """

    def __init__(self, llm: Any) -> None:
        runner = llm.llm_engine.model_executor.driver_worker.model_runner
        config = llm.llm_engine.model_config
        self._shape = config.get_total_num_hidden_layers(), config.get_num_experts_per_tok()
        self._step: dict[int, Tensor] = {}  # by layer: the experts that its router chose in this step
        self._steps: defaultdict[str, list[tuple[int, np.ndarray[Any, Any]]]] = defaultdict(list)
        bind_routed_experts_capturer(internals.model_of(llm), self)  # takes whatever has `capture`
        runner.execute_model = partial(self._execute, runner, runner.execute_model)

    def capture(self, layer: int, chosen: Tensor) -> None:
        """Record the experts that a layer's router chose in this step; vLLM's routers call this.

        Args:
            layer: the layer's number.
            chosen: (tokens, experts per token), int.
        """
        self._step[layer] = chosen

    def _execute(self, runner: Any, execute: Any, scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        self._step.clear()
        output = execute(scheduled, *args, **kwargs)
        if not self._step:  # nothing was computed
            return output
        counts, cached = scheduled.num_scheduled_tokens, scheduled.scheduled_cached_reqs
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        computed |= {request.req_id: request.num_computed_tokens for request in scheduled.scheduled_new_reqs}
        requests = [key for key in runner.input_batch.req_ids if key in counts]
        rows = torch.full((sum(counts.values()), *self._shape), MISSING, dtype=torch.int16)
        for layer, chosen in self._step.items():
            rows[:, layer] = chosen[: len(rows)]
        for key, part in zip(requests, torch.split(rows, [counts[key] for key in requests]), strict=True):
            self._steps[key].append((computed[key], part.numpy()))
        return output

    def take(self, request_id: str, tokens: int) -> np.ndarray[Any, Any]:
        """Return the experts that a finished request's first `tokens` tokens were routed to, and drop its record.

        Returns:
            (tokens, layers, experts per token) int16, MISSING where a layer has no experts.
        """
        rows = np.full((tokens, *self._shape), MISSING, np.int16)
        for start, part in self._steps.pop(request_id):  # one that was preempted comes twice: the last counts
            rows[start : start + len(part)] = part[: max(0, tokens - start)]
        return rows

    def clear(self) -> None:
        """Drop the records that nobody took, those of aborted requests."""
        self._steps.clear()
