"""The actor around one server. Requests and completions travel in batches: a call of Ray costs more than a token."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from trlx_hybrid.errors import EngineError
from trlx_hybrid.serving import EngineServer, ServerDiedError, ServerPlan
from trlx_hybrid.types import Completion, Request, Sampling

from ..reaper import Reaper
from ..remote.actors import Pickled, see_own_gpus, whereabouts


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of a request.

    Attributes:
        key: as its sender calls it.
        completion: None where there is none.
        error: why.
        died: whether the engine died, and not this request alone.
    """

    key: int
    completion: Completion | None
    error: str = ""
    died: bool = False


@dataclass(slots=True)
class _Channel:
    """What one stream has here."""

    tasks: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    answers: list[Answer] = field(default_factory=list)
    news: asyncio.Event = field(default_factory=asyncio.Event)


class EngineActor:
    """Holds a server. All methods are coroutines on one event loop, which is the server's.

    Args:
        plan: of what runs here.
    """

    def __init__(self, plan: Pickled) -> None:
        see_own_gpus()
        self._reaper = Reaper(grace=1.0)  # vLLM's engine core does not notice that its parent died, and keeps its GPU
        self._plan = plan
        self._server: EngineServer | None = None
        self._channels: dict[str, _Channel] = {}

    async def start(self) -> str:
        """Build the engine; returns where it is."""
        import ray

        plan: ServerPlan = self._plan.load()
        server = plan.server([str(gpu) for gpu in ray.get_gpu_ids()])
        await server.start()
        self._server = server
        return whereabouts()

    async def add(self, channel: str, requests: Sequence[tuple[int, Request]], sampling: Sampling) -> None:
        """Start to sample. Answers wait until they are collected."""
        here = self._channels.setdefault(channel, _Channel())
        for key, request in requests:
            here.tasks[key] = asyncio.create_task(self._sample(here, key, request, sampling))

    async def collect(self, channel: str, seconds: float) -> list[Answer]:
        """What has been answered; waits for the first one, so many seconds at most. An empty list shows life, too."""
        here = self._channels.setdefault(channel, _Channel())
        if not here.answers:
            try:
                await asyncio.wait_for(here.news.wait(), seconds)
            except TimeoutError:
                await self._running.check()
        here.news.clear()
        answers, here.answers = here.answers, []
        return answers

    async def abort(self, channel: str, keys: Sequence[int]) -> None:
        """Forget requests; their answers never come."""
        tasks = self._channels[channel].tasks if channel in self._channels else {}
        for key in keys:
            if key in tasks:
                tasks.pop(key).cancel()

    async def leave(self, channel: str) -> None:
        """A stream is over: forget all that it asked for."""
        if channel in self._channels:
            for task in self._channels.pop(channel).tasks.values():
                task.cancel()

    async def check(self) -> None:
        """Nothing, where the engine lives."""
        await self._running.check()

    async def call(self, method: str, arguments: Sequence[Any]) -> Any:
        """For the weight sync, see `EngineServer.call`; "check" is known to every server."""
        if method == "check":
            return await self._running.check()
        return await self._running.call(method, *arguments)

    async def close(self) -> None:
        """End the engine; the actor stays, and is killed next."""
        if self._server is not None:
            self._server.close()

    async def _sample(self, channel: _Channel, key: int, request: Request, sampling: Sampling) -> None:
        try:
            answer = Answer(key, await self._running.generate(request, sampling))
        except ServerDiedError as error:
            answer = Answer(key, None, str(error), died=True)
        except EngineError as error:
            answer = Answer(key, None, str(error))
        except Exception as error:  # a server of somebody else's: what it raises must reach the trainer
            answer = Answer(key, None, f"{type(error).__name__}: {error}")
        channel.tasks.pop(key, None)
        channel.answers.append(answer)
        channel.news.set()

    @property
    def _running(self) -> EngineServer:
        assert self._server is not None, "start() comes first"
        return self._server
