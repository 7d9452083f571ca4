"""OpenAI's responses: requests checked and read, answers written.

A parameter is honoured, overridden by the run (`OVERRIDDEN`), without effect on what is sampled (`WITHOUT_EFFECT`), or
refused with its name. None is ignored. A parameter that is an object is checked by its members, as `text.format`.

Source: OpenAI's API reference, "Create a model response"; openai-python 3.52,
`types/responses/response_create_params.py`, `response.py` and the events of `response_stream_event.py`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from . import chat
from .asked import Asked, Message, Said
from .errors import RefusedError
from .reading import Pictures, by_members, checked, content_of, limit_of, overridden_of, text_of

HONOURED = ("input", "instructions", "tools", "max_output_tokens", "stream", "model")
OVERRIDDEN = ("temperature", "top_p", "top_k", "min_p", "seed", "tool_choice", "reasoning.effort", "text.verbosity")
"""Parameters that change the distribution. The run's settings hold, with which log-probs are computed, and the model
chooses whether it calls a tool. The value "none" of `tool_choice` is honoured: no tools are shown."""
WITHOUT_EFFECT = (
    "user",
    "metadata",
    "store",
    "service_tier",
    "parallel_tool_calls",
    "max_tool_calls",
    "prompt_cache_key",
    "prompt_cache_retention",
    "prompt_cache_options.mode",
    "prompt_cache_options.ttl",
    "prompt_cache_options.comparison_response_id",
    "safety_identifier",
    "stream_options",
    "reasoning.summary",
    "reasoning.generate_summary",
    "include",
)
"""Parameters without effect on what is sampled. Of `include`, this holds for the values in `INCLUDE`."""
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "background": (False,),
    "text.format": ({"type": "text"},),
    "text.verbosity": ("medium",),
    "reasoning.effort": ("none",),
    "reasoning.context": ("auto",),
    "reasoning.mode": ("standard",),
    "prompt_cache_options.prewarm": (False,),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}
"""Values of parameters that change nothing. None is one of them everywhere."""
INCLUDE = (
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
    "reasoning.encrypted_content",
)
"""Values of `include` that change nothing: tools and contents that are refused, and reasoning, which is not encrypted
here."""
OBJECTS = ("text", "reasoning", "prompt_cache_options")
"""Parameters that are checked by their members."""
ROLES = {"developer": "system", "system": "system", "user": "user", "assistant": "assistant"}
PICTURES: Pictures = {"input_image": lambda part: part["image_url"]}
TEXTS = ("input_text", "output_text")
"""Types of contents that are served."""
SHOWN = ("name", "description", "parameters")
"""Members of a function that the model is shown."""
UNSHOWN: Mapping[str, tuple[Any, ...]] = {
    "type": ("function",),
    "strict": (True, False),
    "defer_loading": (False,),
    "async": (False,),
    "allowed_callers": (["direct"],),
}
"""Members of a function that the model is not shown, and that are served with these values only. It samples freely also
where a function is `strict`, which is said as of a parameter that the run overrides."""


def read(body: Any) -> Asked:
    """Return what a request asks for.

    Args:
        body: the request's JSON.

    Raises:
        RefusedError: the request is not one that is served; names the parameter.
    """
    given = checked(by_members(body, OBJECTS), (*HONOURED, *OVERRIDDEN, *WITHOUT_EFFECT), NEUTRAL)
    _check_include(given.get("include", []))
    tools = _tools(given.get("tools", []))
    choice = given.pop("tool_choice", "auto")
    if choice not in ("auto", "none"):
        given["tool_choice"] = choice
    instructions = text_of("instructions", given.get("instructions"), parameter="instructions", served=TEXTS)
    messages: list[Message] = [{"role": "system", "content": instructions}] if instructions else []
    return Asked(
        messages=messages + _messages(given.get("input")),
        tools=[] if choice == "none" else tools,
        max_tokens=limit_of("max_output_tokens", given["max_output_tokens"]) if "max_output_tokens" in given else None,
        overridden=overridden_of(given, OVERRIDDEN, NEUTRAL, strict=given.get("tools", [])),
    )


def _check_include(include: Any) -> None:
    for value in include if isinstance(include, list) else [include]:
        if value not in INCLUDE:
            raise RefusedError(f"include: {json.dumps(value)} is not served here.", parameter="include")


def _tools(tools: Any) -> list[Mapping[str, Any]]:
    """Return tools in the form of chat completions, which chat templates take."""
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise RefusedError("tools: a list of functions is needed.", parameter="tools")
    for tool in tools:
        if tool.get("type") != "function" or not isinstance(tool.get("name"), str):
            raise RefusedError(
                f'tools: only functions are served, each {{"type": "function", "name": …}}, and none of type '
                f"{json.dumps(tool.get('type'))}.",
                parameter="tools",
            )
        for name, value in tool.items():
            if name not in SHOWN and value is not None and value not in UNSHOWN.get(name, ()):
                raise RefusedError(f"tools: {name}={json.dumps(value)} is not served here.", parameter="tools")
    return [
        {"type": "function", "function": {k: v for k, v in tool.items() if k in SHOWN and v is not None}}
        for tool in tools
    ]


def _messages(items: Any) -> list[Message]:
    """Return the items of a request as chat messages: the calls that follow a message of the model's are part of it."""
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    if not isinstance(items, list):
        raise RefusedError("input: a text or a list of items is needed.", parameter="input")
    found: list[Message] = []
    for number, item in enumerate(items):
        name = f"input[{number}]"
        kind = item.get("type", "message") if isinstance(item, dict) else None
        if kind == "message":
            role = item.get("role")
            if not isinstance(role, str) or role not in ROLES:
                raise RefusedError(f"{name}: its role is none of {', '.join(ROLES)}.", parameter="input")
            content = _content(name, item.get("content"), PICTURES if role == "user" else {})
            found.append({"role": ROLES[role], "content": content})
        elif kind == "function_call":
            if not found or found[-1]["role"] != "assistant":
                found.append({"role": "assistant", "content": ""})
            found[-1].setdefault("tool_calls", []).append(_call(name, item))
        elif kind == "function_call_output":
            result: Message = {"role": "tool", "content": _content(name, item.get("output"), PICTURES)}
            found.append(result | ({"name": item["name"]} if item.get("name") else {}))
        elif kind != "reasoning":  # what the model thought is not shown to it again
            raise RefusedError(f"{name}: an item of type {json.dumps(kind)} is not served here.", parameter="input")
    if not found:
        raise RefusedError("input: a list with at least one message is needed.", parameter="input")
    return found


