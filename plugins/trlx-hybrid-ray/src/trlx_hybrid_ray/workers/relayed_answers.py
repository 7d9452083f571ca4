"""What workers answer that were called through relays: a list from each node."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from .dispatch import Deal, restricted
from .failure import GRACE, Call, Fault, Ledger, WorkerError, overdue, verdict
from .fan_out import Branch
from .future import left
from .ray_answers import fault, is_timeout
from .register import Rule, timeout
from .relay import RelayedError
from .sending import once


class RelayedAnswers:
    """Calls every relay that has a worker to call, once.

    Args:
        relays: the actor of each branch.
        ticket: number of the call, from 1: workers are called in this order.
    """

    def __init__(
        self,
        crew: Ledger,
        call: Call,
        relays: Mapping[Branch, Any],
        ticket: int,
        rule: Rule,
        deal: Deal,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> None:
        self._crew, self._call, self._ticket = crew, call, ticket
        position_of = {rank: position for position, rank in enumerate(deal.ranks)}
        args = [once(value, len(deal.ranks)) for value in args]
        kwargs = {name: once(value, len(deal.ranks)) for name, value in kwargs.items()}
        self._parts: dict[Any, tuple[Any, list[int]]] = {}  # reference -> its relay, and the positions it is of
        try:
            for branch, relay in relays.items():
                positions = [position_of[rank] for rank in branch.ranks if rank in position_of]
                # A relay without workers to call is called all the same: it has to hear of every ticket.
                sent = relay.call.remote(ticket, rule.entry, restricted(deal, positions), args, kwargs)
                self._parts[sent] = relay, positions
        except BaseException:  # something cannot be pickled
            for relay in list(relays.values())[len(self._parts) :]:
                relay.call.remote(ticket, rule.entry, restricted(deal, []), (), {})
            raise

    def all(self, seconds: float) -> list[Any]:
        """See `Answers`."""
        try:
            parts = ray.get(list(self._parts), timeout=timeout(seconds))
        except RayError as error:
            reason = self._reason(error, seconds)
            raise reason from reason.__cause__
        found: list[Any] = [None] * len(self._call.ranks)
        for part, (_, positions) in zip(parts, self._parts.values(), strict=True):
            for position, value in zip(positions, part, strict=True):
                found[position] = value
        return found

    def arriving(self, seconds: float) -> Iterator[tuple[int, Any]]:
        """See `Answers`. All answers of a node arrive together."""
        until = time.monotonic() + seconds
        pending = list(self._parts)
        while pending:
            ready, pending = ray.wait(pending, num_returns=1, timeout=timeout(left(until)))
            try:
                part = ray.get(ready[0] if ready else pending[0], timeout=timeout(left(until)))
            except RayError as error:
                reason = self._reason(error, seconds)
                raise reason from reason.__cause__
            yield from zip(self._parts[ready[0]][1], part, strict=True)

    def _reason(self, error: RayError, seconds: float) -> WorkerError:
        if is_timeout(error):
            return overdue(self._call, self._missing() or [len(self._call.ranks) - 1], seconds)
        ready, _ = ray.wait(list(self._parts), num_returns=len(self._parts), timeout=2 * GRACE, fetch_local=False)
        faults = [found for reference in ready for found in self._faults(reference)]
        return verdict(self._call, faults or [Fault(0, "raised", error)], self._crew)

    def _faults(self, reference: Any) -> list[Fault]:
        _, positions = self._parts[reference]
        try:
            ray.get(reference, timeout=GRACE)
        except RayError as error:
            cause = error.cause if isinstance(error, RayTaskError) else None
            if isinstance(cause, RelayedError):
                return [replace(found, position=positions[found.position]) for found in cause.faults]
            return [fault(positions[0], error)] if positions else []  # the relay is gone, and most likely its node
        return []

    def _missing(self) -> list[int]:
        references = list(self._parts)
        _, pending = ray.wait(references, num_returns=len(references), timeout=0, fetch_local=False)
        asked = [self._parts[reference][0].missing.remote(self._ticket) for reference in pending]
        told = set(ray.wait(asked, num_returns=len(asked), timeout=GRACE)[0]) if asked else set()
        found: list[int] = []
        for reference, question in zip(pending, asked, strict=True):
            _, positions = self._parts[reference]
            if question in told:
                found += [positions[number] for number in ray.get(question, timeout=GRACE)]
            else:
                found += positions
        return sorted(found)

    def done(self) -> bool:
        """See `Answers`."""
        ready, _ = ray.wait(list(self._parts), num_returns=len(self._parts), timeout=0, fetch_local=False)
        return len(ready) == len(self._parts)

    def references(self) -> list[Any] | None:
        """See `Answers`: answers come by node."""
        return None

    def cancel(self) -> None:
        """Stop waiting; what has not begun on the workers stays queued there, behind nothing that anyone waits for."""
        for reference in self._parts:
            with contextlib.suppress(RayError, ValueError, TypeError):
                ray.cancel(reference)
