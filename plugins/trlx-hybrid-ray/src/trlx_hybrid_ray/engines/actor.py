"""The Ray actor that holds one server of the remote engine: one replica of an inference engine, such as vLLM. Requests
and completions travel in batches, because a call of Ray costs more than a token."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from trlx_hybrid.contract.serving import EngineServer, ServerDiedError, ServerPlan
from trlx_hybrid.contract.types import Completion, Request, Sampling
from trlx_hybrid.errors import EngineError

from .. import reaper
from ..actors import Pickled, reply_of, see_own_gpus, whereabouts

GRACE = 1.0  # seconds in which an engine's processes may end by themselves
CLOSE_SECONDS = 1.0
"""Seconds that a server may take to close before its processes are killed. On a GPU the teardown of vLLM's core waits
in NCCL for the trainer, with which it shares the communicator that brings weights."""


Output = tuple[int, Completion | EngineError]
"""A request's outcome, as (the request's key in its stream, completion or error). The error is a `ServerDiedError`
where the engine died."""


@dataclass(slots=True)
class _Stream:
    """The requests that one stream of a rank has sent to this actor: their running tasks by the request's key, the
    event that interrupts them, and the completions and errors that wait for `EngineActor.collect`."""

    tasks: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    interrupted: asyncio.Event = field(default_factory=asyncio.Event)
    outputs: asyncio.Queue[Output] = field(default_factory=asyncio.Queue)


class EngineActor:
    """A Ray actor that holds one server (one replica of an inference engine, such as vLLM), and samples on it for all
    training ranks. All methods are coroutines on one event loop, on which the server's coroutines run as well.

    Args:
        plan: the pickled `ServerPlan`: the settings and the model from which `ready` builds the server.
    """

    def __init__(self, plan: Pickled) -> None:
        see_own_gpus()
        # vLLM's engine core does not notice that its parent died, and keeps its GPU.
        self._reaper = reaper.Reaper(GRACE)
        self._plan = plan
        self._server: EngineServer | None = None
        self._streams: defaultdict[str, _Stream] = defaultdict(_Stream)

    async def ready(self) -> tuple[bytes, str]:
        """Build and start the server.

        Returns:
            The result None, encoded as all results of actors are, for the trainer to decode with `result_of`; and a
            text that names the actor's node and process.

        Raises:
            EngineError: the server does not start.
        """
        import ray

        plan: ServerPlan = self._plan.load()
        server = plan.server([str(gpu) for gpu in ray.get_gpu_ids()])
        await server.start()
        self._server = server
        return reply_of(lambda: None), whereabouts()

    async def add(self, stream: str, requests: Sequence[tuple[int, Request]], sampling: Sampling) -> None:
        """Start to sample completions for requests. The completions wait in this actor until `collect` returns them.

        Args:
            stream: the name of the caller's stream, unique among all ranks.
            requests: pairs of the request's key, by which the stream knows it, and the request.
            sampling: the sampling parameters of all requests.
        """
        here = self._streams[stream]
        for key, request in requests:
            here.tasks[key] = asyncio.create_task(self._sample(here, key, request, sampling))

    async def collect(self, stream: str, seconds: float) -> list[Output]:
        """Return the completions and errors of a stream that are ready, each with its request's key. It waits at most
        `seconds` for the first one. Even an empty list shows that the actor is alive."""
        outputs = self._streams[stream].outputs
        try:
            found = [await asyncio.wait_for(outputs.get(), seconds)]
        except TimeoutError:
            await self._running.check()
            return []
        while not outputs.empty():
            found.append(outputs.get_nowait())
        return found

    async def abort(self, stream: str, keys: Sequence[int]) -> None:
        """Cancel the requests of a stream that have these keys. They get no completions."""
        for key in keys:
            if key in self._streams[stream].tasks:
                self._streams[stream].tasks.pop(key).cancel()

    async def interrupt(self, stream: str) -> None:
        """Interrupt all requests of a stream. `collect` then returns the tokens that they have sampled so far."""
        self._streams[stream].interrupted.set()

    async def end(self, stream: str) -> None:
        """End a stream: cancel its requests, and forget its completions."""
        for task in self._streams.pop(stream, _Stream()).tasks.values():
            task.cancel()

    async def call(self, method: str, arguments: Sequence[object] = ()) -> Any:
        """Call a method of the server by its name, and return its result. Weight syncs use this to bring the policy's
        weights into the engine.

        Args:
            method: "check", which every kind of server has, and which raises if the engine is dead; or the name of a
                method that only this kind of server has.
            arguments: the method's arguments.

        Raises:
            ServerDiedError: the engine is gone.
            EngineError: there is no such method, or the method failed.
        """
        if method == "check":
            return await self._running.check()
        return await self._running.call(method, *arguments)

    async def close(self) -> None:
        """Close the server and end every process that it started. After this only the actor itself is left, and the
        caller kills it next."""
        with contextlib.suppress(Exception):  # no error while closing may leave processes behind
            if self._server is not None:
                await asyncio.wait_for(asyncio.to_thread(self._server.close), CLOSE_SECONDS)
        # Not `Reaper.finish`: the reaper must go on until the actor, which may map segments to remove, is gone.
        await asyncio.to_thread(reaper.end, self._reaper.owner, os.getpid(), GRACE)

    async def _sample(self, stream: _Stream, key: int, request: Request, sampling: Sampling) -> None:
        """Sample one request, and queue its completion, or the error, for `collect`."""
        found: Completion | EngineError
        try:
            found = await self._running.generate(request, sampling, stream.interrupted)
        except EngineError as error:  # in a class and a form that the trainer can unpickle
            found = (ServerDiedError if isinstance(error, ServerDiedError) else EngineError)(str(error))
        except Exception as error:  # a third party's server: its exceptions must reach the trainer
            found = EngineError(f"{type(error).__name__}: {error}")
        stream.tasks.pop(key, None)
        stream.outputs.put_nowait((key, found))

    @property
    def _running(self) -> EngineServer:
        assert self._server is not None, "ready() comes first"
        return self._server
