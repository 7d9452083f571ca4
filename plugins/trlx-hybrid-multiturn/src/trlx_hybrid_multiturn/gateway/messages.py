"""Anthropic's messages: requests checked and read, answers written.

A parameter is honoured, overridden by the run (`OVERRIDDEN`), without effect on what is sampled (`WITHOUT_EFFECT`), or
refused with its name. None is ignored.

Source: Anthropic's API reference, "Messages"; anthropic-sdk-python 2.11, `types/message_create_params.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .asked import Asked, Message, Said
from .errors import RefusedError
from .reading import (
    Pictures,
    by_members,
    checked,
    content_of,
    limit_of,
    messages_of,
    overridden_of,
    stops_of,
    text_of,
)
from .seat import CUT

HONOURED = ("messages", "system", "tools", "max_tokens", "stop_sequences", "stream", "model")
OVERRIDDEN = ("temperature", "top_p", "top_k", "tool_choice", "thinking", "output_config.effort")
"""Parameters that change the distribution. The run's settings hold, with which log-probs are computed, and the model
chooses whether it calls a tool. The type "none" of `tool_choice` is honoured: no tools are shown."""
WITHOUT_EFFECT = (
    "metadata",
    "cache_control",
    "service_tier",
    "inference_geo",
    "user_profile_id",
    "workspace_id",
    "speed",
)
NEUTRAL: Mapping[str, tuple[Any, ...]] = {"thinking": ({"type": "disabled"},)}
"""Values of parameters that change nothing. None is one of them everywhere."""
OBJECTS = ("output_config",)
"""Parameters that are checked by their members."""
PICTURES: Pictures = {"image": lambda part: part["source"]["data"]}
SILENT = ("thinking", "redacted_thinking")
"""Blocks of the model's messages that are not shown to it again."""


def read(body: Any) -> Asked:
    """Return what a request asks for.

    Args:
        body: the request's JSON.

    Raises:
        RefusedError: the request is not one that is served; names the parameter.
    """
    given = checked(by_members(body, OBJECTS), (*HONOURED, *OVERRIDDEN, *WITHOUT_EFFECT), NEUTRAL)
    choice = given.pop("tool_choice", {"type": "auto"})
    kind = choice.get("type") if isinstance(choice, dict) else choice
    if kind not in ("auto", "none"):
        given["tool_choice"] = kind
    tools = _tools(given.get("tools", []))
    found: list[Message] = []
    if given.get("system"):
        found.append({"role": "system", "content": text_of("system", given["system"])})
    for number, message in enumerate(messages_of(given)):
        found += _messages(f"messages[{number}]", message)
    if found[-1]["role"] == "assistant":
        raise RefusedError("messages: the last is the model's own, and is not continued here.", parameter="messages")
    return Asked(
        messages=found,
        tools=[] if kind == "none" else tools,
        max_tokens=limit_of("max_tokens", given["max_tokens"]) if "max_tokens" in given else None,
        stop=stops_of("stop_sequences", given.get("stop_sequences", [])),
        overridden=overridden_of(given, OVERRIDDEN, NEUTRAL, strict=given.get("tools", [])),
    )


def _tools(tools: Any) -> list[Mapping[str, Any]]:
    """Return tools in OpenAI's form, which chat templates take."""
    if not isinstance(tools, list) or not all(
        isinstance(t, dict) and t.get("type", "custom") == "custom" for t in tools
    ):
        raise RefusedError(
            "tools: only those of the client are served, with a name and an input_schema.", parameter="tools"
        )
    try:
        return [
            {
                "type": "function",
                "function": {
                    "name": t["name"],
                    "description": t.get("description", ""),
                    "parameters": t["input_schema"],
                },
            }
            for t in tools
        ]
    except KeyError as missing:
        raise RefusedError(f"tools: a tool has no {missing}.", parameter="tools") from None


