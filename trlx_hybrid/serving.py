"""Engines in other processes: the interface between two halves, which different plugins bring.

The plugin that knows the backend offers a *server*: one replica, in whatever process holds it
(`registry.offer("server", ...)`). The plugin that knows the cluster offers an *engine* that starts such processes,
distributes requests among them and replaces those that die. The weight sync belongs to the backend, too: it calls its
own servers through `ServedEngine.call`.
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
    """An error for a server whose engine died, so that it cannot do anything any more. Its requests can safely go to
    another server."""


class EngineServer(Protocol):
    """A server: one replica of an engine. Its coroutines run on the event loop of the process that holds it."""

    async def start(self) -> None:
        """Build the engine, with random weights. Called once, before anything else.

        Raises:
            EngineError: the engine cannot be built; says why and what to change.
        """

    async def generate(self, request: Request, sampling: Sampling) -> Completion:
        """Sample one completion; many calls may run at once. Cancelling one frees what the request holds.

        A server that was offered with `keeps=True` names the ids that tokens were sampled from (`Completion.support`)
        where the session is `over_support` and the sampling leaves some out.

        Raises:
            ServerDiedError: the engine is gone.
            EngineError: this request cannot be served.
        """

    async def check(self) -> None:
        """Raise unless the engine is alive.

        Raises:
            ServerDiedError: the engine is gone.
        """

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call a method for the weight sync that was made for this kind of server. Takes and returns plain data.

        Raises:
            ServerDiedError: the engine is gone.
            EngineError: there is no such method, or the method failed.
        """

    def close(self) -> None:
        """End the engine and every process that it started."""


class ServerPlan(Protocol):
    """The plan from which the servers of one run are built: the result of a `server` component's factory.

    Every rank makes one, from the session and the validated options. It is pickled, and loaded in the servers'
    processes.
    """

    ranks: int
    """The number of processes of one server, and of GPUs where it uses any. They share a node."""

    gpus: float
    """The number of GPUs that each of the processes takes: 1, or 0 where the backend computes on CPUs."""

    max_model_len: int
    """The longest prompt plus completion, in tokens."""

    dtype: torch.dtype
    """The dtype that the engine computes in."""

    quantized: bool
    """True where the engine rounds the weights further than its dtype does."""

    def server(self, gpus: Sequence[str]) -> EngineServer:
        """Return a server that has not started, in the process that is to hold it.

        Args:
            gpus: ids of the GPUs that it may use, as its node numbers them; the process sees no others.
        """


class ServedEngine(Engine, Protocol):
    """An engine made of servers. Every rank of the training samples from all of them; rank 0 owns them."""

    kind: str
    """The name of the `server` component."""

    plan: ServerPlan

    @property
    def address(self) -> str:
        """The IP address under which servers reach this process."""

    @property
    def servers(self) -> tuple[int, ...]:
        """The numbers of the servers that are alive, in order. A server that replaces another has a new number."""

    def restore(self) -> None:
        """Replace servers that died, so that `servers` is the same on all ranks, and has as many as asked for if
        possible. Collective.

        Raises:
            EngineError: no server is left, and none can be started.
        """

    def call(self, method: str, arguments: Sequence[Sequence[Any]], deadline: float) -> list[Any]:
        """Call a method of every server at once, each with its own arguments, and return the results in the order of
        `servers`.

        Rank 0 only. May be called by several threads.

        Args:
            deadline: seconds for all calls together.

        Raises:
            ServerDiedError: a server died meanwhile; `restore` replaces it.
            EngineError: a server failed or did not answer in time.
        """
