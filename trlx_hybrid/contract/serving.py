"""The interface of engines that run in other processes. Two plugins implement its two sides.

The plugin for an inference library (vLLM) offers a *server*: one replica of its engine, in whatever process holds it
(`registry.offer("server", ...)`). The plugin for a cluster (Ray) offers an *engine* that starts such processes,
distributes requests among them and replaces those that die. The weight sync comes with the server: it calls the servers
through `ServedEngine.call`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from ..errors import EngineError
from .protocols import Engine
from .types import Completion, Request, Sampling

if TYPE_CHECKING:
    import asyncio

    import torch


class ServerDiedError(EngineError):
    """An error for a server whose engine died, so that it cannot do anything any more. Its requests can safely go to
    another server."""


class EngineServer(Protocol):
    """A server: one replica of an engine, in a process other than the trainer's. Its coroutines run on the event loop
    of that process."""

    async def start(self) -> None:
        """Build the engine, with random weights. Called once, before anything else.

        Raises:
            EngineError: the engine cannot be built; says why and what to change.
        """

    async def generate(self, request: Request, sampling: Sampling, interrupted: asyncio.Event) -> Completion:
        """Sample one completion; many calls may run at once. Cancelling a call frees what its request holds.

        A server that its plugin registered with `keeps=True` lists the ids from which each token was sampled
        (`Completion.support`) if `Run.over_support` is true and the sampling excludes some ids.

        Args:
            interrupted: set where the request must end at once. Then the completion has the tokens that were sampled so
                far, and None as its `finish_reason`. It is set only on servers registered with `interrupts=True`.

        Raises:
            ServerDiedError: the engine is gone.
            EngineError: this request cannot be served.
        """

    async def check(self) -> None:
        """Check that the engine is alive.

        Raises:
            ServerDiedError: the engine is gone.
        """

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the server by name, for the weight sync that belongs to this kind of server. Takes and
        returns plain data.

        Raises:
            ServerDiedError: the engine is gone.
            EngineError: there is no such method, or the method failed.
        """

    def close(self) -> None:
        """End the engine and every process that it started."""


class ServerPlan(Protocol):
    """The plan from which the servers of one run are built: the result of a `server` component's factory.

    Every rank makes a plan, from the session and the validated options. The plan is pickled, and loaded in the servers'
    processes.
    """

    ranks: int
    """The number of processes of one server, all on one node; also its number of GPUs where it uses any."""

    gpus: float
    """The number of GPUs that each of the processes takes: 1, or 0 where the backend computes on CPUs."""

    max_model_len: int
    """The longest prompt plus completion, in tokens."""

    dtype: torch.dtype
    """The dtype that the engine computes in."""

    quantized: bool
    """True where the engine quantises the weights, so that they are rounded further than its dtype does."""

    def server(self, gpus: Sequence[str]) -> EngineServer:
        """Make a server that has not started; called in the process that is to hold it.

        Args:
            gpus: ids of the GPUs that the server may use, as its node numbers them; the process sees no others.
        """


class ServedEngine(Engine, Protocol):
    """An engine that consists of servers in other processes. Every training rank samples from all of them; rank 0
    starts and ends them."""

    kind: str
    """The name of the `server` component that makes the servers."""

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
            arguments: the arguments for each server, in the order of `servers`.
            deadline: seconds for all calls together.

        Raises:
            ServerDiedError: a server died meanwhile; `restore` replaces it.
            EngineError: a server failed or did not answer in time.
        """
