"""A scheduler for vLLM with a short path for steps in which every running request decodes one token.

For each request and step, vLLM's scheduler decides about prefill chunks, drafts, encoder inputs, connectors and blocks.
At 256 sequences that takes longer than the GPU needs for the step. In a rollout nearly every step only decodes. Such a
step needs few decisions: a request needs a new KV block only when its last block is full, and its stop conditions are a
set of ids and a length. The short path makes only these decisions.

Prompts that arrive during decoding, such as tool results one by one, are scheduled by vLLM's method and added to the
decode step. All other steps go to vLLM's own methods. The short path leaves the scheduler in the same state as vLLM's
methods, so steps of all kinds may follow each other.

Where the model runner can decode several tokens of each request in one step (`multi_step.py`), the short path schedules
several. A request that stops at an earlier token drops the later ones.

This file relies on vLLM 0.31's scheduler beyond its documented interface. tests/test_scheduler.py compares the short
path with vLLM's methods.
"""

from __future__ import annotations

import copy
import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.core.sched.utils import check_stop, remove_all
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from . import Patch

PATCHES = (
    Patch(
        of=("vllm.v1.core.sched.async_scheduler.AsyncScheduler",),
        when="as long as the engine lives, on GPUs, through the argument `scheduler_cls`",
        why="At 256 sequences scheduling takes longer than the GPU needs for the step.",
        until="vLLM schedules a step in which all requests decode in less time than the step takes",
    ),
)


@dataclass
class DecodeOutput(SchedulerOutput):  # type: ignore[misc]
    """A step in which every request decodes the same number of tokens, one after another.

    vLLM's own fields describe the first of these tokens; the blocks are those that all of them need.

    Attributes:
        tokens: how many tokens each request decodes.
    """

    tokens: int = 1

    def of_all_tokens(self) -> SchedulerOutput:
        """Return the step with the numbers of all its tokens, as `Scheduler.update_from_output` counts them."""
        step = copy.copy(self)
        step.num_scheduled_tokens = dict.fromkeys(self.num_scheduled_tokens, self.tokens)
        return step


