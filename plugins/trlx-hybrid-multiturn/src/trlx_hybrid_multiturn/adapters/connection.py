"""The connection of one episode to the server that hosts its environment: JSON messages over a websocket.

    to the server:   {"type": "reset", "data": {…}}, {"type": "step", "data": {…}}, {"type": "close"};
                     verifiers' process also takes {"type": "play", "data": {…}}
    from the server: {"type": "observation", "data": {…}}, {"type": "error", "data": {"message": …, "code": …}}

Source: openenv-core 0.3.0, `openenv/core/env_server/types.py`. OpenEnv's own client has the server's requirements,
which clash with vLLM's; there are few messages, so this file sends and reads them itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from trlx_hybrid.errors import ConfigError, HybridError

CLOSE_SECONDS = 5.0  # for the server to end an episode


class ServerError(HybridError):
    """Raised where an environment's server cannot be reached, closed the connection, or answered with an error."""


def require_websockets(user: str) -> None:
    """Raise ConfigError before training starts if the package `websockets` is not installed.

    Args:
        user: name of the function that needs it, for the message.

    Raises:
        ConfigError: `websockets` is not installed.
    """
    try:
        import websockets.asyncio.client  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"{user} needs the package websockets, from 15 on: pip install websockets") from error


def on_this_machine(url: str) -> bool:
    """Return whether a URL's host is this machine ("localhost" or a loopback address), for which no proxy may be
    used."""
    return urlsplit(url).hostname in ("localhost", "127.0.0.1", "::1")


class Connection:
    """One connection to an environment's server, for one episode: one request at a time, on one event loop.

    Args:
        socket: the open websocket.
        server: the server's name in messages, its address included.
    """

    def __init__(self, socket: Any, server: str) -> None:
        self._socket, self._server = socket, server

    @classmethod
    async def open(cls, url: str, server: str, seconds: float) -> Connection:
        """Connect to a server.

        Args:
            url: `ws://…` or `wss://…`.
            server: the server's name in messages, its address included.
            seconds: how long to wait for the server to accept.

        Raises:
            ServerError: the server did not accept.
        """
        from websockets.asyncio.client import connect
        from websockets.exceptions import InvalidHandshake

        try:
            socket = await connect(
                url,
                open_timeout=seconds,
                max_size=None,  # an observation may be long
                ping_interval=None,  # a step may keep the server's loop busy; every call has a deadline of its own
                proxy=None if on_this_machine(url) else True,
            )
        except TimeoutError:
            raise ServerError(f"{server} did not accept a connection within {seconds:g} s.") from None
        except (OSError, InvalidHandshake) as error:
            raise ServerError(f"{server} accepts no connection: {error}") from error
        return cls(socket, server)

    async def ask(self, kind: str, data: Mapping[str, object]) -> dict[str, Any]:
        """Send one request and wait for the answer, without a time limit: the caller cancels it at its deadline.

        Args:
            kind: the request's type, such as "reset" or "step".
            data: the request's content, values that JSON can hold.

        Returns:
            The field "data" of the answer.

        Raises:
            ServerError: the server answered with an error or is gone, or `data` cannot be written as JSON.
        """
        from websockets.exceptions import ConnectionClosed

        try:
            request = json.dumps({"type": kind, "data": data})
        except (TypeError, ValueError) as error:
            raise ServerError(f"{self._server} cannot be sent {kind!r}: {error}.") from error
        try:
            with contextlib.suppress(ConnectionClosed):  # the server may have sent the reason before the request
                await self._socket.send(request)
            answer = json.loads(await self._socket.recv())
        except asyncio.CancelledError:
            self._socket.transport.abort()  # no request will follow: tells the server that the episode is over
            raise
        except ConnectionClosed as error:
            raise ServerError(f"{self._server} closed the connection amid {kind!r}: {error}") from error
        except ValueError as error:
            raise ServerError(f"{self._server} answered {kind!r} with something else than JSON: {error}") from error
        content = answer.get("data") or {}
        if answer.get("type") == "error":
            raise ServerError(f"{self._server} refused {kind!r}: {_explained(content)}")
        return dict(content)

    async def close(self) -> None:
        """End the episode, and wait up to `CLOSE_SECONDS` until the server has ended the episode, too, so that the
        server has room for another one."""
        from websockets.exceptions import ConnectionClosed

        with contextlib.suppress(ConnectionClosed, TimeoutError):
            async with asyncio.timeout(CLOSE_SECONDS):
                await self._socket.send(json.dumps({"type": "close"}))
                await self._socket.wait_closed()
        await self._socket.close()


def _explained(error: Mapping[str, Any]) -> str:
    """Return an error message of an environment's server as text, with advice if the cause is known.

    Args:
        error: the data of the server's answer, with its "message", "code" and "errors".
    """
    text, code = str(error.get("message", "it gave no reason")), error.get("code")
    details = [
        f"{'.'.join(map(str, each.get('loc', ())))}: {each.get('msg')}"
        for each in error.get("errors") or []
        if isinstance(each, Mapping)
    ]
    if details:
        text = f"{text}: {'; '.join(details)}"
    if code == "CAPACITY_REACHED":
        return (
            f"it plays {error.get('max_sessions', 'so many')} episodes at once. Start it with a larger "
            "max_concurrent_envs, or set rollout_options max_trajectories to what it can take from each rank."
        )
    return f"{text} ({code})" if code else text