def _messages(name: str, message: Any) -> list[Message]:
    """Return a message of Anthropic's as chat messages: each result of a tool is one of its own."""
    role = message.get("role") if isinstance(message, dict) else None
    if role not in ("user", "assistant"):
        raise RefusedError(f"{name}: its role is neither user nor assistant.", parameter="messages")
    content = message.get("content")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(blocks, list) or not all(isinstance(block, dict) for block in blocks):
        raise RefusedError(f"{name}: its content is neither a text nor a list of blocks.", parameter="messages")
    texts, calls, results = [], [], list[Message]()
    for block in blocks:
        kind = block.get("type")
        if kind == "text" or (kind in PICTURES and role == "user"):
            texts.append(block)
        elif kind == "tool_use" and role == "assistant":
            function = {"name": block.get("name"), "arguments": block.get("input") or {}}
            calls.append({"type": "function", "function": function})
        elif kind == "tool_result" and role == "user":
            results.append({"role": "tool", "content": content_of(name, block.get("content"), PICTURES)})
        elif kind not in SILENT or role != "assistant":
            raise RefusedError(f"{name}: content of type {kind!r} is not served here.", parameter="messages")
    said: Message = {"role": role, "content": content_of(name, texts, PICTURES)}
    if calls:
        said["tool_calls"] = calls
    return results if results and not texts else [*results, said]


# --- answers ----------------------------------------------------------------------------------------------------------


def written(body: Mapping[str, Any], choices: Sequence[Said], number: str) -> dict[str, Any]:
    """Return the answer to a request, as one JSON object.

    Args:
        body: the request's JSON.
        choices: the model's message.
        number: the answer's id.
    """
    (said,) = choices
    return _head(body, number) | {
        "content": _blocks(said.message, number),
        "stop_reason": _reason(said),
        "stop_sequence": said.stop,
        "usage": {"input_tokens": said.prompt_tokens, "output_tokens": said.completion_tokens},
    }


def streamed(body: Mapping[str, Any], choices: Sequence[Said], number: str) -> Iterator[dict[str, Any]]:
    """Yield the answer to a request as the events of a stream.

    Args:
        body: the request's JSON.
        choices: the model's message.
        number: the answer's id.
    """
    (said,) = choices
    usage = {"input_tokens": said.prompt_tokens, "output_tokens": 0}
    yield {"type": "message_start", "message": {**_head(body, number), "content": [], "usage": usage}}
    for index, block in enumerate(_blocks(said.message, number)):
        begun: dict[str, Any] = {**block, "input": {}}
        if block["type"] == "text":
            begun, delta = {"type": "text", "text": ""}, {"type": "text_delta", "text": block["text"]}
        else:
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"], ensure_ascii=False)}
        yield {"type": "content_block_start", "index": index, "content_block": begun}
        yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    ended = {"stop_reason": _reason(said), "stop_sequence": said.stop}
    yield {"type": "message_delta", "delta": ended, "usage": {"output_tokens": said.completion_tokens}}
    yield {"type": "message_stop"}


def refused(error: RefusedError) -> dict[str, Any]:
    """Return the answer to a request that is refused."""
    kinds = {404: "not_found_error", 413: "request_too_large"}
    kind = kinds.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    told = f"prompt is too long: {error.message}" if error.code == CUT else error.message  # what agents look for
    return {"type": "error", "error": {"type": kind, "message": told}}


def _head(body: Mapping[str, Any], number: str) -> dict[str, Any]:
    model = body.get("model") or "policy"
    return {
        "id": f"msg_{number}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "stop_reason": None,
        "stop_sequence": None,
    }


def _blocks(message: Message, number: str) -> list[dict[str, Any]]:
    text = [{"type": "text", "text": message["content"]}] if message.get("content") else []
    return text + [
        {
            "type": "tool_use",
            "id": f"toolu_{number}_{index}",
            "name": call["function"]["name"],
            "input": call["function"]["arguments"],
        }
        for index, call in enumerate(message.get("tool_calls") or ())
    ]


def _reason(said: Said) -> str:
    if said.length:
        return "max_tokens"
    if said.stop is not None:
        return "stop_sequence"
    return "tool_use" if said.message.get("tool_calls") else "end_turn"
