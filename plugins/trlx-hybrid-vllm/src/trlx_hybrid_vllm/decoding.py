"""What `DecodeScheduler` remembers: of a running request, and of a decode step on its way through the model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.outputs import LogprobsLists


@dataclass(slots=True, eq=False)
class Row:
    """A request, with what a decode step asks of it looked up once.

    Attributes:
        plain: whether counting is all that a token of it needs.
        stops: token ids that end it.
        length: tokens, prompt included, at which `max_tokens` is reached.
        tokens, outputs: the request's own lists, of all tokens and of those sampled.
        held, held_logprobs: sampled, and not handed over yet.
    """

    request: Any
    plain: bool = field(init=False)
    stops: frozenset[int] = frozenset()
    length: int = 0
    logprobs_wanted: bool = False
    tokens: list[int] = field(init=False)
    outputs: list[int] = field(init=False)
    held: list[int] = field(default_factory=list)
    held_logprobs: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        request, params = self.request, self.request.sampling_params
        self.tokens, self.outputs = request._all_token_ids, request._output_token_ids
        self.plain = (
            params is not None
            and params.repetition_detection is None
            and request.pooling_params is None
            and request.structured_output_request is None
            and request.client_index == 0
            and not request.mm_features
            and not request.resumable
        )
        if self.plain:
            self.stops = frozenset([*(params.stop_token_ids or ()), params.eos_token_id]) - {None}
            self.length = request.num_prompt_tokens + request.max_tokens
            self.logprobs_wanted = params.num_logprobs is not None

    def output(self, token: int, index: int, logprobs: LogprobsLists | None) -> EngineCoreOutput:
        """One token, `index` its place in the step's log-probs."""
        new = logprobs.slice_request(index, 1) if self.logprobs_wanted and logprobs is not None else None
        return EngineCoreOutput(self.request.request_id, [token], new, trace_headers=self.request.trace_headers)

    def release(self) -> EngineCoreOutput:
        """Everything held back, as one output; its log-probs are the sampled tokens', without ranks."""
        tokens, self.held = self.held, []
        values, self.held_logprobs = self.held_logprobs, []
        new = None
        if self.logprobs_wanted:
            column = np.array(values, np.float32)[:, None]
            new = LogprobsLists(np.array(tokens)[:, None], column, np.empty(0, np.int64))
        return EngineCoreOutput(self.request.request_id, tokens, new, trace_headers=self.request.trace_headers)


@dataclass(slots=True, eq=False)
class Step:
    """A decode step on its way through the model.

    Attributes:
        preemptions: how many the scheduler had seen; one more, and some of this step's tokens are stale.
    """

    output: SchedulerOutput
    ids: list[str]
    rows: list[Row]
    preemptions: int

    def sampled(self, output: Any) -> tuple[list[int], LogprobsLists | None] | None:
        """A token per row, and their log-probs, in the rows' order; None where the model says more than that."""
        logprobs = output.logprobs
        if (
            len(output.sampled_token_ids) != len(self.rows)
            or (logprobs is not None and logprobs.cu_num_generated_tokens is not None)
            or output.prompt_logprobs_dict
            or output.prompt_token_id_logprobs_dict
            or output.pooler_output
            or output.num_nans_in_logits
            or output.kv_connector_output
            or output.ec_connector_output
        ):
            return None
        try:
            tokens = [token for (token,) in output.sampled_token_ids]
        except ValueError:
            return None
        if output.req_ids != self.ids:  # the older runner keeps an order of its own
            indices = list(map(output.req_id_to_index.__getitem__, self.ids))
            tokens = [tokens[index] for index in indices]
            if logprobs is not None:
                logprobs = LogprobsLists(*(array[indices] for array in logprobs[:3]))
        return tokens, logprobs
