"""The place of one episode at the gateway, where the requests of its agent meet the trainer.

Requests arrive on the server's event loop. The episode takes them, and answers, in the trainer's thread.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from .asked import Asked, Said
from .errors import RefusedError
from .tree import Place, Tree

CUT = "context_length_exceeded"
"""OpenAI's code for a conversation that is too long. Agents shorten their history when they see it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A request that the episode has to answer.

    Attributes:
        asked: the request.
        place: its place among what was said.
        number: its number among the requests of the episode.
    """

    asked: Asked
    place: Place
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The end of an agent.

    Attributes:
        reward: the agent's reward; None where it gave none.
        failure: why the episode cannot be trained on; None where it can.
    """

    reward: float | None = None
    failure: str | None = None


class Events:
    """The requests of one agent, and its end, which an episode takes one after the other.

    Attributes:
        heard: the messages of the model that the agent has received, by `Said.place`. Of a request that the agent did
            not wait for, it has received none.
    """

    def __init__(self) -> None:
        self.heard: set[tuple[int, int]] = set()
        self._lock = threading.Lock()
        self._events: deque[Turn | Ended] = deque()
        self._waiting: Callable[[Turn | Ended], None] | None = None

    def take(self, report: Callable[[Turn | Ended], None]) -> None:
        """Pass the next request, or the agent's end, to `report`, at once or when it comes, from any thread."""
        with self._lock:
            if not self._events:
                self._waiting = report
                return
            event = self._events.popleft()
        report(event)

    def put(self, event: Turn | Ended) -> None:
        """Add a request, or the agent's end. May be called from any thread."""
        with self._lock:
            report, self._waiting = self._waiting, None
            if report is None:
                self._events.append(event)
                return
        report(event)

    def ended(self, reward: float | None, failure: str | None = None) -> None:
        """Note that the agent has ended. May be called from any thread.

        Args:
            reward: its reward.
            failure: why it failed; None where it has not.
        """
        self.put(Ended(reward=None if failure else reward, failure=failure))


class Answers(Protocol):
    """The place of one episode at the gateway, as the episode sees it, which takes requests and answers them."""

    heard: set[tuple[int, int]]

    def take(self, report: Callable[[Turn | Ended], None]) -> None:
        """Pass the next request, or the agent's end, to `report`."""

    def ended(self, reward: float | None, failure: str | None = None) -> None:
        """Note that the agent has ended."""

    def answer(self, turn: Turn, said: Said) -> None:
        """Answer a request. Its answer can be continued from then on."""

    def refuse(self, turn: Turn, error: RefusedError) -> None:
        """Refuse a request. What was said before can be continued from where it was."""

    def end(self, error: RefusedError) -> None:
        """Refuse all open requests, and all later ones."""


class Seat(Events):
    """The place of one episode at the gateway of this process.

    A request continues what was said, or begins another branch (`tree.Tree`). A request that a client sends again, as
    official clients do when the connection breaks, gets the answer of the first.

    Args:
        loop: the server's event loop.
        count: returns the number of tokens of a request; called in threads.
        tree: the tree of what is said. Where it refuses a branch, the episode fails.
        noted: called with the messages that the agent has received, once for each, before what it does next.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        count: Callable[[Asked], int],
        tree: Tree,
        noted: Callable[[list[tuple[int, int]]], None] = lambda places: None,
    ) -> None:
        super().__init__()
        self.count, self._noted = count, noted
        self._loop, self._tree = loop, tree
        self._answers: dict[str, asyncio.Future[Said]] = {}  # by the request
        self._asked: list[asyncio.Future[Said]] = []  # by the number of the request
        self._open: set[asyncio.Future[Said]] = set()
        self._over: RefusedError | None = None

    # --- the server's side --------------------------------------------------------------------------------------------

    async def ask(self, asked: Asked, *, again: bool | None = None, choice: int = 0) -> Said:
        """Return the model's next message.

        Args:
            asked: the request.
            again: whether the client says that it sends the request again; None where it does not say. An equal request
                is then taken for the same one.
            choice: the number of the message among those that the request asks for.

        Raises:
            RefusedError: there is no room for a message, the episode is over, or it may have one branch only.
        """
        more = [asked.max_tokens, list(asked.stop), asked.logprobs, choice]
        key = json.dumps([asked.compared, asked.form, *more], default=str)
        if again is not False and key in self._answers:
            return await asyncio.shield(self._answers[key])
        if self._over is not None:
            raise self._over
        place = self._tree.placed(asked)
        if place.after is not None:
            self.hear([place.after])
        answer: asyncio.Future[Said] = self._loop.create_future()
        self._open.add(answer)
        answer.add_done_callback(self._open.discard)
        answer.add_done_callback(lambda done: done.cancelled() or done.exception())  # a client may be gone
        self._answers[key] = answer
        self._asked.append(answer)
        self.put(Turn(asked=asked, place=place, number=len(self._asked) - 1))
        return await asyncio.shield(answer)

    def hear(self, places: Iterable[tuple[int, int]]) -> None:
        """Note messages of the model that the agent has received, by `Said.place`."""
        if fresh := [place for place in places if place not in self.heard]:
            self.heard.update(fresh)
            self._noted(fresh)

    def ended(self, reward: float | None, failure: str | None = None) -> None:
        """Note that the agent has ended. An episode of which a branch was refused fails."""
        super().ended(reward, failure or self._tree.refusal)

    # --- the episode's side -------------------------------------------------------------------------------------------

    def answer(self, turn: Turn, said: Said) -> None:
        """Answer a request. Its answer can be continued from then on."""

        def told() -> None:
            self._tree.answered(turn.place, said.compared(turn.asked))
            answer = self._asked[turn.number]
            if not answer.done():
                answer.set_result(said)

        self._loop.call_soon_threadsafe(told)

    def refuse(self, turn: Turn, error: RefusedError) -> None:
        """Refuse a request. What was said before can be continued from where it was."""

        def told() -> None:
            self._tree.refused(turn.place)
            answer = self._asked[turn.number]
            if not answer.done():
                answer.set_exception(error)

        self._loop.call_soon_threadsafe(told)

    def end(self, error: RefusedError) -> None:
        """Refuse all open requests, and all later ones."""

        def told() -> None:
            self._over = error
            for answer in [*self._open]:
                if not answer.done():
                    answer.set_exception(error)

        self._loop.call_soon_threadsafe(told)
