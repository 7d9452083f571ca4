"""Streams of requests that come and go while the engine steps, with only those outputs that training needs.

`LLM.generate` turns every token of every step into text, log-prob and output objects, one request at a time; at 256
sequences that takes longer than the GPU needs for the step. Here the engine core's step outputs are kept as they come
and turned into lists once, at the end; where `DecodeScheduler` runs, it holds tokens back until a request finishes.
Requests with stop strings, or with more log-probs than the sampled tokens', go through vLLM's own output processing.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from trlx_hybrid.contract.types import Completion, Request
from trlx_hybrid.errors import EngineError

from ..private import engine as internals
from ..private.token_logprobs import without_ranks
from .sampling import (
    causal_pictures,
    completion_of,
    forbidden,
    own_params,
    prompt_of,
    refuse_another_prompt,
    with_seed,
    without_placeholders,
)

if TYPE_CHECKING:
    from ..private.recorders import RoutingCapture
    from ..private.sampling_graphs import SamplingGraphs
    from .support import KeptIds


@dataclass(slots=True)
class _Partial:
    """The outputs so far of one unfinished request.

    Attributes:
        key: the number that the stream gave the request.
        token_ids: the sampled tokens.
        logprobs: for each step, an array (tokens,) of natural log-probs.
        prompt_tokens: how many tokens the prompt has.
    """

    key: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[np.ndarray[Any, Any]] = field(default_factory=list)
    prompt_tokens: int = 0
    row: int = 0  # the request's
    experts: list[np.ndarray[Any, Any]] = field(default_factory=list)  # as vLLM returns them, if it does

    def completion(self, finish_reason: str) -> Completion:
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


class EngineStream:
    """A stream of one rank's own engine.

    The first prompt of token ids goes through vLLM's input processing, which checks the parameters and completes them.
    The other requests are copies of it, and only their prompts are checked. That is a third of the time that a turn
    of a conversation costs the host between two steps.

    Args:
        llm: vLLM's LLM with an in-process engine core, idle.
        params: arguments of `SamplingParams` that the requests share.
        adapter: the LoRARequest that serves all requests, or None.
        routing: captures the experts of the tokens, where completions are to name them and vLLM does not return them.
        support: keeps the ids that the tokens are sampled from, where completions are to name them.
        graphs: CUDA graphs of the part of a decode step that follows the model's layers, where the engine has them.

    Attributes:
        shared: whether several ranks run the engine, and must step together.
        cached_tokens: how many prompt tokens came from the prefix cache, over all requests whose prompt was read.
        prompt_tokens: how many prompt tokens these requests have in all.
    """

    shared = False

    def __init__(
        self,
        llm: Any,
        params: Mapping[str, Any],
        adapter: Any = None,
        routing: RoutingCapture | None = None,
        graphs: SamplingGraphs | None = None,
        support: KeptIds | None = None,
    ) -> None:
        self._llm, self._adapter, self._routing, self._graphs = llm, adapter, routing, graphs
        self._support = support
        self._engine, self._core = llm.llm_engine, llm.llm_engine.engine_core
        self._params = without_placeholders(dict(params), self._engine.vllm_config)
        self._pattern: Any = None
        self._text = bool(params["detokenize"] or params["logprobs"])
        self._arriving: dict[str, _Partial] = {}  # by vLLM's request id
        self._outside: dict[str, str] = {}  # the id in vLLM's finished outputs -> the id it works with
        self._ids: dict[int, str] = {}
        self._next = 0
        self.cached_tokens = self.prompt_tokens = 0

    def add(self, request: Request) -> int:
        """Queue a request and return its key, a number by which `step` returns its completion.

        Raises:
            VLLMValidationError: the prompt is too long or has ids outside the vocabulary, or the parameters are
                invalid.
            EngineError: vLLM would change the prompt of a request with images, or computes images differently from the
                trainer's model.
        """
        request_id = self._queue(request)
        key, self._next = self._next, self._next + 1
        self._arriving[request_id] = _Partial(key, prompt_tokens=len(request.prompt_ids), row=request.row)
        if self._text:
            self._outside[self._engine.output_processor.request_states[request_id].external_req_id] = request_id
        self._ids[key] = request_id
        return key

    def _queue(self, request: Request) -> str:
        """Queue a request in vLLM and return vLLM's internal id of it."""
        if request.images is not None:
            if (reason := causal_pictures(self._engine.vllm_config)) is not None:
                raise EngineError(reason)
            params = with_seed(self._params, request)
            key = str(self._llm.enqueue([prompt_of(request)], [params], self._adapter, use_tqdm=False)[0])
            try:
                refuse_another_prompt(request, self._engine.output_processor.request_states[key].prompt_token_ids)
            except EngineError:
                self._engine.abort_request([key], internal=True)
                raise
            return key
        if self._pattern is None:
            params = with_seed(self._params, request)
            self._pattern = internals.processed(self._llm, request.prompt_ids, params, self._adapter)
        params = copy.copy(self._pattern.sampling_params)
        for name, value in own_params(self._params, request).items():
            setattr(params, name, value)
        return internals.add_like(self._llm, self._pattern, request.prompt_ids, params, time.time())

    def abort(self, key: int) -> None:
        """Stop the request with this key and free its KV cache; does nothing if it has finished."""
        request_id = self._ids.pop(key, None)
        if request_id is not None:
            del self._arriving[request_id]
            self._engine.abort_request([request_id], internal=True)

    def step(self, more: bool) -> tuple[list[tuple[int, Completion]], bool]:
        """Run one step of the engine core.

        Args:
            more: whether the caller has requests that are unfinished or not added yet.

        Returns:
            The key and the completion of each request that finished in this step, and `more` unchanged; where several
            ranks share the engine, the second is whether any of them has more.
        """
        return self._step() if self._ids else [], more

    @property
    def busy(self) -> bool:
        """True where a request is unfinished."""
        return bool(self._ids)

    def _step(self) -> list[tuple[int, Completion]]:
        finished = self._text_step() if self._text else self._token_step()
        if self._ids and not self._engine.has_unfinished_requests():
            raise EngineError(f"vLLM lost {len(self._ids)} requests: it has none left, and these never finished.")
        return finished

    def _token_step(self) -> list[tuple[int, Completion]]:
        completions, finished = [], []
        for output in self._core.get_output().outputs:
            arriving = self._arriving.get(output.request_id)
            if arriving is None:  # aborted while this step was on its way
                continue
            arriving.token_ids += output.new_token_ids
            if output.new_logprobs is not None:
                arriving.logprobs.append(output.new_logprobs.logprobs[:, 0])  # column 0 is the sampled token's
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
                completion = self._with_more(output.request_id, completion, arriving.prompt_tokens, experts)
                completions.append((arriving.key, completion))
                self._forget(output.request_id)
                output.new_token_ids, output.new_logprobs = [], None  # vLLM would make an object of each
                finished.append(output)
        if finished:
            self._engine.output_processor.process_outputs(finished)  # drops vLLM's own record of the request
        return completions

    def _text_step(self) -> list[tuple[int, Completion]]:
        completions = []
        outputs = self._engine.step()
        if self._support is not None:
            self._take_masks(self._support, outputs)
        for output in outputs:
            request_id = self._outside.get(output.request_id)
            arriving = self._arriving.get(request_id or "")
            if request_id is not None and arriving is not None and output.finished:
                done = output.outputs[0]
                completion, experts = replace(completion_of(done), row=arriving.row), done.routed_experts
                completion = self._with_more(request_id, completion, arriving.prompt_tokens, experts)
                completions.append((arriving.key, completion))
                self.cached_tokens += output.num_cached_tokens or 0
                self.prompt_tokens += len(output.prompt_token_ids)
                self._forget(request_id)
        return completions

    def _take_masks(self, support: KeptIds, outputs: Sequence[Any]) -> None:
        """Move the ids that tokens were sampled from out of vLLM's outputs into `support`.

        Otherwise vLLM would turn the arrays of ids into lists when a request finishes.
        """
        for request_id, arriving in self._arriving.items():
            state = self._engine.output_processor.request_states.get(request_id)
            for mask in state.sampling_mask_chunks if state is not None else ():
                support.returned(request_id, arriving.prompt_tokens, mask.token_ids)
            if state is not None:
                state.sampling_mask_chunks.clear()
        for output in outputs:  # the ids of their last step
            mask, key = output.outputs[0].sampling_mask, self._outside.get(output.request_id, "")
            if key in self._arriving and mask is not None:
                for ids in mask.token_ids:
                    support.returned(key, self._arriving[key].prompt_tokens, ids)

    def _with_more(
        self, request_id: str, completion: Completion, prompt_tokens: int, experts: np.ndarray[Any, Any] | None
    ) -> Completion:
        """Return the completion of a finished request, completed by what else is known of its tokens.

        This is the experts that they were routed to, and the ids that they were sampled from (`Completion.support`).

        Args:
            request_id: vLLM's internal id.
            completion: token ids and log-probs.
            prompt_tokens: how many tokens the prompt has.
            experts: the experts as vLLM returned them, if it did.
        """
        tokens = len(completion.token_ids)
        support = None if self._support is None else self._support.take(request_id, prompt_tokens, tokens)
        return replace(completion, experts=self._experts(request_id, prompt_tokens + tokens, experts), support=support)

    def _experts(
        self, request_id: str, tokens: int, returned: np.ndarray[Any, Any] | None
    ) -> np.ndarray[Any, Any] | None:
        """Return the experts that a finished request's tokens were routed to, or None where they are not recorded.

        The last sampled token has none, because it never went through the model.

        Args:
            request_id: vLLM's internal id.
            tokens: how many tokens the request has, prompt included.
            returned: the experts as vLLM returned them, if it did.
        """
        if self._routing is not None:
            return self._routing.take(request_id, tokens - 1)
        if returned is not None and len(returned) != tokens - 1:
            raise EngineError(f"vLLM returned the experts of {len(returned)} tokens, where {tokens - 1} were computed.")
        return None if returned is None else returned.astype(np.int16)

    def _forget(self, request_id: str) -> None:
        del self._ids[self._arriving.pop(request_id).key]

    @contextmanager
    def open(self) -> Iterator[EngineStream]:
        """Prepare the engine for the stream's requests, and clean up afterwards.

        Unfinished requests are aborted at the end, or the next run would finish them first.
        """
        scheduler = self._core.engine_core.scheduler
        holds = hasattr(scheduler, "holding") and not self._text
        try:
            if self._support is not None:
                self._support.open(forbidden(self._params))
            with self._holding(scheduler) if holds else nullcontext():
                yield self
        finally:
            for key in list(self._ids):
                EngineStream.abort(self, key)  # at once: a ReplicaStream would agree on it with the other ranks first
            if self._routing is not None:
                self._routing.clear()
            if self._support is not None:
                self._support.close()

    @contextmanager
    def _holding(self, scheduler: Any) -> Iterator[None]:
        """Make the scheduler return a request's tokens only when it finishes, with log-probs but without ranks."""
        scheduler.holding = True
        if self._graphs is not None:
            self._graphs.active = True
        try:
            with without_ranks(scheduler, self._engine.vllm_config.device_config.device):
                yield
        finally:
            scheduler.holding = False
            if self._graphs is not None:
                self._graphs.active = False


