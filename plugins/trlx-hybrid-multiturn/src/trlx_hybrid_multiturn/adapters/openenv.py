"""OpenEnv environments, which live in a server: one connection per episode, text in and text out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trlx_hybrid.errors import ConfigError
from trlx_hybrid.rollout.conversation import Message

from ..environment import Step
from .connection import Connection, ServerError, require_websockets
from .openenv_schema import action_field, addresses, fetched, observation_field

Action = Callable[[str], Any]
Shown = Callable[[Any], str | list[Message]]


def from_openenv(
    server: str | Callable[[], Any],
    *,
    action: str | Action | None = None,
    observation: str | Shown | None = None,
    columns: Sequence[str] = (),
    connect_seconds: float = 10.0,
) -> OpenEnv:
    """An environment of a running OpenEnv server.

        game = from_openenv("http://127.0.0.1:8000", action="guess", observation="hint", columns=["seed"])
        GRPOTrainer(..., rollout_func=episodes(game, max_turns=6), reward_funcs=episode_reward)

    The server runs among packages of its own, which need not agree with vLLM's; here, `websockets` suffices. It plays
    as many episodes at once as it was started for (`max_concurrent_envs`, 1 unless it says otherwise).

    Args:
        server: its address; or what makes a client of OpenEnv's own (`lambda: MyEnv(base_url=…)`), a fresh one for each
            episode, where that package can be installed.
        action: the field of the action that takes the completion; or a function that makes the action of it (a mapping,
            or what the client takes). By default the only text that the server's actions require.
        observation: the field of the observation that the model is shown; or a function that makes a text or messages
            of it (a mapping, or the client's object). By default the only text that the server's observations hold.
        columns: of the dataset's row, given to the environment's `reset`. Generations of one prompt should begin alike:
            give it a seed.
        connect_seconds: how long to wait for the server, here and at each episode.

    Raises:
        ConfigError: the server does not answer, its actions or observations are not as described, or `websockets` is
            not installed.
    """
    if not isinstance(server, str):
        if action is None or observation is None:
            raise ConfigError("from_openenv(client) needs action= and observation=: only a server tells its fields.")
        return OpenEnv(lambda: _Client(server()), _maker(action), _shower(observation), columns)
    require_websockets("from_openenv")
    http, websocket = addresses(server)
    schema = fetched(http, connect_seconds)
    if not callable(action):
        action = action_field(schema.get("action") or {}, action, http)
    if not callable(observation):
        observation = observation_field(schema.get("observation") or {}, observation, http)
    return OpenEnv(
        lambda: _Server(websocket, f"The OpenEnv server at {http}", connect_seconds),
        _maker(action),
        _shower(observation),
        columns,
    )


class OpenEnv:
    """Makes environments that talk to one server; pass it to `episodes`."""

    def __init__(self, connect: Callable[[], Any], action: Action, shown: Shown, columns: Sequence[str]) -> None:
        self.connect, self.action, self.shown, self.columns = connect, action, shown, tuple(columns)
        self.__name__ = "OpenEnv"  # what messages call its environments

    def __call__(self) -> Session:
        """A fresh environment; it connects when it is reset."""
        return Session(self)


class Session:
    """One episode."""

    def __init__(self, kind: OpenEnv) -> None:
        self._kind = kind
        self._peer: Any = None

    async def reset(self, row: Mapping[str, Any]) -> str | list[Message] | None:
        """Connect and begin."""
        missing = [name for name in self._kind.columns if name not in row]
        if missing:
            raise ServerError(f"The dataset has no column {missing[0]!r}, which from_openenv(columns=…) names.")
        self._peer = self._kind.connect()
        seen, _, done = await self._peer.reset({name: row[name] for name in self._kind.columns})
        if done:
            raise ServerError("The environment's episode was over when it began.")
        return self._kind.shown(seen) or None

    async def step(self, completion: str) -> Step:
        """Act, and see what comes of it."""
        seen, reward, done = await self._peer.step(self._kind.action(completion))
        return Step(
            observation=None if done else self._kind.shown(seen),
            done=bool(done),
            reward=None if reward is None else float(reward),
        )

    async def close(self) -> None:
        """Leave the server."""
        if self._peer is not None:
            await self._peer.close()


class _Server:
    """The server itself, spoken to directly."""

    def __init__(self, url: str, name: str, seconds: float) -> None:
        self._url, self._name, self._seconds = url, name, seconds
        self._connection: Connection | None = None

    async def reset(self, arguments: Mapping[str, Any]) -> tuple[Any, Any, bool]:
        self._connection = await Connection.open(self._url, self._name, self._seconds)
        return self._result(await self._connection.ask("reset", arguments))

    async def step(self, action: Any) -> tuple[Any, Any, bool]:
        assert self._connection is not None
        return self._result(await self._connection.ask("step", action))

    async def close(self) -> None:
        if self._connection is not None:
            await self._connection.close()

    def _result(self, data: Mapping[str, Any]) -> tuple[Any, Any, bool]:
        return data.get("observation", {}), data.get("reward"), bool(data.get("done", False))


class _Client:
    """A client of OpenEnv's own, which connects by itself."""

    def __init__(self, client: Any) -> None:
        self._client = client

    async def reset(self, arguments: Mapping[str, Any]) -> tuple[Any, Any, bool]:
        result = await self._client.reset(**arguments)
        return result.observation, result.reward, result.done

    async def step(self, action: Any) -> tuple[Any, Any, bool]:
        result = await self._client.step(action)
        return result.observation, result.reward, result.done

    async def close(self) -> None:
        await self._client.close()


def _maker(action: str | Action) -> Action:
    return action if callable(action) else lambda completion: {action: completion}


def _shower(observation: str | Shown) -> Shown:
    if callable(observation):
        return observation

    def shown(seen: Any) -> Any:
        return seen.get(observation) if isinstance(seen, Mapping) else getattr(seen, observation)

    return shown
