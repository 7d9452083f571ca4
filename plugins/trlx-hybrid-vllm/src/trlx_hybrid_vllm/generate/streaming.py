"""Streams, to which requests can be added while the engine decodes others, for engines on one rank or on several."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from trlx_hybrid.contract.types import Completion, Request
from trlx_hybrid.errors import EngineError

from ..private.stepping import Stepper

if TYPE_CHECKING:
    from vllm import LLM
    from vllm.lora.request import LoRARequest

    from ..private.distributed import Replica
    from ..private.recorders import RoutingCapture
    from ..private.sampling_graphs import SamplingGraphs
    from .support import KeptIds


class EngineStream:
    """A stream of requests to an engine that runs on one rank: requests can be added while others are being decoded.

    Args:
        llm: vLLM's LLM.
        params: arguments of `SamplingParams` that all requests share.
        adapter: the LoRARequest with which all requests are sampled, or None.
        routing: records the experts of the tokens, if completions must list them and vLLM does not return them.
        graphs: CUDA graphs of the part of a decode step that follows the model's layers, where the engine has them.
        support: collects the ids that each token is sampled from, if completions must list them.

    Attributes:
        shared: whether several ranks run the engine, and must step together.
    """

    shared = False

    def __init__(
        self,
        llm: LLM,
        params: Mapping[str, Any],
        adapter: LoRARequest | None = None,
        routing: RoutingCapture | None = None,
        graphs: SamplingGraphs | None = None,
        support: KeptIds | None = None,
    ) -> None:
        self._stepper = Stepper(llm, params, adapter, routing, graphs, support)
        self._ids: dict[int, str] = {}  # key -> vLLM's id of the request
        self._keys: dict[str, int] = {}
        self._next = 0

    @property
    def cached_tokens(self) -> int:
        """The number of prompt tokens that came from the prefix cache, over all requests whose prompt was read."""
        return self._stepper.cached_tokens

    @property
    def prompt_tokens(self) -> int:
        """The number of prompt tokens, cached or not, of all requests whose prompt was read."""
        return self._stepper.prompt_tokens

    def add(self, request: Request) -> int:
        """Queue a request and return its key, a number by which `step` returns its completion."""
        request_id = self._stepper.queue(request)
        key, self._next = self._next, self._next + 1
        self._ids[key], self._keys[request_id] = request_id, key
        return key

    def abort(self, key: int) -> None:
        """Stop the request with this key and free its KV cache; does nothing if it has finished."""
        request_id = self._ids.pop(key, None)
        if request_id is not None:
            del self._keys[request_id]
            self._stepper.abort(request_id)

    def sampled(self, key: int) -> Completion:
        """Return the tokens that the unfinished request with this key has sampled so far."""
        return self._stepper.sampled(self._ids[key])

    def step(self, more: bool) -> tuple[list[tuple[int, Completion]], bool]:
        """Run one step of vLLM's engine core, if any request is unfinished.

        Args:
            more: whether the caller has requests that are unfinished or not added yet.

        Returns:
            The key and the completion of each request that finished in this step; and `more` unchanged, or, where
            several ranks run the engine, whether `more` is true on any of them.
        """
        return self._step() if self._ids else [], more

    @property
    def busy(self) -> bool:
        """True where a request is unfinished."""
        return bool(self._ids)

    def _step(self) -> list[tuple[int, Completion]]:
        finished = [(self._keys.pop(request_id), completion) for request_id, completion in self._stepper.step()]
        for key, _ in finished:
            del self._ids[key]
        return finished

    @contextmanager
    def open(self) -> Iterator[EngineStream]:
        """Prepare the engine for the stream's requests; when the context ends, abort the unfinished ones."""
        try:
            with self._stepper.open():
                yield self
        finally:
            self._ids, self._keys = {}, {}


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

    Before a step, each rank sends three flags to the others, and events (requests to add or abort) only if a flag
    announces some. Events are applied in the order of the ranks, so every rank's scheduler sees the same requests. Each
    request carries its own seed, so random numbers that a rank draws elsewhere do not matter. A rank whose requests
    have finished keeps stepping until no rank has any.

    Args:
        llm: vLLM's LLM.
        params: arguments of `SamplingParams` that all requests share.
        adapter: the LoRARequest with which all requests are sampled, or None.
        group: the ranks that run the engine.
        routing: records the experts of the tokens, if completions must list them and vLLM does not return them.
        support: collects the ids that each token is sampled from, if completions must list them.
    """

    shared = True

    def __init__(
        self,
        llm: LLM,
        params: Mapping[str, Any],
        adapter: LoRARequest | None,
        group: Replica,
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
        """Queue a request, which the next step adds on every rank, and return its key.

        The key is a number by which this rank's `step` returns the request's completion.
        """
        key, self._given = self._given, self._given + 1
        self._events.append((key, request))
        return key

    def abort(self, key: int) -> None:
        """Let the next step stop the request with this key, and free its KV cache, on every rank."""
        self._events.append((key, None))

    def sampled(self, key: int) -> Completion:
        """Return the tokens that this rank's unfinished request with this key has sampled so far."""
        place = self._places.get((self._rank, key))
        return Completion(token_ids=[], logprobs=[]) if place is None else super().sampled(place)

    def step(self, more: bool) -> tuple[list[tuple[int, Completion]], bool]:
        """Run one step of the engine core, on every rank of the replica.

        Args:
            more: whether this rank has requests that are unfinished or not added yet.

        Returns:
            The key and the completion of each request of this rank that finished, and whether `more` is true on any
            rank.
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
        """Exchange the added and aborted requests of all ranks, and apply them; return whether `more` is true anywhere.

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
        """Prepare the engine for the stream's requests; when the context ends, abort unfinished requests and clean up.

        A rank that leaves before the requests of all ranks have finished tells the others, which would wait for it.
        """
        try:
            with super().open():
                yield self
        finally:
            if not self._over:
                self._exchange(False, gave_up=True)