def collect(stream: EngineStream, requests: Iterable[Request]) -> list[Completion]:
    """Open a stream, run the requests in it to their end, and return one completion per request, in order."""
    with stream.open():
        keys = [stream.add(request) for request in requests]
        completions: dict[int, Completion] = {}
        while len(completions) < len(keys):
            completions.update(stream.step(True)[0])
    return [completions[key] for key in keys]


_HAS_EVENTS, _HAS_MORE, _GAVE_UP = range(3)


class ReplicaStream(EngineStream):
    """A stream for one engine that several ranks run, each rank with its own requests.

    Before a step the ranks exchange three flags each, and events (requests to add or abort) only where a flag announces
    some. Events are applied in the order of the ranks, so every rank's scheduler sees the same requests. Each request
    carries its own seed, so random numbers that a rank draws elsewhere do not matter. A rank whose requests have
    finished keeps stepping until no rank has any.

    Args:
        group: the ranks that run the engine. The other arguments are those of `EngineStream`.
    """

    shared = True

    def __init__(
        self,
        llm: Any,
        params: Mapping[str, Any],
        adapter: Any,
        group: internals.Replica,
        routing: RoutingCapture | None = None,
        support: KeptIds | None = None,
    ) -> None:
        super().__init__(llm, params, adapter, routing, support=support)
        self._group, self._rank = group, group.rank_in_group
        self._events: list[tuple[int, Request | None]] = []  # (key, what to add) or (key, None) to abort
        self._mine: dict[int, int] = {}  # key in the engine -> key given out
        self._places: dict[tuple[int, int], int] = {}  # (rank, key given out) -> key in the engine
        self._given = 0
        self._over = False

    def add(self, request: Request) -> int:
        """Queue a request, which the next step adds on every rank, and return its key on this rank."""
        key, self._given = self._given, self._given + 1
        self._events.append((key, request))
        return key

    def abort(self, key: int) -> None:
        """Let the next step stop the request with this key, and free its KV cache, on every rank."""
        self._events.append((key, None))

    def step(self, more: bool) -> tuple[list[tuple[int, Completion]], bool]:
        """Run one step of the engine core, on every rank of the replica.

        Args:
            more: whether this rank has requests that are unfinished or not added yet.

        Returns:
            The key and the completion of each request of this rank that finished, and whether any rank has more.
        """
        anyone = self._exchange(more)
        finished = self._step() if self._ids else []
        mine = [(self._mine.pop(key), completion) for key, completion in finished if key in self._mine]
        return mine, anyone

    @property
    def busy(self) -> bool:
        """True where a request of any rank is unfinished, or one of this rank waits to be added or aborted."""
        return bool(self._ids or self._events)

    def _exchange(self, more: bool, gave_up: bool = False) -> bool:
        """Exchange the added and aborted requests of all ranks and apply them; return whether any rank has more.

        Args:
            more: whether this rank has requests that are unfinished or not added yet.
            gave_up: whether this rank leaves the stream because of an error.

        Raises:
            EngineError: another rank gave up.
        """
        flags = torch.tensor([bool(self._events), more or bool(self._events), gave_up], dtype=torch.uint8)
        everyone = [torch.empty_like(flags) for _ in range(self._group.world_size)]
        torch.distributed.all_gather(everyone, flags, group=self._group.cpu_group)
        stopped = [rank for rank, theirs in enumerate(everyone) if theirs[_GAVE_UP]]
        if stopped:
            self._over = True
            if gave_up:
                return False
            raise EngineError(
                f"Rank {stopped[0]} of this rank's replica gave up the rollout. Its own error says why; this rank "
                "stops with it, for they share one engine."
            )
        if any(theirs[_HAS_EVENTS] for theirs in everyone):
            gathered: list[Any] = [None] * self._group.world_size
            torch.distributed.all_gather_object(gathered, self._events, group=self._group.cpu_group)
            self._events = []
            for rank, events in enumerate(gathered):
                self._apply(rank, events)
        anyone = any(bool(theirs[_HAS_MORE]) for theirs in everyone)
        self._over = not anyone
        return anyone

    def _apply(self, rank: int, events: list[tuple[int, Request | None]]) -> None:
        for given, request in events:
            if request is None:
                place = self._places.pop((rank, given), None)
                if place is not None:
                    self._mine.pop(place, None)
                    super().abort(place)
                continue
            place = self._places[rank, given] = super().add(request)
            if rank == self._rank:
                self._mine[place] = given

    @contextmanager
    def open(self) -> Iterator[EngineStream]:
        """Prepare the engine for the stream's requests, and clean up afterwards.

        A rank that leaves before all have finished tells the others, which would wait for it.
        """
        try:
            with super().open():
                yield self
        finally:
            if not self._over:
                self._exchange(False, gave_up=True)