def _call(name: str, item: Mapping[str, Any]) -> dict[str, Any]:
    called = item.get("name")
    try:
        arguments = json.loads(item["arguments"] or "{}")
    except (TypeError, KeyError, ValueError):
        raise RefusedError(f"{name}: its arguments are no JSON.", parameter="input") from None
    if not isinstance(called, str):
        raise RefusedError(f"{name}: a call needs the function's name.", parameter="input")
    return {"type": "function", "function": {"name": called, "arguments": arguments}}


def _content(name: str, content: Any, pictures: Pictures) -> str | list[dict[str, Any]]:
    return content_of(name, content, pictures, parameter="input", served=TEXTS)


# --- answers ----------------------------------------------------------------------------------------------------------


def written(body: Mapping[str, Any], choices: Sequence[Said], number: str) -> dict[str, Any]:
    """Return the answer to a request, as one JSON object.

    Args:
        body: the request's JSON.
        choices: the model's message.
        number: the answer's id.
    """
    (said,) = choices
    return _ended(_begun(body, number), said, number)


def streamed(body: Mapping[str, Any], choices: Sequence[Said], number: str) -> Iterator[dict[str, Any]]:
    """Yield the answer to a request as the events of a stream.

    Args:
        body: the request's JSON.
        choices: the model's message.
        number: the answer's id.
    """
    (said,) = choices
    for place, event in enumerate(_events(_begun(body, number), said, number)):
        yield {**event, "sequence_number": place}


