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
from collections.abc import AsyncIterator, Iterable
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from . import chat, completions, messages, responses
from .asked import Said
from .errors import RefusedError
from .seat import Seat

LARGEST = 32 << 20
"""Bytes of the largest request."""
BACKLOG = 2048
"""The number of connections that may wait to be accepted."""
KEPT_SECONDS = 3600
"""Seconds for which a connection without a request is kept open. Tools may take their time, and a client that sends its
next request while the server closes the connection gets an error."""
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
        return await self._answered(request, chat, _chunks)

    async def _responses(self, request: Request) -> Response:
        return await self._answered(request, responses, _events)

    async def _completions(self, request: Request) -> Response:
        return await self._answered(request, completions, _chunks)

    async def _messages(self, request: Request) -> Response:
        return await self._answered(request, messages, _events)

    async def _answered(self, request: Request, api: Any, lines: Any) -> Response:
        """Answer a request.

        Args:
            request: the request.
            api: the module that reads and writes the API's JSON.
            lines: writes the parts of an answer as a stream.
        """
        number = str(next(self._numbers))
        try:
            seat, body = self._seat(request), await _body(request)
            asked, again = api.read(body), _again(request)
            places = range(asked.choices)
            asking = (seat.ask(asked, again=again, choice=place) for place in places)
            choices = _answers(await asyncio.gather(*asking, return_exceptions=True))
        except RefusedError as error:
            return JSONResponse(api.refused(error), error.status)
        if not await request.is_disconnected():
            seat.hear(said.place for said in choices)
        if body.get("stream"):
            return StreamingResponse(lines(api.streamed(body, choices, number)), media_type="text/event-stream")
        return JSONResponse(api.written(body, choices, number))

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


def _answers(outcomes: Iterable[Said | BaseException]) -> list[Said]:
    """Return the messages that were sampled for a request, fewer than it asks for where there was no room for all.

    Args:
        outcomes: for each message that it asks for, the message, or why there is none.

    Raises:
        RefusedError: there is none at all.
    """
    outcomes = [*outcomes]
    said = [outcome for outcome in outcomes if isinstance(outcome, Said)]
    for error in outcomes:
        if isinstance(error, BaseException) and (not said or not isinstance(error, RefusedError)):
            raise error
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


async def _chunks(parts: Iterable[Any]) -> AsyncIterator[str]:
    """Yield the parts of an answer as OpenAI streams them."""
    for part in parts:
        yield f"data: {json.dumps(part)}\n\n"
    yield "data: [DONE]\n\n"


async def _events(parts: Iterable[Any]) -> AsyncIterator[str]:
    """Yield the parts of an answer as events that have a type."""
    for part in parts:
        yield f"event: {part['type']}\ndata: {json.dumps(part)}\n\n"
