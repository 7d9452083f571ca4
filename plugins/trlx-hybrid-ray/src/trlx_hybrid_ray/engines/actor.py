"""The actor around one server. Requests and completions travel in batches: a call of Ray costs more than a token."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from trlx_hybrid.errors import EngineError
from trlx_hybrid.serving import EngineServer, ServerDiedError, ServerPlan
from trlx_hybrid.types import Completion, Request, Sampling

from .. import reaper
from ..actors import Pickled, reply_of, see_own_gpus, whereabouts

GRACE = 1.0  # seconds that processes of an engine have to end by themselves
CLOSE_SECONDS = 1.0
"""What a server may take to close before its processes are killed. On a GPU the teardown of vLLM's core waits in NCCL
for the trainer, which is at the other end of a weight sync's communicator."""


Output = tuple[int, Completion | EngineError]
"""What became of a request, by its sender's number for it; a `ServerDiedError` where the engine died with it."""


@dataclass(slots=True)
class _Stream:
    """What one stream of a trainer's has here."""

    tasks: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    outputs: asyncio.Queue[Output] = field(default_factory=asyncio.Queue)


class EngineActor:
    """Holds a server. All methods are coroutines on one event loop, which is the server's.

    Args:
        plan: of what runs here.
    """

    def __init__(self, plan: Pickled) -> None:
        see_own_gpus()
        # vLLM's engine core does not notice that its parent died, and keeps its GPU.
        self._reaper = reaper.Reaper(GRACE)
        self._plan = plan
        self._server: EngineServer | None = None
        self._streams: defaultdict[str, _Stream] = defaultdict(_Stream)

    async def ready(self) -> tuple[bytes, str]:
        """Build the engine; see `ActorPool`."""
        import ray

        plan: ServerPlan = self._plan.load()
        server = plan.server([str(gpu) for gpu in ray.get_gpu_ids()])
        await server.start()
        self._server = server
        return reply_of(lambda: None), whereabouts()

    async def add(self, stream: str, requests: Sequence[tuple[int, Request]], sampling: Sampling) -> None:
        """Start to sample. Outputs wait until they are collected."""
        here = self._streams[stream]
        for key, request in requests:
            here.tasks[key] = asyncio.create_task(self._sample(here, key, request, sampling))

    async def collect(self, stream: str, seconds: float) -> list[Output]:
        """What has finished; waits for the first one, so many seconds at most. An empty list shows life, too."""
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
        """Forget requests; their outputs never come."""
        for key in keys:
            if key in self._streams[stream].tasks:
                self._streams[stream].tasks.pop(key).cancel()

    async def end(self, stream: str) -> None:
        """A stream is over: forget all that it asked for."""
        for task in self._streams.pop(stream, _Stream()).tasks.values():
            task.cancel()

    async def call(self, method: str, arguments: Sequence[Any] = ()) -> Any:
        """For the weight sync, see `EngineServer.call`; "check" is known to every server."""
        if method == "check":
            return await self._running.check()
        return await self._running.call(method, *arguments)

    async def close(self) -> None:
        """End the engine, and whatever it started: when this returns, no process of it is left but the actor, which is
        killed next."""
        with contextlib.suppress(Exception):  # whatever keeps it from closing, nothing of it stays
            if self._server is not None:
                await asyncio.wait_for(asyncio.to_thread(self._server.close), CLOSE_SECONDS)
        # Not the reaper itself: it goes on until the actor is gone, which may map segments that have to be removed.
        await asyncio.to_thread(reaper.end, self._reaper.owner, os.getpid(), GRACE)

    async def _sample(self, stream: _Stream, key: int, request: Request, sampling: Sampling) -> None:
        found: Completion | EngineError
        try:
            found = await self._running.generate(request, sampling)
        except EngineError as error:  # as a class and in a form that the trainer can read
            found = (ServerDiedError if isinstance(error, ServerDiedError) else EngineError)(str(error))
        except Exception as error:  # a server of somebody else's: what it raises must reach the trainer
            found = EngineError(f"{type(error).__name__}: {error}")
        stream.tasks.pop(key, None)
        stream.outputs.put_nowait((key, found))

    @property
    def _running(self) -> EngineServer:
        assert self._server is not None, "ready() comes first"
        return self._server
