"""Steps of vLLM's engine core: a class that queues requests, runs steps, and turns their outputs into completions.

`LLM.generate` turns every token of every step into text, log-prob and output objects, one request at a time. At 256
sequences, this takes longer than the GPU needs for the step. Here, the outputs of the engine core's steps are stored as
they come, and turned into lists once, when a request finishes. This plugin's `DecodeScheduler`, where it runs, holds
tokens back until their request finishes. Requests with stop strings, or with log-probs of other tokens than the sampled
ones, go through vLLM's own output processing.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import numpy as np
from trlx_hybrid.contract.support import Support
from trlx_hybrid.contract.types import Completion, Request
from trlx_hybrid.errors import EngineError
from vllm.inputs.engine import tokens_input

from ..sampling import (
    completion_of,
    forbidden,
    own_params,
    prompt_of,
    refuse_another_prompt,
    with_seed,
    without_placeholders,
)
from .models import causal_pictures
from .token_logprobs import without_ranks

if TYPE_CHECKING:
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.outputs import RequestOutput
    from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest

    from .recorders import Experts, RoutingCapture
    from .sampling_graphs import SamplingGraphs
    from .scheduler import DecodeScheduler


Ids = np.ndarray[tuple[int, ...], np.dtype[np.int32]]


class IdCollector(Protocol):
    """Interface of a collector of the ids that each token is sampled from (what top-k, top-p and min-p leave)."""

    def open(self, forbidden: Sequence[int]) -> None:
        """Prepare to record the ids of a rollout that starts; `forbidden` are ids that a logit bias forbids in all of
        its requests, which are left out of the record."""

    def close(self) -> None:
        """Forget what was recorded of requests whose ids nobody took, such as aborted ones."""

    def returned(self, request_id: str, prompt_tokens: int, ids: Ids) -> None:
        """Record the ids that a request's next token was sampled from.

        Args:
            request_id: vLLM's internal id.
            prompt_tokens: how many tokens the prompt has.
            ids: (n,) int32, ascending.
        """

    def take(self, request_id: str, prompt_tokens: int, tokens: int) -> Support:
        """Return the ids that a finished request's tokens were sampled from, and drop the record.

        Args:
            request_id: vLLM's internal id.
            prompt_tokens: how many tokens the prompt has.
            tokens: how many tokens were sampled.
        """


@dataclass(slots=True)
class Partial:
    """The outputs so far of one unfinished request.

    Attributes:
        prompt_tokens: how many tokens the prompt has.
        row: index of the request in the batch of all ranks.
        outside_id: the request's id in vLLM's finished outputs, which is not its internal id; "" where vLLM builds no
            text.
        token_ids: the sampled tokens.
        logprobs: for each step, an array (tokens,) of the sampled tokens' natural log-probs.
        experts: for each step, an array (tokens, layers, experts per token) of the experts that its tokens were routed
            to; empty where vLLM does not return them.
    """

    prompt_tokens: int
    row: int
    outside_id: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[np.ndarray[tuple[int, ...], np.dtype[np.float32]]] = field(default_factory=list)
    experts: list[Experts] = field(default_factory=list)

    def add(self, output: EngineCoreOutput) -> None:
        """Append the tokens of one output of the engine core, with their log-probs."""
        self.token_ids += output.new_token_ids
        if output.new_logprobs is not None:
            self.logprobs.append(output.new_logprobs.logprobs[:, 0])  # column 0 is the sampled token's

    def completion(self, finish_reason: str | None) -> Completion:
        """Return the outputs as a completion, with a log-prob of None in the place of NaN.

        Args:
            finish_reason: why the request ended; None if it is unfinished.
        """
        if not self.logprobs:
            return Completion(token_ids=self.token_ids, finish_reason=finish_reason, row=self.row)
        values = np.concatenate(self.logprobs)
        logprobs: list[list[float | None]] = [[value] for value in values.tolist()]
        for index in np.flatnonzero(np.isnan(values)).tolist():
            logprobs[index] = [None]
        ids = [[token] for token in self.token_ids]
        return Completion(
            token_ids=self.token_ids,
            logprobs=logprobs,
            logprob_token_ids=ids,
            finish_reason=finish_reason,
            row=self.row,
        )


class Stepper:
    """Queues requests in an in-process engine core, runs its steps, and returns completions as requests finish.

    The engine must have no unfinished requests when the `Stepper` is made.

    The first text request goes through vLLM's input processing, which checks the parameters and completes them. The
    other requests are copies of the first, and only their prompts are checked. That saves a third of the time that a
    turn of a conversation costs the host between two steps.

    Args:
        llm: vLLM's LLM.
        params: arguments of `SamplingParams` that the requests share.
        adapter: the LoRARequest with which all requests are sampled, or None.
        routing: records the experts of the tokens, if completions must list them and vLLM does not return them.
        graphs: CUDA graphs of the part of a decode step that follows the model's layers, where the engine has them.
        support: collects the ids that each token is sampled from, if completions must list them.

    Attributes:
        unfinished: the requests that are queued or being decoded, by vLLM's internal id.
        cached_tokens: how many prompt tokens came from the prefix cache, over all requests whose prompt was read.
        prompt_tokens: how many prompt tokens these requests have in all.
    """

    def __init__(
        self,
        llm: LLM,
        params: Mapping[str, Any],
        adapter: LoRARequest | None,
        routing: RoutingCapture | None,
        graphs: SamplingGraphs | None,
        support: IdCollector | None,
    ) -> None:
        self._llm, self._adapter, self._routing, self._graphs = llm, adapter, routing, graphs
        self._support = support
        self._engine, self._core = llm.llm_engine, llm.llm_engine.engine_core
        self._params = without_placeholders(dict(params), self._engine.vllm_config)
        self._pattern: EngineCoreRequest | None = None  # checked and completed
        self._text = bool(params["detokenize"] or params["logprobs"])
        self._inside: dict[str, str] = {}  # the id in vLLM's finished outputs -> the id it works with
        self.unfinished: dict[str, Partial] = {}
        self.cached_tokens = self.prompt_tokens = 0

    # --- requests ---------------------------------------------------------------------------------------------------

    def queue(self, request: Request) -> str:
        """Queue a request, and return vLLM's internal id of it.

        Raises:
            VLLMValidationError: the prompt is too long or has ids outside the vocabulary, or the parameters are
                invalid.
            EngineError: vLLM would change the prompt of a request with images, or computes images differently from the
                trainer's model.
        """
        request_id = self._queue(request) if request.images is None else self._queue_images(request)
        arriving = self.unfinished[request_id] = Partial(len(request.prompt_ids), request.row)
        if self._text:
            arriving.outside_id = self._engine.output_processor.request_states[request_id].external_req_id
            self._inside[arriving.outside_id] = request_id
        return request_id

    def _queue_images(self, request: Request) -> str:
        if (reason := causal_pictures(self._engine.vllm_config)) is not None:
            raise EngineError(reason)
        params = with_seed(self._params, request)
        request_id = str(self._llm.enqueue([prompt_of(request)], [params], self._adapter, use_tqdm=False)[0])
        try:
            refuse_another_prompt(request, self._engine.output_processor.request_states[request_id].prompt_token_ids)
        except EngineError:
            self._engine.abort_request([request_id], internal=True)
            raise
        return request_id

    def _queue(self, request: Request) -> str:
        if self._pattern is None:
            self._pattern = self._engine.input_processor.process_inputs(
                "pattern",
                tokens_input(request.prompt_ids),
                with_seed(self._params, request),
                supported_tasks=self._engine.get_supported_tasks(),
                lora_request=self._adapter,
            )
        params: SamplingParams = copy.copy(self._pattern.sampling_params)
        for name, value in own_params(self._params, request).items():
            setattr(params, name, value)
        self._engine.input_processor._validate_model_inputs(None, tokens_input(request.prompt_ids))
        request_id = f"trlx-{next(self._llm.request_counter)}"
        queued = msgspec.structs.replace(
            self._pattern,
            request_id=request_id,
            external_req_id=request_id,
            prompt_token_ids=request.prompt_ids,
            sampling_params=params,
            arrival_time=time.time(),
        )
        self._engine.output_processor.add_request(queued, None, None, 0)
        self._engine.engine_core.add_request(queued)
        return request_id

    def abort(self, request_id: str) -> None:
        """Stop an unfinished request and free its KV cache."""
        del self.unfinished[request_id]
        self._engine.abort_request([request_id], internal=True)

    def sampled(self, request_id: str) -> Completion:
        """Return the tokens that an unfinished request has sampled so far.

        Raises:
            EngineError: vLLM builds text from the tokens, which it then keeps to itself until the request finishes.
        """
        if self._text:
            raise EngineError("Requests with stop strings, or with log-probs of several tokens, cannot be interrupted.")
        arriving, scheduler = self.unfinished[request_id], self._core.engine_core.scheduler
        held = scheduler.release(request_id) if hasattr(scheduler, "holding") else None
        if held is not None:
            arriving.add(held)
        return arriving.completion(None)

    # --- steps ------------------------------------------------------------------------------------------------------

    def step(self) -> list[tuple[str, Completion]]:
        """Run one step of the engine core, and return vLLM's internal id and the completion of each finished request.

        Raises:
            EngineError: vLLM has no requests left, and some of these never finished.
        """
        finished = self._text_step() if self._text else self._token_step()
        if self.unfinished and not self._engine.has_unfinished_requests():
            raise EngineError(f"vLLM lost {len(self.unfinished)} requests: it has none left, and these never finished.")
        return finished

    def _token_step(self) -> list[tuple[str, Completion]]:
        completions, finished = [], []
        for output in self._core.get_output().outputs:
            arriving = self.unfinished.get(output.request_id)
            if arriving is None:  # aborted while this step was on its way
                continue
            arriving.add(output)
            if output.prefill_stats is not None:
                self.cached_tokens += output.prefill_stats.num_cached_tokens
                self.prompt_tokens += output.prefill_stats.num_prompt_tokens
            if output.routed_experts is not None:
                arriving.experts.append(output.routed_experts)
                output.routed_experts = None
            if output.new_sampling_mask is not None and self._support is not None:
                self._support.returned(output.request_id, arriving.prompt_tokens, output.new_sampling_mask.token_ids)
                output.new_sampling_mask = None
            if output.finish_reason is not None:
                experts = np.concatenate(arriving.experts) if arriving.experts else None
                completion = arriving.completion(str(output.finish_reason))
                completions.append((output.request_id, self._with_more(output.request_id, completion, experts)))
                output.new_token_ids, output.new_logprobs = [], None  # vLLM would make an object of each
                finished.append(output)
        if finished:
            self._engine.output_processor.process_outputs(finished)  # drops vLLM's own record of the request
        return completions

    def _text_step(self) -> list[tuple[str, Completion]]:
        completions = []
        outputs = self._engine.step()
        if self._support is not None:
            self._take_masks(self._support, outputs)
        for output in outputs:
            request_id = self._inside.get(output.request_id, "")
            arriving = self.unfinished.get(request_id)
            if arriving is not None and output.finished:
                done = output.outputs[0]
                completion = replace(completion_of(done), row=arriving.row)
                completions.append((request_id, self._with_more(request_id, completion, done.routed_experts)))
                self.cached_tokens += output.num_cached_tokens or 0
                self.prompt_tokens += len(output.prompt_token_ids)
        return completions

    def _take_masks(self, support: IdCollector, outputs: Sequence[RequestOutput]) -> None:
        """Move the ids that tokens were sampled from out of vLLM's outputs into `support`.

        Otherwise vLLM would turn the arrays of ids into lists when a request finishes.
        """
        for request_id, arriving in self.unfinished.items():
            state = self._engine.output_processor.request_states.get(request_id)
            for mask in state.sampling_mask_chunks if state is not None else ():
                support.returned(request_id, arriving.prompt_tokens, mask.token_ids)
            if state is not None:
                state.sampling_mask_chunks.clear()
        for output in outputs:  # the ids of their last step
            mask, key = output.outputs[0].sampling_mask, self._inside.get(output.request_id, "")
            if key in self.unfinished and mask is not None:
                for ids in mask.token_ids:
                    support.returned(key, self.unfinished[key].prompt_tokens, ids)

    def _with_more(self, request_id: str, completion: Completion, experts: Experts | None) -> Completion:
        """Add to a finished request's completion the tokens' experts, and the ids that they were sampled from.

        Each is None where it is not recorded. The request is removed from `unfinished`.

        Args:
            request_id: vLLM's internal id.
            completion: token ids and log-probs.
            experts: the experts as vLLM returned them; None where it did not.
        """
        prompt_tokens, tokens = self.unfinished[request_id].prompt_tokens, len(completion.token_ids)
        support = None if self._support is None else self._support.take(request_id, prompt_tokens, tokens)
        experts = self._experts(request_id, prompt_tokens + tokens, experts)
        del self.unfinished[request_id]
        return replace(completion, experts=experts, support=support)

    def _experts(self, request_id: str, tokens: int, returned: Experts | None) -> Experts | None:
        """Return the experts that a finished request's tokens were routed to, or None where they are not recorded.

        The last sampled token has no experts, because it never went through the model.

        Args:
            request_id: vLLM's internal id.
            tokens: how many tokens the request has, prompt included.
            returned: the experts as vLLM returned them; None where it did not.

        Returns:
            (tokens - 1, layers, experts per token) int16, or None.
        """
        if self._routing is not None:
            return self._routing.take(request_id, tokens - 1)
        if returned is not None and len(returned) != tokens - 1:
            raise EngineError(f"vLLM returned the experts of {len(returned)} tokens, where {tokens - 1} were computed.")
        return None if returned is None else returned.astype(np.int16)

    # --- before and after -------------------------------------------------------------------------------------------

    @contextmanager
    def open(self) -> Iterator[None]:
        """Prepare the engine for the requests that are queued inside this context, and clean up when it ends.

        Unfinished requests are aborted at the end; otherwise the next rollout would finish them first.
        """
        scheduler = self._core.engine_core.scheduler
        holds = hasattr(scheduler, "holding") and not self._text
        try:
            if self._support is not None:
                self._support.open(forbidden(self._params))
            with self._holding(scheduler) if holds else nullcontext():
                yield
        finally:
            for request_id in list(self.unfinished):
                self.abort(request_id)
            if self._routing is not None:
                self._routing.clear()
            if self._support is not None:
                self._support.close()

    @contextmanager
    def _holding(self, scheduler: DecodeScheduler) -> Iterator[None]:
        """Let the engine use this plugin's faster code inside the context: held tokens, CUDA graphs and kernels.

        The scheduler then returns a request's tokens only when it finishes, with their log-probs but without their
        ranks by probability.
        """
        scheduler.holding = True
        if self._graphs is not None:
            self._graphs.active = True
            scheduler.tokens_at_once = self._graphs.multi_step.at_once
        try:
            with without_ranks(scheduler, self._engine.vllm_config.device_config.device):
                yield
        finally:
            scheduler.holding, scheduler.tokens_at_once = False, None
            if self._graphs is not None:
                self._graphs.active = False