def refused(error: RefusedError) -> dict[str, Any]:
    """Return the answer to a request that is refused."""
    return chat.refused(error)


def _begun(body: Mapping[str, Any], number: str) -> dict[str, Any]:
    """Return an answer of which nothing has been said. Its parameters are those that hold, not those that were asked
    for."""
    return {
        "id": f"resp_{number}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "model": body.get("model") or "policy",
        "output": [],
        "error": None,
        "incomplete_details": None,
        "instructions": body.get("instructions"),
        "max_output_tokens": body.get("max_output_tokens"),
        "metadata": body.get("metadata") or {},
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "text": {"format": {"type": "text"}},
        "tool_choice": "none" if body.get("tool_choice") == "none" else "auto",
        "tools": body.get("tools") or [],
        "truncation": "disabled",
        "usage": None,
    }


def _ended(begun: Mapping[str, Any], said: Said, number: str) -> dict[str, Any]:
    usage = {
        "input_tokens": said.prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": said.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": said.prompt_tokens + said.completion_tokens,
    }
    return {
        **begun,
        "status": "incomplete" if said.length else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if said.length else None,
        "output": _items(said, number),
        "usage": usage,
    }


def _items(said: Said, number: str) -> list[dict[str, Any]]:
    """Return the items of an answer. A message without a call is one also where it has no text: without an item, the
    client's next request would not have it."""
    message, items = said.message, list[dict[str, Any]]()
    calls = message.get("tool_calls") or ()
    if message.get("reasoning_content"):
        thought = {"type": "reasoning_text", "text": message["reasoning_content"]}
        items.append({"id": f"rs_{number}", "type": "reasoning", "summary": [], "content": [thought]})
    if message.get("content") or not calls:
        text = {"type": "output_text", "text": message.get("content") or ""}
        status = "incomplete" if said.length and not calls else "completed"
        head = {"id": f"msg_{number}", "type": "message", "role": "assistant", "status": status}
        items.append({**head, "content": [{**text, "annotations": [], "logprobs": []}]})
    for index, call in enumerate(calls):
        items.append(
            {
                "id": f"fc_{number}_{index}",
                "type": "function_call",
                "status": "completed",
                "call_id": f"call_{number}_{index}",
                "name": call["function"]["name"],
                "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False),
            }
        )
    return items


def _events(begun: Mapping[str, Any], said: Said, number: str) -> Iterator[dict[str, Any]]:
    yield {"type": "response.created", "response": begun}
    yield {"type": "response.in_progress", "response": begun}
    ended = _ended(begun, said, number)
    for index, item in enumerate(ended["output"]):
        place = {"item_id": item["id"], "output_index": index}
        empty: dict[str, Any] = {"arguments": ""} if item["type"] == "function_call" else {"content": []}
        status = {"status": "in_progress"} if "status" in item else {}
        yield {"type": "response.output_item.added", "output_index": index, "item": {**item, **empty, **status}}
        for at, part in enumerate(item.get("content", ())):
            here, name = {**place, "content_index": at}, f"response.{part['type']}"
            rest: dict[str, Any] = {"logprobs": []} if part["type"] == "output_text" else {}
            yield {"type": "response.content_part.added", **here, "part": {**part, "text": ""}}
            yield {"type": f"{name}.delta", **here, "delta": part["text"], **rest}
            yield {"type": f"{name}.done", **here, "text": part["text"], **rest}
            yield {"type": "response.content_part.done", **here, "part": part}
        if "arguments" in item:
            name = "response.function_call_arguments"
            yield {"type": f"{name}.delta", **place, "delta": item["arguments"]}
            yield {"type": f"{name}.done", **place, "arguments": item["arguments"]}
        yield {"type": "response.output_item.done", "output_index": index, "item": item}
    yield {"type": f"response.{ended['status']}", "response": ended}
