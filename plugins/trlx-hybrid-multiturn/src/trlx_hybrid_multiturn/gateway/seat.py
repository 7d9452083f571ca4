"""The place of one episode at the gateway, where the requests of its agent meet the trainer.

Requests arrive on the server's event loop. The episode takes them, and answers, in the trainer's thread.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .asked import Asked, Message, Said, compared
from .errors import RefusedError

CUT = "context_length_exceeded"
"""OpenAI's code for a conversation that is too long. Agents shorten their history when they see it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A request that the episode has to answer.

    Attributes:
        asked: the request.
        branch: the number of the conversation that it continues, or begins.
        new: its messages that the model has not been shown yet in this conversation.
        answer: gets the model's message.
    """

    asked: Asked
    branch: int
    new: Sequence[Message]
    answer: asyncio.Future[Said]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The end of an agent.

    Attributes:
        reward: the agent's reward; None where it gave none.
        failure: why the episode cannot be trained on; None where it can.
    """

    reward: float | None = None
    failure: str | None = None


@dataclass(slots=True, eq=False)
class Branch:
    """One conversation of an episode.

    Attributes:
        tools: the tools that the model is offered.
        said: its messages as they are compared, the model's included.
        waits: whether a request of it is not answered yet.
    """

    tools: list[Any]
    said: list[Any] = field(default_factory=list)
    waits: bool = True


class Seat:
    """The place of one episode at the gateway.

    A request continues the conversation whose messages it begins with, and which ended with the model's. Where there is
    none, it begins a new one: a branch of the episode. A request that a client sends again, as official clients do when
    the connection breaks, gets the answer of the first.

    Args:
        loop: the server's event loop.
        count: returns the number of tokens of a request; called in threads.
        branching: whether an episode may have several branches. If not, a request that begins another is refused, and
            the episode fails.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, count: Callable[[Asked], int], *, branching: bool = True
    ) -> None:
        self.count = count
        self._loop, self._lock, self._branching = loop, threading.Lock(), branching
        self._branches: list[Branch] = []
        self._answers: dict[str, asyncio.Future[Said]] = {}  # by the request
        self._events: deque[Turn | Ended] = deque()
        self._waiting: Callable[[Turn | Ended], None] | None = None
        self._over: RefusedError | None = None
        self._failure: str | None = None

    # --- the server's side --------------------------------------------------------------------------------------------

    async def ask(self, asked: Asked, *, again: bool | None = None) -> Said:
        """Return the model's next message.

        Args:
            asked: the request.
            again: whether the client says that it sends the request again; None where it does not say. An equal request
                is then taken for the same one.

        Raises:
            RefusedError: there is no room for a message, the episode is over, or it may have one branch only.
        """
        messages = [compared(message) for message in asked.messages]
        key = json.dumps([messages, list(asked.tools)], sort_keys=True, default=str)
        if again is not False and key in self._answers:
            return await asyncio.shield(self._answers[key])
        if self._over is not None:
            raise self._over
        number = self._branch(asked, messages)
        branch = self._branches[number]
        answer: asyncio.Future[Said] = self._loop.create_future()
        answer.add_done_callback(lambda done: done.cancelled() or done.exception())  # a client may be gone
        self._answers[key], branch.waits = answer, True
        self._put(Turn(asked=asked, branch=number, new=asked.messages[len(branch.said) :], answer=answer))
        return await asyncio.shield(answer)

    def _branch(self, asked: Asked, messages: Sequence[Any]) -> int:
        """Return the number of the branch that a request continues, the longest of those that it begins with; a new one
        where there is none.

        Args:
            messages: the request's messages as they are compared.
        """
        continued = [
            (len(branch.said), number)
            for number, branch in enumerate(self._branches)
            if not branch.waits and branch.tools == list(asked.tools) and branch.said == messages[: len(branch.said)]
        ]
        continued = [(length, number) for length, number in continued if length < len(messages)]
        if continued:
            return max(continued, key=lambda found: found[0])[1]
        if self._branches and not self._branching:
            self._failure = self._failure or (
                "its messages or tools are others than before, or two requests are open at a time, and this run trains "
                "on one conversation for an episode"
            )
            raise RefusedError(
                "The messages or tools are others than before, or another request is open. This run trains on one "
                "conversation for an episode.",
                parameter="messages",
            )
        self._branches.append(Branch(list(asked.tools)))
        return len(self._branches) - 1

    def ended(self, reward: float | None, failure: str | None = None) -> None:
        """Note that the agent has ended. May be called from any thread.

        Args:
            reward: its reward.
            failure: why it failed; None where it has not.
        """
        reason = failure or self._failure
        self._put(Ended(reward=None if reason else reward, failure=reason))

    # --- the episode's side -------------------------------------------------------------------------------------------

    def take(self, report: Callable[[Turn | Ended], None]) -> None:
        """Pass the next request, or the agent's end, to `report`, at once or when it comes, from any thread."""
        with self._lock:
            if not self._events:
                self._waiting = report
                return
            event = self._events.popleft()
        report(event)

    def answer(self, turn: Turn, said: Said) -> None:
        """Answer a request. From then on its messages and the answer are the conversation."""

        def told() -> None:
            branch = self._branches[turn.branch]
            branch.said += [compared(message) for message in (*turn.new, said.message)]
            branch.waits = False
            if not turn.answer.done():
                turn.answer.set_result(said)

        self._loop.call_soon_threadsafe(told)

    def refuse(self, turn: Turn, error: RefusedError) -> None:
        """Refuse a request. Its conversation can be continued from where it was; one that it would have begun does not
        exist."""

        def told() -> None:
            branch = self._branches[turn.branch]
            branch.waits = not branch.said  # nothing can be its continuation
            if not turn.answer.done():
                turn.answer.set_exception(error)

        self._loop.call_soon_threadsafe(told)

    def end(self, error: RefusedError) -> None:
        """Refuse all open requests, and all later ones."""

        def told() -> None:
            self._over = error
            for answer in self._answers.values():
                if not answer.done():
                    answer.set_exception(error)

        self._loop.call_soon_threadsafe(told)

    def _put(self, event: Turn | Ended) -> None:
        with self._lock:
            report, self._waiting = self._waiting, None
            if report is None:
                self._events.append(event)
                return
        report(event)
