"""Engines that live in other processes, in two halves that different plugins bring.

Who knows the backend offers a *server*: one replica, in whatever process holds it (`registry.offer("server", ...)`).
Who knows the cluster offers an *engine* that starts such processes, deals requests out to them and replaces those that
die. The weight sync belongs to the backend again: it talks to its own servers through `ServedEngine.call`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from .errors import EngineError
from .protocols import Engine
from .types import Completion, Request, Sampling

if TYPE_CHECKING:
    import torch


class ServerDiedError(EngineError):
    """A server can do nothing any more: its engine died. Its requests are safe with another one."""


class EngineServer(Protocol):
    """One replica of an engine. Its coroutines run on the event loop of the process that holds it."""

    async def start(self) -> None:
        """Build the engine, with random weights. Called once, before anything else.

        Raises:
            EngineError: it cannot be built; says why and what to change.
        """

    async def generate(self, request: Request, sampling: Sampling) -> Completion:
        """Sample one completion; many at once. Cancelling it frees what the request holds.

        A server that was offered with `keeps=True` names the ids that tokens were sampled from (`Completion.support`)
        where the session is `over_support` and the sampling leaves some out.

        Raises:
            ServerDiedError: the engine is gone.
            EngineError: this request cannot be served.
        """

    async def check(self) -> None:
        """Nothing, where the engine lives.

        Raises:
            ServerDiedError: it does not.
        """

    async def call(self, method: str, *arguments: Any) -> Any:
        """What the weight sync that was made for this kind of server asks of it. Plain data in and out.

        Raises:
            ServerDiedError: the engine is gone.
            EngineError: there is no such method, or it failed.
        """

    def close(self) -> None:
        """End the engine and every process it started."""


class ServerPlan(Protocol):
    """What the servers of one run are built from: what the factory of a `server` component returns.

    Made by every rank, with the session and the validated options; pickled, and opened where the servers live.
    """

    ranks: int
    """Processes, and GPUs where it uses any, of one server. They share a node."""

    gpus: float
    """What each of them takes: 1, or 0 where the backend computes on CPUs."""

    max_model_len: int
    """Longest prompt plus completion, in tokens."""

    dtype: torch.dtype
    """What it computes in."""

    quantized: bool
    """Whether it rounds the weights further than its dtype does."""

    def server(self, gpus: Sequence[str]) -> EngineServer:
        """A server that has not started, in the process that is to hold it.

        Args:
            gpus: ids of those it may use, as its node numbers them; the process sees no others.
        """


class ServedEngine(Engine, Protocol):
    """An engine made of servers. Every rank of the training samples from all of them; rank 0 owns them."""

    kind: str
    """Name of the `server` component."""

    plan: ServerPlan

    @property
    def address(self) -> str:
        """IP address under which servers reach this process."""

    @property
    def servers(self) -> tuple[int, ...]:
        """Numbers of those that live, in order. One that replaces another has a number of its own."""

    def restore(self) -> None:
        """Replace servers that died, so that `servers` is the same on all ranks, and as many as asked for if that can
        be. Collective.

        Raises:
            EngineError: none is left, and none can be started.
        """

    def call(self, method: str, arguments: Sequence[Sequence[Any]], deadline: float) -> list[Any]:
        """Call a method of every server at once, each with its own arguments; results in the order of `servers`.

        Rank 0 only. May be called by several threads.

        Args:
            deadline: seconds for all of them.

        Raises:
            ServerDiedError: one died meanwhile; `restore` replaces it.
            EngineError: one failed or did not answer in time.
        """
