"""The host of agents: it starts the agent of each episode, and gives it an address at a gateway."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from trlx_hybrid.interprocess.deadline import in_thread

from ..tools.event_loop import DaemonLoop
from .asked import Asked, Message
from .errors import RefusedError
from .seat import Answers, Seat
from .server import gateway
from .tree import Tree

Agent = Callable[[str, Mapping[str, Any]], Any]
"""A coroutine function or a function of the base URL and the dataset's row; returns the reward, or None."""


@dataclass(frozen=True, slots=True)
class Begun:
    """The part of an episode that its agent's host needs.

    Attributes:
        row: the dataset's row.
        prompt: messages of the row's prompt.
        branching: whether the episode may have several branches.
        count: returns the number of tokens of a request; called in threads.
        heard: called with the messages of the model that the agent has received, see `Seat`.
    """

    row: Mapping[str, Any]
    prompt: list[Message]
    branching: bool
    count: Callable[[Asked], int]
    heard: Callable[[list[tuple[int, int]]], None] = lambda places: None


class Host(Protocol):
    """A place where agents run: this process, or others."""

    def prepare(self, episodes: int) -> None:
        """Prepare for so many episodes, before their time begins."""

    def begin(self, begun: Begun) -> Answers:
        """Start the agent of an episode. Its requests can be taken from what is returned."""

    def end(self, seat: Any) -> None:
        """End an episode: refuse its agent's requests, and end the agent. One that runs in a thread cannot be ended."""


class OwnHost:
    """The host that runs agents in this process: coroutines on one event loop, each function in a thread of its own.

    Args:
        agent: the agent.
    """

    def __init__(self, agent: Agent) -> None:
        self._agent, self._gateway, self._loop = agent, gateway(), _event_loop().loop
        self._running: dict[
            Seat, tuple[str, Callable[[], object]]
        ] = {}  # the address's secret, and what ends the agent

    def prepare(self, episodes: int) -> None:
        """Do nothing: this process runs already."""

    def begin(self, begun: Begun) -> Seat:
        """Start the agent of an episode."""
        tree = Tree(begun.prompt, branching=begun.branching)
        seat = Seat(gateway().loop, begun.count, tree, begun.heard)
        secret, url = gateway().open(seat)
        self._running[seat] = secret, self._start(seat, url, begun.row)
        return seat

    def end(self, seat: Seat) -> None:
        """End an episode and its agent."""
        secret, end = self._running.pop(seat)
        seat.end(RefusedError("The episode is over.", status=410))
        end()
        gateway().close(secret)

    def _start(self, seat: Seat, url: str, row: Mapping[str, Any]) -> Callable[[], object]:
        """Start an agent, and return a function that ends it."""
        if asyncio.iscoroutinefunction(self._agent):
            return asyncio.run_coroutine_threadsafe(self._awaited(seat, url, row), _event_loop().loop).cancel
        in_thread(functools.partial(self._called, seat, url, row), "trlx-hybrid-agent")
        return lambda: None

    async def _awaited(self, seat: Seat, url: str, row: Mapping[str, Any]) -> None:
        try:
            _reward(seat, await self._agent(url, row))
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            _fail(seat, error)

    def _called(self, seat: Seat, url: str, row: Mapping[str, Any]) -> None:
        try:
            _reward(seat, self._agent(url, row))
        except BaseException as error:
            _fail(seat, error)


def _reward(seat: Seat, reward: Any) -> None:
    seat.ended(None if reward is None else float(reward))


def _fail(seat: Seat, error: BaseException) -> None:
    seat.ended(None, f"the agent raised {type(error).__name__}: {error}")


@functools.cache
def _event_loop() -> DaemonLoop:
    """Return the event loop of all agents, started at the first call. It is not the server's: an agent that computes
    for long holds up other agents, but no request."""
    return DaemonLoop()
