"""The endpoint: an HTTP server on this machine, in a thread of the trainer's process."""

from __future__ import annotations

import asyncio
import atexit
import functools
import itertools
import json
import os
import secrets
import shutil
import socket
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from . import chat, completions, messages, responses
from .asked import Asked, Said
from .errors import RefusedError
from .seat import Seat

LARGEST = 32 << 20
"""Bytes of the largest request."""
BACKLOG = 2048
"""The number of connections that may wait to be accepted."""
KEPT_SECONDS = 3600
"""Seconds for which a connection without a request is kept open. Tools may take their time, and a client that sends its
next request while the server closes the connection gets an error."""
QUIET_SECONDS = 10.0
"""Seconds after which a streamed answer begins, with comments as often, where the message is still to be sampled. The
engine may sleep meanwhile, and a client gives up a connection on which nothing comes."""
START_SECONDS = 30.0


class Gateway:
    """A server that answers the requests of all agents of this process. Each episode has an address of its own, with a
    secret in it: other users of this machine can reach the port, too.

    Attributes:
        loop: the server's event loop.
    """

    def __init__(self) -> None:
        self._seats: dict[str, Seat] = {}
        self._numbers = itertools.count()
        # asyncio sends small answers at once only where a socket names its protocol. Else each one waits for 40 ms.
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self._socket.bind(("127.0.0.1", 0))
        self._socket.listen(BACKLOG)
        self._ready = threading.Event()
        self._server: uvicorn.Server | None = None
        self.loop: asyncio.AbstractEventLoop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="trlx-hybrid-gateway", daemon=True)
        self._thread.start()
        if not self._ready.wait(START_SECONDS):
            raise TimeoutError(f"The gateway's server did not start within {START_SECONDS:g} s.")

    def open(self, seat: Seat) -> tuple[str, str]:
        """Give an episode an address. Returns its secret, and the base URL of OpenAI's API."""
        secret = secrets.token_urlsafe(16)
        self._seats[secret] = seat
        host, port = self._socket.getsockname()[:2]
        return secret, f"http://{host}:{port}/{secret}/v1"

    def close(self, secret: str) -> None:
        """Forget an episode. Its address is not found from then on."""
        self._seats.pop(secret, None)

    @functools.cached_property
    def path(self) -> str:
        """The path of a Unix socket that serves the same, for boxes without a network, which cannot reach a port. It
        exists from when it is first asked for, readable by this user alone."""
        folder = tempfile.mkdtemp(prefix="gateway-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        path = os.path.join(folder, "socket")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as bound:
            bound.bind(path)
            bound.listen(BACKLOG)
            listening = bound.dup()
        asyncio.run_coroutine_threadsafe(uvicorn.Server(self._config()).serve([listening]), self.loop)
        return path

    def stop(self) -> None:
        """Stop the server."""
        if self._server is not None:
            self._server.should_exit = True
            self._thread.join(START_SECONDS)

    def _config(self) -> uvicorn.Config:
        app = Starlette(
            routes=[
                Route("/{secret}/v1/models", self._models),
                Route("/{secret}/v1/chat/completions", self._chat, methods=["POST"]),
                Route("/{secret}/v1/completions", self._completions, methods=["POST"]),
                Route("/{secret}/v1/responses", self._responses, methods=["POST"]),
                Route("/{secret}/v1/messages", self._messages, methods=["POST"]),
                Route("/{secret}/v1/messages/count_tokens", self._count, methods=["POST"]),
            ]
        )
        return uvicorn.Config(
            app,
            log_level="error",
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=1,
            timeout_keep_alive=KEPT_SECONDS,
        )

    def _serve(self) -> None:
        asyncio.set_event_loop(self.loop)
        self._server = uvicorn.Server(self._config())
        self.loop.call_soon(self._ready.set)
        self.loop.run_until_complete(self._server.serve([self._socket]))

    async def _models(self, request: Request) -> Response:
        try:
            self._seat(request)
        except RefusedError as error:
            return JSONResponse(chat.refused(error), error.status)
        return JSONResponse(
            {"object": "list", "data": [{"id": "policy", "object": "model", "owned_by": "trlx_hybrid"}]}
        )

    async def _chat(self, request: Request) -> Response:
        return await self._answered(request, chat, _chunk, "data: [DONE]\n\n")

    async def _responses(self, request: Request) -> Response:
        return await self._answered(request, responses, _event)

    async def _completions(self, request: Request) -> Response:
        return await self._answered(request, completions, _chunk, "data: [DONE]\n\n")

    async def _messages(self, request: Request) -> Response:
        return await self._answered(request, messages, _event)

    async def _answered(
        self, request: Request, api: Any, line: Callable[[Mapping[str, Any]], str], end: str = ""
    ) -> Response:
        """Answer a request.

        Args:
            request: the request.
            api: the module that reads and writes the API's JSON.
            line: writes a part of an answer that is streamed.
            end: what ends a stream.
        """
        number = str(next(self._numbers))
        try:
            seat, body = self._seat(request), await _body(request)
            asked, again = api.read(body), _again(request)
            choices = asyncio.create_task(_choices(request, seat, asked, again))
            if not body.get("stream"):
                return JSONResponse(api.written(body, await choices, number))
            await asyncio.wait({choices}, timeout=QUIET_SECONDS)
            if choices.done():
                await choices  # a refusal has a status of its own, as long as nothing was sent
        except RefusedError as error:
            return JSONResponse(api.refused(error), error.status)
        choices.add_done_callback(lambda done: done.cancelled() or done.exception())  # the client may be gone
        lines = _lines(choices, lambda said: api.streamed(body, said, number), api.refused, line, end)
        return StreamingResponse(lines, media_type="text/event-stream")

    async def _count(self, request: Request) -> Response:
        try:
            seat, body = self._seat(request), await _body(request)
            tokens = await asyncio.to_thread(seat.count, messages.read(body))
        except RefusedError as error:
            return JSONResponse(messages.refused(error), error.status)
        return JSONResponse({"input_tokens": tokens})

    def _seat(self, request: Request) -> Seat:
        seat = self._seats.get(request.path_params["secret"])
        if seat is None:
            raise RefusedError("No episode is played at this address.", status=404)
        return seat


@functools.cache
def gateway() -> Gateway:
    """Return the gateway of this process, started at the first call."""
    return Gateway()


async def _choices(request: Request, seat: Seat, asked: Asked, again: bool | None) -> list[Said]:
    """Return the messages that were sampled for a request, fewer than it asks for where there was no room for all.

    Args:
        request: the request, whose client has heard them if it is still there.
        seat: the place of its episode.
        asked: what it asks for.
        again: whether the client says that it sends the request again.

    Raises:
        RefusedError: there is none at all.
    """
    asking = (seat.ask(asked, again=again, choice=place) for place in range(asked.choices))
    outcomes = await asyncio.gather(*asking, return_exceptions=True)
    said = [outcome for outcome in outcomes if isinstance(outcome, Said)]
    for error in outcomes:
        if isinstance(error, BaseException) and (not said or not isinstance(error, RefusedError)):
            raise error
    if not await request.is_disconnected():
        seat.hear(each.place for each in said)
    return said


def _again(request: Request) -> bool | None:
    """Return whether the client says that it sends a request again, as official clients do; None for other clients."""
    retries = request.headers.get("x-stainless-retry-count")
    return None if retries is None else retries != "0"


async def _body(request: Request) -> Any:
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > LARGEST:
            raise RefusedError(f"The request has more than {LARGEST >> 20} MiB.", status=413)
        parts.append(part)
    try:
        return json.loads(b"".join(parts))
    except ValueError as error:
        raise RefusedError(f"The body is no JSON: {error}.") from None


async def _lines(
    choices: asyncio.Task[list[Said]],
    parts: Callable[[list[Said]], Iterable[Mapping[str, Any]]],
    refused: Callable[[RefusedError], Mapping[str, Any]],
    line: Callable[[Mapping[str, Any]], str],
    end: str,
) -> AsyncIterator[str]:
    """Yield an answer as a stream: comments until its messages are there, and then its parts.

    Args:
        choices: the messages, or the error.
        parts: returns the parts of an answer.
        refused: returns the part that tells a client of an error.
        line: writes a part.
        end: what ends the stream.
    """
    while not choices.done():
        yield ": being sampled\n\n"
        await asyncio.wait({choices}, timeout=QUIET_SECONDS)
    try:
        said = await choices
    except RefusedError as error:
        yield line(refused(error))
        return
    for part in parts(said):
        yield line(part)
    yield end


def _chunk(part: Mapping[str, Any]) -> str:
    """Return a part of an answer as OpenAI streams it."""
    return f"data: {json.dumps(part)}\n\n"


def _event(part: Mapping[str, Any]) -> str:
    """Return a part of an answer as an event that has a type."""
    return f"event: {part.get('type', 'error')}\ndata: {json.dumps(part)}\n\n"
