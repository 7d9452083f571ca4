"""OpenEnv environments, which run in a server: one connection per episode, text in and text out."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from http.client import HTTPException
from types import SimpleNamespace
from typing import Any

from trlx_hybrid.contract.conversation import Message
from trlx_hybrid.errors import ConfigError, did_you_mean

from ..environment import Step
from .connection import Connection, ServerError, on_this_machine, require_websockets

MCP_FIELD = "tool_name"  # field of a server whose environment is a set of MCP tools
POLL_SECONDS = 0.2  # between two attempts to reach a server that is still starting
NO_TEXT = ("done", "reward", "metadata")  # fields that every observation has, and no model is shown

Action = Callable[[str], Any]
Connect = Callable[[], Any]
Shown = Callable[[Any], str | list[Message]]
Schema = Mapping[str, Any]


def from_openenv(
    server: str | Connect,
    *,
    action: str | Action | None = None,
    observation: str | Shown | None = None,
    columns: Sequence[str] = (),
    connect_seconds: float = 10.0,
) -> Callable[[], OpenEnvEpisode]:
    """Return a factory of environments that play on a running OpenEnv server.

        game = from_openenv("http://127.0.0.1:8000", action="guess", observation="hint", columns=["seed"])
        GRPOTrainer(..., rollout_func=episodes(game, max_turns=6), reward_funcs=episode_reward)

    The server runs in a Python environment of its own, whose packages may conflict with vLLM's. The trainer needs only
    the package `websockets`. The server plays as many episodes at once as it was started for (`max_concurrent_envs`, 1
    by default).

    Args:
        server: the server's address; or, where OpenEnv's package can be installed here, a function that makes a client
            of OpenEnv's own (`lambda: MyEnv(base_url=…)`), called once per episode.
        action: the field of the action that takes the completion; or a function from a completion to the action (a
            mapping, or what the client takes). By default the only text field that the server's actions require.
        observation: the field of the observation that the model is shown; or a function from an observation (a mapping,
            or the client's object) to text or messages. By default the only text field of the server's observations.
        columns: columns of the dataset's row that are passed to the environment's `reset`. All episodes of one prompt
            should begin in the same state: pass a seed.
        connect_seconds: how long to wait for the server, here and at each episode.

    Raises:
        ConfigError: the server does not answer, its actions or observations do not have the fields described above, or
            `websockets` is not installed.
    """
    if not isinstance(server, str):
        if action is None or observation is None:
            raise ConfigError("from_openenv(client) needs action= and observation=: only a server tells its fields.")
        return _episodes(server, action, observation, columns)
    require_websockets("from_openenv")
    http, websocket = addresses(server)
    schema = fetched(http, connect_seconds)
    if not callable(action):
        action = action_field(schema.get("action") or {}, action, http)
    if not callable(observation):
        observation = observation_field(schema.get("observation") or {}, observation, http)
    name = f"The OpenEnv server at {http}"
    return _episodes(lambda: _Server(websocket, name, connect_seconds), action, observation, columns)


def _episodes(
    connect: Connect, action: str | Action, observation: str | Shown, columns: Sequence[str]
) -> Callable[[], OpenEnvEpisode]:
    """Return a function that makes an environment for one episode.

    Args:
        connect: makes a client of the server, once per episode.
        action: turns a completion's text into an action for the server; or names the only field of an action, which
            takes the text.
        observation: turns the server's observation into what the model is shown, a text or chat messages; or names the
            field of the observation that holds the text.
        columns: names of the dataset's columns that are passed to the server's `reset`.
    """

    def acted(completion: str) -> object:
        return action(completion) if callable(action) else {action: completion}

    def shown(seen: Any) -> Any:
        if callable(observation):
            return observation(seen)
        return seen.get(observation) if isinstance(seen, Mapping) else getattr(seen, observation)

    def made() -> OpenEnvEpisode:
        return OpenEnvEpisode(connect, acted, shown, columns)

    made.__name__ = "OpenEnv"  # name of its environments in messages
    return made


class OpenEnvEpisode:
    """An environment for one episode on an OpenEnv server; it connects at `reset`.

    Args:
        connect: makes a client that has the methods of OpenEnv's own client.
        action: turns a completion's text into an action for the server.
        shown: turns the server's observation into what the model is shown, a text or chat messages.
        columns: names of the dataset's columns that are passed to the server's `reset`.
    """

    def __init__(self, connect: Connect, action: Action, shown: Shown, columns: Sequence[str]) -> None:
        self._connect, self._action, self._shown, self._columns = connect, action, shown, columns
        self._peer: Any = None

    async def reset(self, row: Mapping[str, Any]) -> str | list[Message] | None:
        """Connect to the server and begin the episode. Return what the model is shown in addition to the row's prompt,
        or None if that is nothing.

        Args:
            row: the row of the dataset.

        Raises:
            ServerError: the row lacks a column, or the episode is over at once.
        """
        missing = [name for name in self._columns if name not in row]
        if missing:
            raise ServerError(f"The dataset has no column {missing[0]!r}, which from_openenv(columns=…) names.")
        self._peer = self._connect()
        begun = await self._peer.reset(**{name: row[name] for name in self._columns})
        if begun.done:
            raise ServerError("The environment's episode was over when it began.")
        return self._shown(begun.observation) or None

    async def step(self, completion: str) -> Step:
        """Send the completion as an action, and return the server's observation and reward."""
        result = await self._peer.step(self._action(completion))
        return Step(
            observation=None if result.done else self._shown(result.observation),
            done=bool(result.done),
            reward=None if result.reward is None else float(result.reward),
        )

    async def close(self) -> None:
        """Close the connection to the server."""
        if self._peer is not None:
            await self._peer.close()


class _Server:
    """A client of an OpenEnv server with the methods of OpenEnv's own client, whose package need not be installed.

    Args:
        url: address of the server's websocket.
        name: the server's name in messages.
        seconds: how long to wait for a connection.
    """

    def __init__(self, url: str, name: str, seconds: float) -> None:
        self._url, self._name, self._seconds = url, name, seconds
        self._connection: Connection | None = None

    async def reset(self, **arguments: object) -> SimpleNamespace:
        self._connection = await Connection.open(self._url, self._name, self._seconds)
        return await self._asked("reset", arguments)

    async def step(self, action: Mapping[str, object]) -> SimpleNamespace:
        return await self._asked("step", action)

    async def close(self) -> None:
        if self._connection is not None:
            await self._connection.close()

    async def _asked(self, kind: str, content: Mapping[str, object]) -> SimpleNamespace:
        assert self._connection is not None
        data = await self._connection.ask(kind, content)
        done = bool(data.get("done", False))
        return SimpleNamespace(observation=data.get("observation", {}), reward=data.get("reward"), done=done)


def action_field(schema: Schema, given: str | None, server: str) -> str:
    """Return the name of the action's field that takes the completion.

    Args:
        schema: JSON schema of the server's actions.
        given: the field named by the user; None selects the only required text field.
        server: the server's address, for messages.

    Raises:
        ConfigError: the actions have no field `given`; none is named, and not exactly one text field is required; the
            action requires other fields as well; or the actions are calls of MCP tools, so that the field would take
            the name of a tool.
    """
    fields = [name for name in schema.get("properties") or {} if name != "metadata"]
    required = [name for name in schema.get("required") or [] if name != "metadata"]
    if MCP_FIELD in fields and given in (None, MCP_FIELD):
        raise ConfigError(
            f"Actions of {server} call MCP tools, by {MCP_FIELD} and arguments: a completion is no tool's name. Give "
            "action=a function that makes a call of it, as lambda text: {'type': 'call_tool', 'tool_name': 'echo', "
            "'arguments': {'message': text}}, and observation=a function that makes a text of the tool's result."
        )
    if given is None:
        texts = [name for name in required or fields if _is_text(schema["properties"][name])]
        if len(texts) != 1:
            raise ConfigError(
                f"Actions of {server} have the fields {', '.join(fields) or 'none'}: say which one takes the "
                "completion, action='…', or give action=a function that makes the action of it."
            )
        given = texts[0]
    _refuse_unknown("Actions", given, fields, server)
    others = [name for name in required if name != given]
    if others:
        raise ConfigError(
            f"Actions of {server} need {', '.join(others)} beside {given!r}: give action=a function that makes the "
            "whole action of a completion."
        )
    return given


def observation_field(schema: Schema, given: str | None, server: str) -> str:
    """Return the name of the observation's field that the model is shown.

    Args:
        schema: JSON schema of the server's observations.
        given: the field named by the user; None selects the only text field.
        server: the server's address, for messages.

    Raises:
        ConfigError: there is no field `given`; or `given` is None, and the observations do not have exactly one text
            field. The field `tool_name`, the name of an MCP tool, is not counted.
    """
    fields = [name for name in schema.get("properties") or {} if name not in NO_TEXT]
    if given is None:
        texts = [name for name in fields if name != MCP_FIELD and _is_text(schema["properties"][name])]
        if len(texts) != 1:
            raise ConfigError(
                f"Observations of {server} have the fields {', '.join(fields) or 'none'}: say which one the model is "
                "shown, observation='…', or give observation=a function that makes a text of one."
            )
        given = texts[0]
    _refuse_unknown("Observations", given, fields, server)
    return given


def _is_text(schema: Schema) -> bool:
    return any(kind.get("type") == "string" for kind in [schema, *schema.get("anyOf", [])])


def _refuse_unknown(what: str, given: str, fields: Sequence[str], server: str) -> None:
    if given not in fields:
        hint = did_you_mean(given, fields)
        raise ConfigError(f"{what} of {server} have no field {given!r}.{hint} Fields: {', '.join(fields) or 'none'}.")


def addresses(server: str) -> tuple[str, str]:
    """Return the server's HTTP address and the address of its websocket.

    Args:
        server: the address that the user gave, with or without a scheme, such as "127.0.0.1:8000".

    Raises:
        ConfigError: `server` is not an address.
    """
    scheme, separator, rest = server.rstrip("/").partition("://")
    if not separator:
        scheme, rest = "http", scheme
    secure = {"http": "", "ws": "", "https": "s", "wss": "s"}.get(scheme)
    if secure is None or not rest:
        raise ConfigError(f"from_openenv: {server!r} is no address of a server; give http://host:port.")
    return f"http{secure}://{rest}", f"ws{secure}://{rest}/ws"


def fetched(http: str, seconds: float) -> dict[str, Any]:
    """Fetch the schemas of the server's actions and observations; wait for a server that is still starting.

    Args:
        http: the server's address.
        seconds: how long to wait.

    Returns:
        JSON schemas by "action", "observation" and "state".

    Raises:
        ConfigError: no server answered, or the server that answered is no OpenEnv server.
    """
    handlers = [urllib.request.ProxyHandler({})] if on_this_machine(http) else []
    opener, until = urllib.request.build_opener(*handlers), time.monotonic() + seconds
    while True:
        try:
            with opener.open(f"{http}/schema", timeout=max(POLL_SECONDS, until - time.monotonic())) as reply:
                return dict(json.load(reply))
        except (urllib.error.HTTPError, HTTPException, ValueError) as error:
            raise ConfigError(f"{http}/schema is no OpenEnv server's: {error}.") from error
        except OSError as error:
            if time.monotonic() + POLL_SECONDS > until:
                reason = getattr(error, "reason", error)
                raise ConfigError(
                    f"No OpenEnv server answered at {http} within {seconds:g} s ({reason}). Start it, or mend the "
                    "address; connect_seconds waits longer."
                ) from error
        time.sleep(POLL_SECONDS)
