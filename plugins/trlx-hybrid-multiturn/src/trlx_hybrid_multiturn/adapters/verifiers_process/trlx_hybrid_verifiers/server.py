"""A local HTTP server that serves episodes to the trainer, and the trainer's model to verifiers.

GET /SECRET/tasks                    the taskset's rows, for the trainer
/SECRET/episode                      a websocket: the messages of `adapters/connection.py`, one episode each;
                                     "play" plays an episode with a model at an address of its own
POST /SECRET/v1/chat/completions     verifiers asks the model; the trainer answers through the episode's websocket
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Callable

from aiohttp import web
from verifiers.v1 import EvalClientConfig, ModelContext  # type: ignore[import-not-found]
from verifiers.v1.configs.agent import agent_config_fields  # type: ignore[import-not-found]
from verifiers.v1.utils import loaders  # type: ignore[import-not-found]

from . import as_messages
from .episode import JsonObject, NotPlayableError, ServedEpisode

HARNESS = __package__  # as verifiers finds it


class Server:
    """A server that plays the episodes of one verifiers environment for the trainer.

    Args:
        taskset: the taskset's id.
        env: settings of verifiers' environment, as in its `[env]` block.
        secret: first part of every path, because other users of this machine can reach the port as well.

    Attributes:
        env: verifiers' environment.
        episodes: the running episodes, by trace id. A trace is verifiers' record of what one agent does.
        context: verifiers' model context, whose requests come to this server; set by `serve`.
    """

    def __init__(self, taskset: str, env: JsonObject, secret: str) -> None:
        settings = {**env, "taskset": {**env.get("taskset", {}), "id": taskset}}
        defaults = loaders.env_config_type(taskset, settings.get("id", ""))()
        # verifiers' default harness runs commands in a remote sandbox; here agents hold conversations, on this machine.
        talks = loaders.default_harness_id(taskset) == "bash"
        for name, agent in agent_config_fields(defaults).items():
            own = {"harness": {"id": HARNESS}} if talks and agent.harness is None else {}
            settings[name] = {"runtime": {"type": "subprocess"}, **own, **env.get(name, {})}
        self.env = loaders.load_environment(loaders.resolve_env_config(settings))
        self.episodes: dict[str, ServedEpisode] = {}  # by trace
        self._secret = secret

    async def serve(self, ready: Callable[[int], None]) -> None:
        """Serve until the process ends; call `ready` with the port once the server listens."""
        app = web.Application(client_max_size=1 << 30)
        app.router.add_get(f"/{self._secret}/tasks", self._tasks)
        app.router.add_get(f"/{self._secret}/episode", self._episode)
        app.router.add_post(f"/{self._secret}/v1/chat/completions", self._complete)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        port = runner.addresses[0][1]
        self.context = _context(f"http://127.0.0.1:{port}/{self._secret}/v1")
        async with self.env.serving():
            ready(port)
            await asyncio.Event().wait()

    async def _tasks(self, request: web.Request) -> web.Response:
        size = request.query.get("size")
        if size is None and not self.env.taskset.bounded:
            return web.json_response({"error": "it has no end; say how many tasks to take."})
        try:
            tasks = list(itertools.islice(self.env.taskset, None if size is None else int(size)))
        except Exception as error:  # an error of the taskset
            return web.json_response({"error": f"{type(error).__name__}: {error}"})
        rows = [
            {
                "prompt": as_messages(task.data.system_prompt, task.data.prompt),
                "task": task.data.model_dump(mode="json", exclude_none=True),
            }
            for task in tasks
        ]
        return web.json_response({"tasks": rows})

    async def _episode(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse(max_msg_size=0)
        await socket.prepare(request)
        episode = ServedEpisode(self.env, self.context, self.episodes)
        answering: asyncio.Task[None] | None = None
        try:
            async for message in socket:  # reads on while the episode plays: if the trainer goes away, its episode ends
                asked = json.loads(message.data)
                if asked["type"] == "close":
                    break
                answering = asyncio.create_task(_answer(socket, episode, asked))
        finally:
            if answering is not None:
                answering.cancel()
            await episode.end()
        return socket

    async def _complete(self, request: web.Request) -> web.Response:
        trace = request.headers.get("X-Session-ID", "")
        episode, body = self.episodes.get(trace), await request.json()
        if episode is None:
            return web.json_response({"error": {"message": "no episode is played under this id"}}, status=404)
        try:
            text = await episode.reply(trace, body)
        except NotPlayableError as error:
            return web.json_response({"error": {"message": str(error)}}, status=400)
        message = {"role": "assistant", "content": text}
        return web.json_response(
            {
                "id": trace,
                "object": "chat.completion",
                "created": int(time.time()),
                "model": "policy",
                "choices": [{"index": 0, "finish_reason": "stop", "message": message}],
            }
        )


def _context(base_url: str) -> ModelContext:
    """Return verifiers' model context for the trained model.

    Args:
        base_url: the address of OpenAI's API that asks it.
    """
    # No variable has that name: no key is needed, so the user's is not read.
    return ModelContext(model="policy", client=EvalClientConfig(base_url=base_url, api_key_var="TRLX_HYBRID_NONE"))


async def _answer(socket: web.WebSocketResponse, episode: ServedEpisode, asked: JsonObject) -> None:
    try:
        data = asked["data"]
        if asked["type"] == "play":
            told = await episode.play(data["task"], _context(data["base_url"]))
        else:
            told = await episode.go_on(asked["type"], data)
        answer = {"type": "observation", "data": told}
    except NotPlayableError as error:
        answer = {"type": "error", "data": {"message": str(error)}}
    except Exception as error:  # an error of the task: it ends the trajectory
        answer = {"type": "error", "data": {"message": f"{type(error).__name__}: {error}"}}
    await socket.send_str(json.dumps(answer))
