"""The worker in a process in which agents run: it passes on what they ask, and what the trainer answers."""

from __future__ import annotations

import contextlib
import itertools
import pickle
import socket
import threading
from concurrent.futures import Future
from typing import Any

from trlx_hybrid.contract.conversation import images_of
from trlx_hybrid.interprocess import plain_data

from ..tools.worker_process import receive, send
from .asked import Asked
from .errors import RefusedError
from .host import Begun, OwnHost
from .seat import Ended, Seat, Turn

COUNT_SECONDS = 60.0
"""Seconds within which the trainer counts the tokens of a request."""


class Worker:
    """Passes on what agents ask, and what the trainer answers.

    Args:
        channel: the socket to the trainer.
    """

    def __init__(self, channel: socket.socket) -> None:
        self._channel, self._sending = channel, threading.Lock()
        self._host: OwnHost
        self._seats: dict[int, Seat] = {}
        self._turns: dict[tuple[int, int], Turn] = {}  # those that wait for an answer
        self._questions = itertools.count()
        self._counts: dict[int, Future[int]] = {}

    def serve(self) -> None:
        """Serve until the trainer closes the connection."""
        _, message = receive(self._channel)
        try:
            agent = pickle.loads(message)
        except BaseException as error:  # a module may even exit when it is imported
            self._send(0, kind="refused", reason=f"{type(error).__name__}: {error}")
            return
        self._host = OwnHost(agent)
        self._send(0, kind="loaded")
        while True:
            episode, message = receive(self._channel)
            name, *given = pickle.loads(message)
            getattr(self, f"_{name}")(episode, *given)

    def _begin(self, episode: int, row: Any, prompt: Any, branching: bool) -> None:
        def count(asked: Asked) -> int:
            return self._count(episode, asked)

        def heard(places: list[tuple[int, int]]) -> None:
            self._send(episode, kind="heard", places=places)

        def passed(event: Turn | Ended) -> None:
            self._pass(episode, event)
            seat.take(passed)

        seat = self._seats[episode] = self._host.begin(Begun(row, prompt, branching, count, heard))
        seat.take(passed)

    def _pass(self, episode: int, event: Turn | Ended) -> None:
        """Send a request, or the end of an agent, to the trainer."""
        if isinstance(event, Ended):
            self._send(episode, kind="ended", reward=event.reward, failure=event.failure)
            return
        place = event.place
        self._turns[episode, event.number] = event
        self._send(
            episode,
            kind="asked",
            number=event.number,
            asked=fields_of(event.asked, whole=place.after is None),
            place={"branch": place.branch, "after": place.after, "new": list(place.new), "draw": place.draw},
        )

    def _answer(self, episode: int, number: int, said: Any) -> None:
        self._seats[episode].answer(self._turns.pop((episode, number)), said)

    def _refuse(self, episode: int, number: int, error: dict[str, Any]) -> None:
        self._seats[episode].refuse(self._turns.pop((episode, number)), RefusedError(**error))

    def _end(self, episode: int, error: dict[str, Any]) -> None:
        self._seats[episode].end(RefusedError(**error))

    def _close(self, episode: int) -> None:
        if episode not in self._seats:
            return  # its row could not be sent
        self._host.end(self._seats.pop(episode))
        for open_one in [key for key in self._turns if key[0] == episode]:
            del self._turns[open_one]

    def _count(self, episode: int, asked: Asked) -> int:
        """Ask the trainer, which has the tokenizer, how many tokens a request has."""
        question = next(self._questions)
        count = self._counts[question] = Future()
        self._send(episode, kind="count", question=question, asked=fields_of(asked, whole=True))
        try:
            return count.result(COUNT_SECONDS)
        except TimeoutError:
            text = f"The trainer did not count the tokens within {COUNT_SECONDS:g} s."
            raise RefusedError(text, status=503) from None
        finally:
            del self._counts[question]

    def _counted(self, episode: int, question: int, counted: int | dict[str, Any]) -> None:
        count = self._counts.get(question)
        if count is None:
            return
        if isinstance(counted, int):
            count.set_result(counted)
        else:
            count.set_exception(RefusedError(**counted))

    def _send(self, episode: int, **content: Any) -> None:
        body = plain_data.dumps(content, classes=False)
        with self._sending, contextlib.suppress(OSError):  # the trainer has gone, and this process ends
            send(self._channel, episode, body)


def fields_of(asked: Asked, *, whole: bool) -> dict[str, Any]:
    """Return the fields of a request that the trainer needs.

    Args:
        asked: the request.
        whole: whether the trainer renders all of its messages, and not only those after what was said. The messages
            before those are sent for their images only.
    """
    fields = {name: getattr(asked, name) for name in asked.__dataclass_fields__}
    if not whole:
        fields["messages"] = fields["messages"] if images_of(asked.messages) else []
        fields["raw"] = None if asked.raw is None else asked.raw[:0]
    return fields
