"""OpenAI's chat completions: requests checked and read, answers written.

A parameter is honoured, overridden by the run (`OVERRIDDEN`), without effect on what is sampled (`WITHOUT_EFFECT`), or
refused with its name. None is ignored.

Source: OpenAI's API reference, "Create chat completion"; openai-python 3.52, `types/chat/completion_create_params.py`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .asked import Asked, Message, Said
from .errors import RefusedError
from .reading import Pictures, checked, content_of, limit_of, messages_of, overridden_of, stops_of, switch_of

HONOURED = (
    "messages",
    "tools",
    "max_tokens",
    "max_completion_tokens",
    "stop",
    "stream",
    "stream_options",
    "model",
    "n",
    "logprobs",
)
OVERRIDDEN = ("temperature", "top_p", "top_k", "min_p", "seed", "tool_choice", "reasoning_effort", "verbosity")
"""Parameters that change the distribution. The run's settings hold, with which log-probs are computed, and the model
chooses whether it calls a tool, and how. The value "none" of `tool_choice` is honoured: no tools are shown. A function
that is `strict` is served as any other, and this is said."""
WITHOUT_EFFECT = (
    "user",
    "metadata",
    "store",
    "service_tier",
    "parallel_tool_calls",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
)
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "top_logprobs": (0,),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
}
"""Values of parameters that change nothing. None is one of them everywhere."""
PICTURES: Pictures = {"image_url": lambda part: part["image_url"]["url"]}
SHOWN_IMAGES = ("user", "tool")
"""The roles whose messages may have images."""
ROLES = {"developer": "system", "system": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


def read(body: Any) -> Asked:
    """Return what a request asks for.

    Args:
        body: the request's JSON.

    Raises:
        RefusedError: the request is not one that is served; names the parameter.
    """
    given = checked(body, (*HONOURED, *OVERRIDDEN, *WITHOUT_EFFECT), NEUTRAL)
    tools = _tools(given.get("tools", []))
    choice = given.pop("tool_choice", "auto")
    if choice not in ("auto", "none"):
        given["tool_choice"] = choice
    functions = [tool["function"] for tool in given.get("tools", [])]
    limits = [limit_of(name, given[name]) for name in ("max_tokens", "max_completion_tokens") if name in given]
    return Asked(
        messages=[_message(number, message) for number, message in enumerate(messages_of(given))],
        tools=[] if choice == "none" else tools,
        max_tokens=min(limits, default=None),
        stop=stops_of("stop", given.get("stop", [])),
        choices=limit_of("n", given.get("n", 1)),
        logprobs=switch_of("logprobs", given.get("logprobs", False)),
        overridden=overridden_of(given, OVERRIDDEN, NEUTRAL, strict=functions),
    )


def _tools(tools: Any) -> list[Mapping[str, Any]]:
    good = isinstance(tools, list) and all(
        isinstance(tool, dict)
        and tool.get("type") == "function"
        and isinstance(tool.get("function"), dict)
        and isinstance(tool["function"].get("name"), str)
        for tool in tools
    )
    if not good:
        raise RefusedError(
            'tools: only functions are served, each {"type": "function", "function": {"name": …}}.', parameter="tools"
        )
    return [{**tool, "function": {k: v for k, v in tool["function"].items() if k != "strict"}} for tool in tools]


def _message(number: int, message: Any) -> Message:
    name = f"messages[{number}]"
    role = message.get("role") if isinstance(message, dict) else None
    if not isinstance(role, str) or role not in ROLES:
        raise RefusedError(f"{name}: its role is none of {', '.join(ROLES)}.", parameter="messages")
    pictures = PICTURES if role in SHOWN_IMAGES else {}
    read: Message = {"role": ROLES[role], "content": content_of(name, message.get("content"), pictures)}
    calls = message.get("tool_calls")
    if calls:
        try:
            functions = [call["function"] for call in calls]
            read["tool_calls"] = [
                {"type": "function", "function": {"name": f["name"], "arguments": json.loads(f["arguments"] or "{}")}}
                for f in functions
            ]
        except (TypeError, KeyError, ValueError):
            raise RefusedError(f"{name}: its tool_calls cannot be read.", parameter="messages") from None
    if message.get("name"):
        read["name"] = message["name"]
    return read


# --- answers ----------------------------------------------------------------------------------------------------------


def written(body: Mapping[str, Any], choices: Sequence[Said], number: str) -> dict[str, Any]:
    """Return the answer to a request, as one JSON object.

    Args:
        body: the request's JSON.
        choices: the model's messages, as many as were asked for.
        number: the answer's id.
    """
    return {
        **_head(body, number, "chat.completion"),
        "choices": [
            {
                "index": index,
                "message": _answer(said.message, f"{number}_{index}"),
                "logprobs": _logprobs(said),
                "finish_reason": _reason(said),
            }
            for index, said in enumerate(choices)
        ],
        "usage": usage_of(choices),
    }


def streamed(body: Mapping[str, Any], choices: Sequence[Said], number: str) -> Iterator[dict[str, Any]]:
    """Yield the answer to a request as the chunks of a stream.

    Args:
        body: the request's JSON.
        choices: the model's messages, as many as were asked for.
        number: the answer's id.
    """
    head = _head(body, number, "chat.completion.chunk")
    usage = (body.get("stream_options") or {}).get("include_usage")
    rest = {"usage": None} if usage else {}
    for index, said in enumerate(choices):
        message = _answer(said.message, f"{number}_{index}")
        calls = [{"index": place, **call} for place, call in enumerate(message.pop("tool_calls", []))]
        told, ended = {"index": index, "logprobs": None, "finish_reason": None}, _reason(said)
        yield {**head, "choices": [{**told, "delta": message, "logprobs": _logprobs(said)}], **rest}
        if calls:
            yield {**head, "choices": [{**told, "delta": {"tool_calls": calls}}], **rest}
        yield {**head, "choices": [{**told, "delta": {}, "finish_reason": ended}], **rest}
    if usage:
        yield {**head, "choices": [], "usage": usage_of(choices)}


def refused(error: RefusedError) -> dict[str, Any]:
    """Return the answer to a request that is refused."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    return {"error": {"message": error.message, "type": kind, "param": error.parameter, "code": error.code}}


