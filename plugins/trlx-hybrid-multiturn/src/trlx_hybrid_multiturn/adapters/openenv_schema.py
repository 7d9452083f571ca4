"""What an OpenEnv server says of itself: where a completion goes in its actions, where its observations hold text."""

from __future__ import annotations

import difflib
import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from http.client import HTTPException
from typing import Any

from trlx_hybrid.errors import ConfigError

from .connection import on_this_machine

MCP_FIELD = "tool_name"  # of actions and observations of a server whose environment is a set of MCP tools
POLL_SECONDS = 0.2  # between two looks for a server that is still starting
NO_TEXT = ("done", "reward", "metadata")  # of an observation: what every one has, and no model is shown


def action_field(schema: Mapping[str, Any], given: str | None, server: str) -> str:
    """The field of an action that takes the completion.

    Args:
        schema: JSON schema of the server's actions.
        given: the field named by the user; None looks for the only text that is required.

    Raises:
        ConfigError: there is no such field, or the action needs others as well; or actions are calls of MCP tools, and
            no completion is the name of one.
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


def observation_field(schema: Mapping[str, Any], given: str | None, server: str) -> str:
    """The field of an observation that the model is shown; as `action_field`.

    Raises:
        ConfigError: there is no such field, or none named, and not exactly one text beside an MCP tool's name.
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


def _is_text(schema: Mapping[str, Any]) -> bool:
    return any(kind.get("type") == "string" for kind in [schema, *schema.get("anyOf", [])])


def _refuse_unknown(what: str, given: str, fields: Sequence[str], server: str) -> None:
    if given not in fields:
        close = difflib.get_close_matches(given, fields, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ConfigError(f"{what} of {server} have no field {given!r}.{hint} Fields: {', '.join(fields) or 'none'}.")


def addresses(server: str) -> tuple[str, str]:
    """The server's address for HTTP, and that of its websocket.

    Raises:
        ConfigError: it is no address.
    """
    scheme, separator, rest = server.rstrip("/").partition("://")
    if not separator:
        scheme, rest = "http", scheme
    secure = {"http": "", "ws": "", "https": "s", "wss": "s"}.get(scheme)
    if secure is None or not rest:
        raise ConfigError(f"from_openenv: {server!r} is no address of a server; give http://host:port.")
    return f"http{secure}://{rest}", f"ws{secure}://{rest}/ws"


def fetched(http: str, seconds: float) -> dict[str, Any]:
    """What the server says of its actions and observations; waits for one that is still starting.

    Args:
        http: the server's address.
        seconds: how long to wait.

    Returns:
        JSON schemas by "action", "observation" and "state".

    Raises:
        ConfigError: no server answered, or something else did.
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
