"""The connection of one episode to a server that its environment lives in: JSON messages over a websocket.

    to it:   {"type": "reset", "data": {…}}, {"type": "step", "data": {…}}, {"type": "close"}
    from it: {"type": "observation", "data": {…}}, {"type": "error", "data": {"message": …, "code": …}}

Source: openenv-core 0.3.0, `openenv/core/env_server/types.py`. Its own client comes with the server's requirements,
which clash with vLLM's; the messages are few, so they are spoken here.
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
    """The server of an environment is not there, went away, or refused what it was asked."""


def require_websockets(user: str) -> None:
    """Refuse, before anything is trained, to work without the package.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import websockets.asyncio.client  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"{user} needs the package websockets, from 15 on: pip install websockets") from error


def on_this_machine(url: str) -> bool:
    """Whether a URL's host is the loopback interface, which no proxy may stand before."""
    return urlsplit(url).hostname in ("localhost", "127.0.0.1", "::1")


class Connection:
    """One open connection. Made, used and closed on one event loop; one request at a time.

    Args:
        server: what messages call the server, its address included.
    """

    def __init__(self, socket: Any, server: str) -> None:
        self._socket, self._server = socket, server

    @classmethod
    async def open(cls, url: str, server: str, seconds: float) -> Connection:
        """Connect.

        Args:
            url: `ws://…` or `wss://…`.
            seconds: how long to wait for the server to accept.

        Raises:
            ServerError: it did not.
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

    async def ask(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        """Send one request and wait for its answer; the caller sets the deadline.

        Returns:
            The answer's data.

        Raises:
            ServerError: the server answered with an error, or is gone; or `data` is no JSON.
        """
        from websockets.exceptions import ConnectionClosed

        try:
            request = json.dumps({"type": kind, "data": data})
        except (TypeError, ValueError) as error:
            raise ServerError(f"{self._server} cannot be sent {kind!r}: {error}.") from error
        try:
            with contextlib.suppress(ConnectionClosed):  # it may have said why, before it was asked anything
                await self._socket.send(request)
            answer = json.loads(await self._socket.recv())
        except asyncio.CancelledError:
            self._socket.transport.abort()  # nobody will ask again: the server is to see that the episode is over
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
        """End the episode, and wait a moment for the server to have ended it: its place is free for another then."""
        from websockets.exceptions import ConnectionClosed

        with contextlib.suppress(ConnectionClosed, TimeoutError):
            async with asyncio.timeout(CLOSE_SECONDS):
                await self._socket.send(json.dumps({"type": "close"}))
                await self._socket.wait_closed()
        await self._socket.close()


def _explained(error: Mapping[str, Any]) -> str:
    """What a server says of its error, and what to do where that is known."""
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