def _head(body: Mapping[str, Any], number: str, kind: str) -> dict[str, Any]:
    model = body.get("model") or "policy"
    return {"id": f"chatcmpl-{number}", "object": kind, "created": int(time.time()), "model": model}


def _answer(message: Message, number: str) -> Message:
    calls = [
        {
            "id": f"call_{number}_{index}",
            "type": "function",
            "function": {
                "name": call["function"]["name"],
                "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False),
            },
        }
        for index, call in enumerate(message.get("tool_calls") or ())
    ]
    content = message.get("content")
    answer: Message = {"role": "assistant", "content": content or (None if calls else "")}
    if message.get("reasoning_content"):
        answer["reasoning_content"] = message["reasoning_content"]
    return answer | ({"tool_calls": calls} if calls else {})


def _reason(said: Said) -> str:
    if said.length:
        return "length"
    return "tool_calls" if said.message.get("tool_calls") else "stop"


def _logprobs(said: Said) -> dict[str, Any] | None:
    if said.logprobs is None:
        return None
    return {
        "content": [
            {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
            for text, logprob in said.logprobs
        ],
        "refusal": None,
    }


def usage_of(choices: Sequence[Said]) -> dict[str, int]:
    """Return the counts of tokens of an answer.

    Args:
        choices: the model's messages.
    """
    prompt, sampled = choices[0].prompt_tokens, sum(said.completion_tokens for said in choices)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": sampled,
        "total_tokens": prompt + sampled,
    }