class DecodeScheduler(AsyncScheduler):  # type: ignore[misc]
    """vLLM's asynchronous scheduler, with a faster path for steps in which all requests decode.

    Attributes:
        holding: True to hold back the tokens of decode steps, and return all tokens of a request at once when it
            finishes, or before a step that vLLM's own methods handle. A request's first token is still returned with
            the step that reads its prompt. Held outputs have the sampled tokens' log-probs, but no ranks. Must be False
            where vLLM builds text: a stop string needs every token when it is sampled.
        tokens_at_once: returns how many tokens of each of these requests (vLLM's ids) the model runner can decode in
            one step; None where it decodes one.
        decode_steps: how many steps took the short path.
    """

    running: list[Request]
    max_num_scheduled_tokens: int
    max_num_active_reqs: int
    finished_req_ids: set[str]
    reset_preempted_req_ids: set[str]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.holding = False
        self.tokens_at_once: Callable[[list[str]], int] | None = None
        self.decode_steps = 0
        self._simple = self._is_simple()
        self._kv: Any = self.kv_cache_manager.coordinator.single_type_managers[0] if self._simple else None
        self._budget = min(self.max_num_scheduled_tokens, self.scheduler_config.max_num_batched_tokens)
        self._rows: dict[str, Row] = {}
        self._running_rows: list[Row] = []
        self._seen_running: list[Request] = []  # what `_running_rows` was made from
        self._in_flight: deque[DecodeStep] = deque()
        self._preemptions = 0
        self._holds = False

    def _is_simple(self) -> bool:
        """Return whether the short path for decode steps may be used in this engine.

        It leaves out the bookkeeping for some features of vLLM, which must be off: speculative decoding, KV connectors,
        pipeline stages, several kinds of KV cache and others.
        """
        managers = self.kv_cache_manager.coordinator.single_type_managers
        parts = (self.connector, self.ec_connector, self.aux_output_connector, self.finished_req_ids_dict)
        return (
            all(part is None for part in (*parts, self.vllm_config.speculative_config))
            and (self.num_spec_tokens, self.num_sampled_tokens_per_step) == (0, 1)
            and not self.use_pp
            and not self.log_stats
            and not self.defer_block_free
            and not self.enable_kv_cache_events
            and not self.return_sampling_mask
            and not self.is_encoder_decoder
            and not self.needs_kv_cache_zeroing
            and len(managers) == 1
            and type(managers[0]) is FullAttentionManager
            and 1 < managers[0].block_size == self.hash_block_size
        )

    # --- schedule ---------------------------------------------------------------------------------------------------

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Decide what the next step computes: by the short path for decode steps, else by vLLM's own method."""
        places = self.max_num_active_reqs - len(self.running)  # where none is left vLLM looks at no waiting request
        waiting = places > 0 and bool(self.waiting or self.kv_holding_waiting)
        if (
            self._simple
            and not throttle_prefills
            and self._pause_state == PauseState.UNPAUSED
            and not self._inflight_prefills
            and not self.num_waiting_for_streaming_input
            and not self.reset_preempted_req_ids
            and 0 < len(self.running) <= self._budget - waiting
            and (not waiting or self._may_join(places))
            and (step := self._decode_step(several=not waiting)) is not None
        ):
            return self._with_prompts(step) if waiting else step
        return super().schedule(throttle_prefills)

    def _may_join(self, places: int) -> bool:
        """Return whether vLLM can schedule the next waiting requests without looking at the running ones.

        True requires that all of these waiting requests are new, that they use the LoRA adapter of the running
        requests, and that they have no images, grammars or other features that only vLLM's own methods handle. vLLM
        must also have no waiting request that holds KV blocks, no limit for long prompts, and no reserve of KV blocks.

        Args:
            places: how many waiting requests can start.
        """
        first = list(itertools.islice(self.waiting, places))
        adapters = {r.lora_request and r.lora_request.lora_int_id for r in (self.running[0], *first)}
        return (
            not self.kv_holding_waiting
            and not self.scheduler_config.long_prefill_token_threshold
            and not self.kv_cache_manager.watermark_blocks
            and all(request.status is RequestStatus.WAITING and Row(request).plain for request in first)
            and len(adapters) == 1
        )

    def _with_prompts(self, step: SchedulerOutput) -> SchedulerOutput:
        """Return a decode step to which as many waiting requests are added as fit into the step's token limit.

        vLLM's own method schedules the waiting requests, as if no others were running.

        Args:
            step: the step that decodes one token of every running request.
        """
        ids, running = self._in_flight[-1].ids, self.running
        limits = self.max_num_scheduled_tokens, self.max_num_active_reqs
        self.max_num_scheduled_tokens, self.max_num_active_reqs = self._budget - len(ids), limits[1] - len(running)
        self.running = []
        self.current_step -= 1  # `super().schedule()` counts this step again
        try:
            prompts = super().schedule()
        finally:
            self.running = running + self.running
            self.max_num_scheduled_tokens, self.max_num_active_reqs = limits
        if not self.use_v2_model_runner:
            self.prev_step_scheduled_req_ids.update(ids)
        if not prompts.num_scheduled_tokens:  # the KV cache is full
            return step
        both = replace(
            prompts,
            scheduled_cached_reqs=step.scheduled_cached_reqs,
            num_scheduled_tokens=step.num_scheduled_tokens | prompts.num_scheduled_tokens,
            total_num_scheduled_tokens=step.total_num_scheduled_tokens + prompts.total_num_scheduled_tokens,
            preempted_req_ids=step.preempted_req_ids,
            finished_req_ids=step.finished_req_ids,
            free_encoder_mm_hashes=[*step.free_encoder_mm_hashes, *prompts.free_encoder_mm_hashes],
        )
        self._in_flight[-1] = replace(self._in_flight[-1], output=both, prompts=prompts)
        return both

    def _decode_step(self, several: bool) -> SchedulerOutput | None:
        """Schedule one more token for every running request, or several.

        Args:
            several: whether the step may decode several tokens of each request.

        Returns:
            The step; or None, with nothing changed, if vLLM's own method must schedule the step. It must do so if a
            request still reads its prompt, if a request has a feature that only vLLM's own methods handle (images,
            grammars), if no request needs a token, or if too few KV blocks are free.
        """
        if self.running != self._seen_running and not self._look_at_running():
            return None
        last = self.max_model_len - 1
        rows: list[Row] = []
        ids: list[str] = []
        computed_tokens: list[int] = []
        output_tokens: list[int] = []
        fewest = last  # tokens that a request may still decode
        for row in self._running_rows:
            request = row.request
            tokens, ahead, computed = len(row.tokens), request.num_output_placeholders, request.num_computed_tokens
            if tokens + ahead - computed != 1 or request.is_prefill_chunk:
                return None
            if computed >= last or (ahead and computed + 1 >= row.length):
                continue  # what is in flight finishes it
            fewest = min(fewest, last - computed, row.length - computed - 1)
            rows.append(row)
            ids.append(request.request_id)
            computed_tokens.append(computed)
            output_tokens.append(computed + 1 - request.num_prompt_tokens)
        if not rows:
            return None
        if not self.use_v2_model_runner and not self.prev_step_scheduled_req_ids.issuperset(ids):
            return None  # the older runner needs all tokens of requests that paused
        count = 1
        if several and fewest > 1 and self.tokens_at_once is not None:
            count = min(fewest, self.tokens_at_once(ids))
        edges, wanted = self._edges(rows, computed_tokens, count)
        free = self.kv_cache_manager.block_pool.get_num_free_blocks()
        if wanted > free and count > 1:
            count = 1
            edges, wanted = self._edges(rows, computed_tokens, count)
        if wanted > free:
            return None

        new_blocks: list[tuple[list[int], ...] | None] = [None] * len(rows)
        for index in edges:
            row, end = rows[index], computed_tokens[index] + count
            if blocks := self._kv.allocate_new_blocks(ids[index], end, end):
                new_blocks[index] = ([block.block_id for block in blocks],)
            self.kv_cache_manager.cache_blocks(row.request, len(row.tokens))
        for row in rows:  # `next_decode_eligible_step` holds nobody back without pipeline parallelism
            request = row.request
            request.num_computed_tokens += count
            request.num_in_flight_tokens += count
            request.num_output_placeholders += count
        return self._sent(
            rows, CachedRequestData(ids, set(), [], {}, new_blocks, computed_tokens, output_tokens), count
        )

    def _edges(self, rows: list[Row], computed_tokens: list[int], count: int) -> tuple[list[int], int]:
        """Find the requests at which a block fills up or a new one begins when each decodes `count` tokens.

        Returns:
            The indices of these requests, and how many new blocks all requests need.
        """
        block, tables = self._kv.block_size, self._kv.req_to_blocks
        edges, wanted = [], 0
        for index, row in enumerate(rows):
            computed = computed_tokens[index]
            if computed % block + count > block or not computed % block or not len(row.tokens) % block:
                edges.append(index)
                wanted += max(0, -(-(computed + count) // block) - len(tables[row.request.request_id]))
        return edges, wanted

    def _look_at_running(self) -> bool:
        """Update `_running_rows`, which has a `Row` for each running request, after these requests have changed.

        Returns:
            True if the short path can schedule a step of these requests. False if some request has a feature, such as
            images or a grammar, that only vLLM's own methods handle.
        """
        known, self._rows = self._rows, {}
        for request in self.running:
            row = known.pop(request.request_id, None)
            self._rows[request.request_id] = row if row is not None and row.request is request else Row(request)
        self._running_rows = list(self._rows.values())
        self._rows |= {key: row for key, row in known.items() if row.held and not row.request.is_finished()}
        plain = all(row.plain for row in self._running_rows)
        self._seen_running = list(self.running) if plain else []
        return plain

    def _sent(self, rows: list[Row], cached: CachedRequestData, count: int) -> SchedulerOutput:
        """Return a decode step as vLLM's `SchedulerOutput`, and record it in the scheduler's state.

        The state of the requests themselves must be updated already.

        Args:
            rows: the requests that decode a token.
            cached: vLLM's description of these requests for the workers.
            count: how many tokens each of them decodes.
        """
        self.current_step += 1
        self.decode_steps += 1
        ids: list[str] = cached.req_ids
        if not self.use_v2_model_runner:
            self.prev_step_scheduled_req_ids.clear()
            self.prev_step_scheduled_req_ids.update(ids)
        self.prefill_capacity_bound = len(self.waiting) + len(self.kv_holding_waiting) > len(self.deferred_waiting)
        output = DecodeOutput(
            scheduled_new_reqs=[],
            scheduled_cached_reqs=cached,
            num_scheduled_tokens=dict.fromkeys(ids, 1),
            total_num_scheduled_tokens=len(ids),
            scheduled_spec_decode_tokens={},
            scheduled_encoder_inputs={},
            num_common_prefix_blocks=self.kv_cache_manager.get_num_common_prefix_blocks(self.running[0].request_id),
            preempted_req_ids=self.reset_preempted_req_ids,
            finished_req_ids=self.finished_req_ids,
            free_encoder_mm_hashes=self.encoder_cache_manager.get_freed_mm_hashes(),
            ec_manager_metadata=self.encoder_cache_manager.get_manager_metadata(),
            tokens=count,
        )
        self.finished_req_ids, self.reset_preempted_req_ids = set(), set()
        self._in_flight.append(DecodeStep(output, ids, rows, self._preemptions))
        return output

    def _preempt_request(self, *args: Any, **kwargs: Any) -> None:
        self._preemptions += 1
        super()._preempt_request(*args, **kwargs)

    # --- update -----------------------------------------------------------------------------------------------------

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Append a step's sampled tokens to the requests, and return vLLM's outputs by client index."""
        step = next((step for step in self._in_flight if step.output is scheduler_output), None)
        while step is not None and self._in_flight.popleft() is not step:  # a step that failed never comes back
            pass
        if (
            step is not None
            and step.preemptions == self._preemptions
            and not self.grammar_compile_error_reqs
            and not self.encoder_cache_mismatch_reqs
            and (sampled := step.sampled(model_runner_output)) is not None
        ):
            outputs, rest = self._decoded(step.rows, *sampled), step.prompts
        else:
            outputs, rest = self._released(), scheduler_output
            if isinstance(rest, DecodeOutput):
                rest = rest.of_all_tokens()
        by_client: dict[int, EngineCoreOutputs] = {}
        if rest is not None:
            by_client = super().update_from_output(rest, model_runner_output)
        if outputs:
            mine = by_client.setdefault(0, EngineCoreOutputs())
            mine.outputs = outputs + mine.outputs
        return by_client

    def _decoded(
        self, rows: list[Row], tokens: list[list[int]], logprobs: LogprobsLists | None
    ) -> list[EngineCoreOutput]:
        """Append a decode step's tokens to the requests, and finish the requests that stop.

        Args:
            rows: the requests that decoded.
            tokens: the sampled tokens of each row, as many of each.
            logprobs: vLLM's `LogprobsLists` in the order of the rows; None where no request asks for log-probs.

        Returns:
            One output for each row. If tokens are held back (`holding`) until their request stops, which saves
            outputs, there is instead one output for each request that stops in this step, with all tokens held back.
        """
        outputs = [] if self.holding else self._released()
        holding = self._holds = self.holding
        values = logprobs.logprobs[:, 0].tolist() if holding and logprobs is not None else None
        count, running = len(tokens[0]), RequestStatus.RUNNING
        stopped: set[Request] = set()
        for index, row in enumerate(rows):
            request = row.request
            if request.status is not running:
                continue  # it stopped, or was aborted, while this step was on its way
            request.num_in_flight_tokens -= count
            request.num_output_placeholders -= count
            taken, stops = self._appended(row, tokens[index])
            first = index * count
            if holding:
                row.held += tokens[index][:taken]
                if values is not None:
                    row.held_logprobs += values[first : first + taken]
            if stops:
                check_stop(request, self.max_model_len)
                output = row.release() if holding else row.output(tokens[index][:taken], first, logprobs)
                output.finish_reason = request.get_finished_reason()
                output.stop_reason = request.stop_reason
                outputs.append(output)
                stopped.add(request)
                self._free_request(request)
            elif not holding:
                outputs.append(row.output(tokens[index], first, logprobs))
        if stopped:
            self.running = remove_all(self.running, stopped)
        if not self.running:
            self._rows, self._running_rows, self._seen_running = {}, [], []  # keep no request alive
        return outputs

    def _appended(self, row: Row, tokens: list[int]) -> tuple[int, bool]:
        """Append sampled tokens to a request up to the one at which it stops, and cache the blocks that fill up.

        Returns:
            How many tokens were appended, and whether the request stops at the last of them.
        """
        request, block, longest = row.request, self._kv.block_size, min(row.length, self.max_model_len)
        cached = self._kv.num_cached_block
        for taken, token in enumerate(tokens, 1):
            row.outputs.append(token)
            row.tokens.append(token)
            size = len(row.tokens)
            if (edge := size % block) == 0:
                request.update_block_hashes()
            elif edge == 1 and cached.get(request.request_id, 0) < size // block:  # else the last schedule cached it
                self.kv_cache_manager.cache_blocks(request, size - 1)
            if token in row.stops or size >= longest:
                return taken, True
        return len(tokens), False

    def release(self, request_id: str) -> EngineCoreOutput | None:
        """Return the tokens of an unfinished request that are held back (see `holding`), and hold them no longer. None
        where there are none."""
        row = self._rows.get(request_id)
        return row.release() if row is not None and row.held else None

    def _released(self) -> list[EngineCoreOutput]:
        """Return the tokens that were held back, as one output for each unfinished request that has any.

        Called before vLLM's own methods handle a step, so that the tokens stay in order.
        """
        if not self._holds:
            return []
        self._holds = False
        return [row.release() for row in self._rows.values() if row.held and not row.request.is_finished()]


@dataclass(slots=True, eq=False)
class Row:
    """A request of vLLM's scheduler, with the values that each decode step needs of it looked up once.

    Attributes:
        request: vLLM's `Request`.
        plain: whether the request has none of the features that only vLLM's own methods handle: images, grammars,
            detection of repetitions, pooling, and input that is streamed.
        stops: token ids that end the request.
        length: the number of tokens, prompt included, at which `max_tokens` is reached.
        logprobs_wanted: whether the request asks for log-probs.
        tokens: vLLM's own list of all of the request's tokens.
        outputs: vLLM's own list of the sampled tokens.
        held: tokens that were sampled, and are held back until the request finishes.
        held_logprobs: the log-probs of the tokens in `held`.
    """

    request: Request
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

    def output(self, tokens: list[int], first: int, logprobs: LogprobsLists | None) -> EngineCoreOutput:
        """Return vLLM's output object for sampled tokens; `first` is the row of the first one in `logprobs`."""
        new = None
        if self.logprobs_wanted and logprobs is not None:
            new = LogprobsLists(*(array[first : first + len(tokens)] for array in logprobs[:3]))
        return EngineCoreOutput(self.request.request_id, tokens, new, trace_headers=self.request.trace_headers)

    def release(self) -> EngineCoreOutput:
        """Return all tokens of this request that were held back (see `DecodeScheduler.holding`) as one output. It has
        their log-probs if the request asks for them, but not the tokens' ranks in the vocabulary."""
        tokens, self.held = self.held, []
        values, self.held_logprobs = self.held_logprobs, []
        new = None
        if self.logprobs_wanted:
            column = np.array(values, np.float32)[:, None]
            new = LogprobsLists(np.array(tokens)[:, None], column, np.empty(0, np.int64))
        return EngineCoreOutput(self.request.request_id, tokens, new, trace_headers=self.request.trace_headers)


@dataclass(slots=True, eq=False)
class DecodeStep:
    """A decode step that was scheduled, and whose tokens have not come back from the model yet.

    Attributes:
        output: the step as the workers got it.
        ids: vLLM's internal ids of the requests that decode.
        rows: a `Row` for each of these requests, in the order of `ids`.
        prompts: the part of the step that reads prompts, which vLLM's own method scheduled; None without prompts.
        preemptions: how often the scheduler had preempted a request when it scheduled the step. If it preempts another
            request before the step's tokens come back, some of these tokens may be stale.
    """

    output: SchedulerOutput
    ids: list[str]
    rows: list[Row]
    preemptions: int
    prompts: SchedulerOutput | None = None

    def sampled(self, output: ModelRunnerOutput) -> tuple[list[list[int]], LogprobsLists | None] | None:
        """Return the sampled tokens of each row and the log-probs (or None without any), in the order of `rows`.

        The whole result is None where the model runner's output has anything beyond the step's tokens and log-probs,
        which vLLM's own method must then handle.
        """
        logprobs, others = output.logprobs, len(self.prompts.num_scheduled_tokens) if self.prompts else 0
        count = self.output.tokens if isinstance(self.output, DecodeOutput) else 1
        if (
            len(output.sampled_token_ids) != len(self.rows) + others
            or (logprobs is not None and count == 1 and logprobs.cu_num_generated_tokens is not None)
            or output.prompt_logprobs_dict
            or output.prompt_token_id_logprobs_dict
            or output.pooler_output
            or output.num_nans_in_logits
            or output.kv_connector_output
            or output.ec_connector_output
        ):
            return None
        sampled = output.sampled_token_ids
        if output.req_ids != self.ids:  # there are others, or it is the older runner, which keeps an order of its own
            indices = list(map(output.req_id_to_index.__getitem__, self.ids))
            sampled = [sampled[index] for index in indices]
            if logprobs is not None:
                places = (np.array(indices)[:, None] * count + np.arange(count)).ravel()
                logprobs = LogprobsLists(*(array[places] for array in logprobs[:3]))
        return (sampled, logprobs) if all(len(tokens) == count for tokens in sampled) else None
