"""A stream over the ranks of one replica, which agree on nothing but the order of what is added and aborted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from trlx_hybrid.errors import EngineError
from trlx_hybrid.types import Completion, Request

from .streaming import EngineStream

_HAS_EVENTS, _HAS_MORE, _GAVE_UP = range(3)


class AgreeingStream(EngineStream):
    """Each rank's own requests in one engine that all ranks run.

    Before a step the ranks exchange three flags each, and events only where a flag announces some. Events are applied
    in the order of the ranks, so every rank's scheduler sees the same requests; each request carries its own seed, so
    what else a rank has drawn does not matter. A rank that has finished keeps stepping until none has more.

    Args:
        group: the replica's ranks, as vLLM keeps them (`cpu_group`, `world_size`, `rank_in_group`).
    """

    shared = True

    def __init__(self, llm: Any, params: Mapping[str, Any], adapter: Any, group: Any) -> None:
        super().__init__(llm, params, adapter)
        self._group, self._rank = group, group.rank_in_group
        self._events: list[tuple[int, Request | None]] = []  # (key, what to add) or (key, None) to abort
        self._mine: dict[int, int] = {}  # key in the engine -> key given out
        self._places: dict[tuple[int, int], int] = {}  # (rank, key given out) -> key in the engine
        self._given = 0
        self._over = False

    def add(self, request: Request) -> int:
        """Queue a request, with the next step."""
        key, self._given = self._given, self._given + 1
        self._events.append((key, request))
        return key

    def abort(self, key: int) -> None:
        """Free what a request holds, with the next step."""
        self._events.append((key, None))

    def step(self, more: bool) -> tuple[list[tuple[int, Completion]], bool]:
        """One step of every rank's engine core."""
        anyone = self._exchange(more)
        finished = self._step() if self._ids else []
        mine = [(self._mine.pop(key), completion) for key, completion in finished if key in self._mine]
        return mine, anyone

    @property
    def busy(self) -> bool:
        """Whether any rank's request is unfinished, or one of this rank waits to be added."""
        return bool(self._ids or self._events)

    def _exchange(self, more: bool, gave_up: bool = False) -> bool:
        """Agree on the events of all ranks; returns whether any rank has more."""
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
        """While it is used. A rank that leaves before all have finished tells the others, who would wait for it."""
        try:
            with super().open():
                try:
                    yield self
                finally:
                    self._abort_all()
        finally:
            if not self._over:
                self._exchange(False, gave_up=True)

    def _abort_all(self) -> None:
        for key in list(self._ids):
            super().abort(key)
