"""The actor that environments live in, several side by side."""

from __future__ import annotations

import asyncio
import inspect
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future as Started
from contextlib import contextmanager
from typing import Any

from .quarters import show_gpus
from .reply import Reply
from .shipment import Shipment

ORDER_SECONDS = 10.0  # for a call that was made before this one to arrive


class EnvironmentHost:
    """Makes environments and calls them, each in the thread that its call came in.

    Args:
        shipment: of what makes one.
        gpus: that they may use.
    """

    def __init__(self, shipment: Shipment, gpus: Sequence[str]) -> None:
        show_gpus(gpus)
        self._environments: dict[int, Any] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._starting = threading.Lock()
        self._turns: dict[int, int] = {}
        self._turning = threading.Condition()
        self._make = Reply.of(shipment.opened)

    def ready(self) -> tuple[Reply, str]:
        """Whether what makes environments could be loaded; and where this is."""
        import ray

        reply = Reply() if not self._make.text else self._make
        return reply, f"node {ray.get_runtime_context().get_node_id()[:12]}, pid {os.getpid()}"

    def make(self, key: int) -> Reply:
        """A new environment, by this number."""

        def made() -> None:
            self._environments[key] = self._make.result()()

        return Reply.of(made)

    def call(
        self, key: int, method: str, args: Sequence[Any], kwargs: Mapping[str, Any], turn: int | None = None
    ) -> Reply:
        """Call a method of an environment. Coroutines run on one event loop for all, where clients may be shared.

        Args:
            turn: which of the calls it is that have to start in their order: a trainer's own event loop starts the
                coroutines of one turn in that order, and what an environment answers can depend on it.
        """

        def called() -> Any:
            with self._in_turn(key, turn):
                answer = getattr(self._environments[key], method)(*args, **kwargs)
                if inspect.iscoroutine(answer):
                    answer = asyncio.run_coroutine_threadsafe(answer, self._event_loop())
            return answer.result() if isinstance(answer, Started) else answer

        return Reply.of(called)

    def read(self, key: int, attribute: str) -> Reply:
        """What an environment has in an attribute."""
        return Reply.of(lambda: getattr(self._environments[key], attribute))

    def drop(self, keys: Iterable[int]) -> None:
        """Forget environments."""
        for key in keys:
            self._environments.pop(key, None)
            self._turns.pop(key, None)

    @contextmanager
    def _in_turn(self, key: int, turn: int | None) -> Iterator[None]:
        if turn is None:
            yield
            return
        with self._turning:
            self._turning.wait_for(lambda: self._turns.get(key, 0) >= turn, ORDER_SECONDS)
        try:
            yield
        finally:
            with self._turning:
                self._turns[key] = turn + 1
                self._turning.notify_all()

    def _event_loop(self) -> asyncio.AbstractEventLoop:
        with self._starting:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, name="environments", daemon=True).start()
            return self._loop
