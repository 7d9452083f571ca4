"""A relay: one actor on each node, which calls the node's workers on the driver's behalf."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from .dispatch import Deal
from .failure import GRACE, Fault
from .ray_answers import fault
from .sending import sent


class RelayedError(Exception):
    """Some of a node's workers failed.

    Attributes:
        faults: theirs; positions are of the ranks that this relay called.
    """

    def __init__(self, faults: Sequence[Fault]) -> None:
        super().__init__(faults)
        self.faults = faults


class Relay:
    """Calls workers in the order of the driver's tickets, and waits for any number of calls at once.

    Args:
        workers: handles, by rank.
    """

    def __init__(self, workers: Mapping[int, Any]) -> None:
        self._workers = workers
        self._next = 1
        self._turn: asyncio.Condition | None = None
        self._waiting: dict[int, list[asyncio.Future[Any]]] = {}

    async def call(
        self, ticket: int, method: str, deal: Deal, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> list[Any]:
        """Call the workers of `deal`, as soon as all earlier tickets are sent.

        Returns:
            Their answers, by position.

        Raises:
            RelayedError: some failed. Raised at once, so that the driver does not wait for the others.
        """
        answers = await self._sent(ticket, method, deal, args, kwargs)
        if not answers:
            return []
        self._waiting[ticket] = answers
        try:
            await asyncio.wait(answers, return_when=asyncio.FIRST_EXCEPTION)
            if any(answer.done() and answer.exception() for answer in answers):
                await asyncio.wait(answers, timeout=GRACE)
                raise RelayedError(_faults(answers))
            return [answer.result() for answer in answers]
        finally:
            del self._waiting[ticket]

    async def _sent(
        self, ticket: int, method: str, deal: Deal, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> list[asyncio.Future[Any]]:
        # Ray starts an asyncio actor's calls in no certain order, and workers must be called in the driver's.
        self._turn = self._turn or asyncio.Condition()
        async with self._turn:
            await self._turn.wait_for(lambda: self._next == ticket)
            try:
                methods = [getattr(self._workers[rank], method).remote for rank in deal.ranks]
                return [asyncio.wrap_future(reference.future()) for reference in sent(methods, deal, args, kwargs)]
            finally:
                self._next += 1
                self._turn.notify_all()

    async def missing(self, ticket: int) -> list[int]:
        """Positions of the workers that have not answered."""
        answers = self._waiting.get(ticket, [])
        return [position for position, answer in enumerate(answers) if not answer.done()]


def _faults(answers: Sequence[asyncio.Future[Any]]) -> list[Fault]:
    errors = [answer.exception() if answer.done() else None for answer in answers]
    return [fault(position, error) for position, error in enumerate(errors) if error is not None]
